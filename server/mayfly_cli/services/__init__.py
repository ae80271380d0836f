"""Mayfly as a service of the system: launchd's on macOS, systemd's on Linux.

::

    Service (what is to run) --> Manager.files: a text for each path --> written, checked, started
                                 Manager.status <-- what launchctl or systemctl prints
"""

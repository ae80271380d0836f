"""Mayfly as a service of the system, under launchd on macOS or systemd on Linux.

::

    Service --> ServiceManager.files: a text for each path --> written, checked, started
                ServiceManager.status <-- output of launchctl or systemctl
"""

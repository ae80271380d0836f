"""Mayfly as a service of the operating system, under launchd on macOS or systemd on Linux.

::

    Service --> ServiceManager.files: text of each file --> written, checked, started
                ServiceManager.status <-- output of launchctl or systemctl
"""

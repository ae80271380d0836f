"""A virtual network for tests (Linux, root): machines, each a network namespace, on one switch.

::

    mac-1 -- eth0 --\\
    mac-2 -- eth0 ---- br0 (the switch's own namespace), 10.77.0.0/24
    gateway - eth0 --/

The host's own network is not touched. A namespace's name holds the id and start time of the process
that made the namespace. Before a new network is made, namespaces whose process has died are removed
with all processes that still run in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

import psutil

T = TypeVar("T")

PREFIX = "mayfly-test"
MOUNTED = Path("/run/netns")
CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"


_serial = itertools.count()


class CommandFailed(Exception):
    """An ``ip`` or ``tc`` command failed; the text is its stderr."""


def ip(*arguments: str) -> str:
    """Runs ``ip`` and returns its output. Raises CommandFailed."""
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_no_networks() -> str:
    """Returns the reason why this system cannot make virtual networks; empty if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in ("ip", "tc", "setpriv", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is missing"
    try:
        with Network() as network:
            network.machine("probe", 2)
    except CommandFailed as refused:
        return str(refused)
    return ""


def why_no_discipline(*discipline: str) -> str:
    """Returns the kernel's error when a queueing discipline of tc(8) is set; empty if the kernel
    has the discipline."""
    with Network() as network:
        try:
            traffic_control(network.switch, "add", "dev", "br0", "root", *discipline)
        except CommandFailed as refused:
            return str(refused)
    return ""


class Machine:
    """A simulated host in a network namespace. ``number`` is the last part of its IP address."""

    def __init__(self, switch: str, run: str, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.namespace = f"{run}-{name}"
        self._switch = switch
        self._port = f"p{number}"
        self._started: list[subprocess.Popen[bytes]] = []
        ip("netns", "add", self.namespace)
        peer = ("peer", "name", "eth0", "netns", self.namespace)
        ip("-n", switch, "link", "add", self._port, "type", "veth", *peer)
        ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        # A machine that takes over another machine's address announces it (gratuitous ARP).
        self.do(lambda: Path("/proc/sys/net/ipv4/conf/eth0/arp_notify").write_text("1"))
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def start(self, command: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
        """Starts a process on the machine, with the machine's name as its host name. The process is
        killed when the test process ends."""
        process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace),
                *("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Takes the machine's network link down; other machines get no notice."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        ip("-n", self._switch, "link", "set", self._port, "up")

    @contextlib.contextmanager
    def behind(self, *discipline: str) -> Iterator[None]:
        """Puts a queueing discipline of tc(8), such as a delay, on both directions of the machine's
        link until the context ends."""
        places = self._places()
        for namespace, device in places:
            traffic_control(namespace, "add", "dev", device, "root", *discipline)
        try:
            yield
        finally:
            for namespace, device in places:
                traffic_control(namespace, "del", "dev", device, "root")

    def dropped(self) -> int:
        """Returns the number of packets that the queues of the machine's link have dropped."""
        shown = (traffic_control(ns, "show", "dev", dev, show="-s") for ns, dev in self._places())
        return sum(int(count) for text in shown for count in re.findall(r"dropped (\d+)", text))

    def _places(self) -> list[tuple[str, str]]:
        """The namespace and device of both ends of the machine's link."""
        return [(self._switch, self._port), (self.namespace, "eth0")]

    def do(self, act: Callable[[], T]) -> T:
        """Calls a function on a thread in the machine's network namespace; sockets that the
        function opens stay in that network."""
        return _in_namespace(self.namespace, act)

    def remove(self) -> None:
        """Ends all processes of the machine and removes its namespace. May be called twice."""
        with contextlib.suppress(CommandFailed):  # the link has been removed before
            # With its namespace the cable would go too, but at a time of the kernel's choosing.
            ip("-n", self._switch, "link", "del", self._port)
        remove(self.namespace)
        for process in self._started:
            process.wait(20)


class Network:
    """A context manager for a virtual switch and its machines. At its end all processes on the
    machines are killed and the network is removed."""

    def __init__(self) -> None:
        began = int(psutil.Process().create_time())
        self._run = f"{PREFIX}-{os.getpid()}-{began}-{next(_serial)}"
        self.switch = f"{self._run}-switch"
        self._machines: list[Machine] = []

    def __enter__(self) -> Network:
        remove_leftovers()
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
        except CommandFailed:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def machine(self, name: str, number: int) -> Machine:
        machine = Machine(self.switch, self._run, name, number)
        self._machines.append(machine)
        return machine

    def capture(self, machine: Machine, device: str) -> Capture:
        return Capture(machine.namespace, device)

    def close(self) -> None:
        for machine in self._machines:
            machine.remove()
        for name in namespaces():
            if name.startswith(f"{self._run}-"):
                remove(name)


class Capture:
    """A context manager that records in ``seen`` all bytes that pass a network device."""

    def __init__(self, namespace: str, device: str) -> None:
        def sniffer() -> socket.socket:
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # all
            sniffer.bind((device, 0))
            sniffer.settimeout(0.1)
            return sniffer

        self.seen = bytearray()
        self._over = threading.Event()
        self._socket = _in_namespace(namespace, sniffer)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self.seen += self._socket.recv(1 << 17)


def traffic_control(namespace: str, what: str, *arguments: str, show: str = "") -> str:
    """Runs ``tc qdisc`` and returns its output. Raises CommandFailed."""
    options = [show] if show else []
    return _command("tc", *options, "-n", namespace, "qdisc", what, *arguments)


def namespaces() -> list[str]:
    """Returns the names of all network namespaces that runs of Mayfly's tests have made."""
    if not MOUNTED.exists():
        return []
    return sorted(each.name for each in MOUNTED.iterdir() if each.name.startswith(f"{PREFIX}-"))


@contextlib.contextmanager
def leftovers_kept() -> Iterator[None]:
    """Locks out :func:`remove_leftovers`, in every process, until the context ends."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_leftovers() -> None:
    """Removes the namespaces of test runs whose process has ended (no process has its id now, or a
    later one has)."""
    with leftovers_kept():
        for name in namespaces():
            _, _, pid, began, *_ = name.split("-")
            try:
                lives = int(psutil.Process(int(pid)).create_time()) == int(began)
            except psutil.NoSuchProcess:
                lives = False
            if not lives:
                remove(name)


def remove(namespace: str) -> None:
    """Kills all processes in a network namespace, then removes the namespace. Does nothing if the
    namespace does not exist."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            pids = [int(pid) for pid in ip("netns", "pids", namespace).split()]
        except CommandFailed:
            return
        pids = [pid for pid in pids if pid != os.getpid()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    ip("netns", "del", namespace)


def _in_namespace(namespace: str, act: Callable[[], T]) -> T:
    """Calls a function on a new thread that has moved into a network namespace; returns the result
    or raises the function's exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(namespace: str) -> None:
    """Moves the calling thread for good into a network namespace; sockets that it opens later are
    in that network. (Calls setns of the C library: Python has none before 3.12.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    with (MOUNTED / namespace).open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)

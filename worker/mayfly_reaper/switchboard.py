"""Everybody that the reaper talks with.

::

    workers, command line ---- ipc ---> local exchange     whatever they are entitled to say
    front ends of this machine ipc ---/
    front ends of any machine  tcp ---> gateway            questions, and what to quarantine

Both have a ZeroMQ context, and so an I/O thread, of their own: nothing that comes from a network
keeps the words of workers waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import zmq

from mayfly_protocol import codec
from mayfly_protocol.lifecycle import ToSlot
from mayfly_protocol.roster import FromNode, Roster
from mayfly_reaper.exchange import Exchange
from mayfly_reaper.gateway import Gateway, Question
from mayfly_reaper.paths import Runtime
from mayfly_reaper.settings import NodeSettings


class Switchboard:
    """Bound at once; closed with the stack. Raises StartError where the gateway cannot be."""

    def __init__(
        self,
        settings: NodeSettings,
        runtime: Runtime,
        poller: zmq.Poller,
        stack: ExitStack,
        note: Callable[[str], None],
    ) -> None:
        self._local = Exchange(poller, stack)
        self._local.control.bind(runtime.control)
        self._local.roster.bind(runtime.roster)
        self._gateway: Gateway | None = None
        if settings.network is not None:
            self._gateway = Gateway(settings.network, settings.state_dir, poller, stack, note)

    @property
    def refused(self) -> Mapping[str, int]:
        """How often front ends were refused something, by reason; grows."""
        return self._gateway.refusals.counts if self._gateway is not None else {}

    def words(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """What has come in on this machine: who said it, and its frames."""
        for identity, *frames in self._local.words():
            yield identity.bytes, [frame.bytes for frame in frames]

    def questions(self) -> Iterator[Question]:
        """What front ends have sent over the network."""
        if self._gateway is not None:
            yield from self._gateway.questions()

    def subscribed(self) -> bool:
        """Whether somebody has begun to listen to the rosters since."""
        beyond = self._gateway is not None and self._gateway.subscribed()
        return self._local.subscribed() or beyond

    def tell_worker(self, slot: str, incarnation: int, message: ToSlot) -> None:
        self._local.send(f"{slot}#{incarnation}".encode(), message)

    def reply(self, identity: bytes, message: FromNode) -> None:
        self._local.send(identity, message)

    def publish(self, roster: Roster) -> None:
        frame = codec.encode(roster)
        self._local.publish(frame)
        if self._gateway is not None:
            self._gateway.publish(frame)

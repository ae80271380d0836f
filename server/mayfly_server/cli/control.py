"""Talking to a running node. It is found by its state directory, and needs no front end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from mayfly_protocol.roster import Done, FromNode, Roster, ToNode

ANSWER_S = 5.0

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The server's state directory, if it was started with one.",
        envvar="MAYFLY_STATE_DIR",
        show_envvar=False,
        file_okay=False,
    ),
]


def state_directory(given: Path | None) -> Path:
    """The one that was given, or the platform's."""
    import platformdirs

    return (given or platformdirs.user_state_path("mayfly")).resolve()


def tell(state_dir: Path, message: ToNode) -> Done:
    """What the node says to a command. Ends this one where there is no node, or it refuses."""
    from mayfly_protocol.roster import Done

    answer = _exchange(state_dir, message)
    if not isinstance(answer, Done):
        fail(f"the server answers with {type(answer).__name__} to a command")
    if not answer.ok:
        fail(answer.message)
    return answer


def ask(state_dir: Path) -> Roster:
    """The node's roster. Ends the command where there is no node."""
    from mayfly_protocol.roster import Ask, Roster

    answer = _exchange(state_dir, Ask())
    if not isinstance(answer, Roster):
        fail(f"the server answers with {type(answer).__name__} to a question")
    return answer


def _exchange(state_dir: Path, message: ToNode) -> FromNode:
    import zmq

    from mayfly_protocol import codec
    from mayfly_protocol.sockets import configure

    if not serves(state_dir):
        fail(f"no server runs with the state directory {state_dir}; --state-dir names another one")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        configure(socket)
        socket.connect(_control(state_dir))
        socket.send(codec.encode(message))
        if not socket.poll(int(ANSWER_S * 1000)):
            fail(f"the server with the state directory {state_dir} does not answer")
        return codec.from_node.decode(socket.recv())


def serves(state_dir: Path) -> bool:
    """Whether a node has its sockets there; one that was killed may have left them."""
    return Path(_control(state_dir).removeprefix("ipc://")).exists()


def _control(state_dir: Path) -> str:
    from mayfly_reaper.paths import runtime_of

    return runtime_of(state_dir).control

"""Talking to a running node. It is found by its state directory, and needs no front end.

``mayfly recycle``: fresh workers for those that serve.

``mayfly drain``: an end that cuts nobody short.

``mayfly quarantine``: the requests that are refused because workers died of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mayfly_cli.failure import fail

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
    from mayfly_protocol.transport.sockets import configure

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


def recycle(
    slot: Annotated[
        str | None, typer.Argument(help="The slot, as `mayfly status` names it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All slots, one after the other.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Replace workers in good order.

    What they run goes on. A slot that failed or waits is tried again at once.
    """
    from mayfly_protocol.roster import Recycle

    if (slot is not None) == every:
        raise typer.BadParameter("name one slot, or say --all", param_hint="SLOT")
    typer.echo(tell(state_directory(state_dir), Recycle(slot or "")).message)


LOOK_S = 0.1


def drain(
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests may still take.", min=0)
    ] = 60.0,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return only when the server has ended.")
    ] = True,
    state_dir: StateDir = None,
) -> None:
    """Take no new requests, finish those that run, and end the server.

    A Ctrl-C here ends the waiting, not the draining.
    """
    import time

    from mayfly_protocol.roster import DrainNode

    state = state_directory(state_dir)
    typer.echo(tell(state, DrainNode(grace)).message)
    while wait and serves(state):
        time.sleep(LOOK_S)


app = typer.Typer(
    name="quarantine",
    help="See and release requests that are refused because workers died of them.",
    no_args_is_help=True,
)


@app.command("list")
def entries(
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Show what is refused, what workers died of, and for how long it will be.

    A request is known by a fingerprint: a hash of its model, its prompt and its parameters.
    """
    found = ask(state_directory(state_dir)).quarantined
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(entry) for entry in found], indent=2))
        return
    for entry in found:
        typer.echo(f"{entry.fingerprint}  {entry.kind}  {_time(entry.left_s)} left")
    if not found:
        typer.echo("nothing is in quarantine")


@app.command()
def clear(
    fingerprint: Annotated[
        str, typer.Argument(help="Its fingerprint, or how that begins; everything by default.")
    ] = "",
    state_dir: StateDir = None,
) -> None:
    """Take such requests again."""
    from mayfly_protocol.roster import Release

    typer.echo(tell(state_directory(state_dir), Release(fingerprint)).message)


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

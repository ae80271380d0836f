"""Commands to a running node on this machine. The node is found by its state directory, and no
front end is needed.

- ``mayfly recycle`` replaces workers.
- ``mayfly drain`` ends the node after its running requests have finished.
- ``mayfly quarantine`` lists or releases requests that are refused because workers died of them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_protocol.roster import Done, FromNode, Roster, ToNode

app = typer.Typer(
    name="quarantine",
    help="List and release requests that are refused because workers died of them.",
    no_args_is_help=True,
)

ANSWER_S = 5.0
"""Seconds within which a node has to answer a command."""
POLL_S = 0.1

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
    """Returns the given state directory, or the platform's usual one, as an absolute path."""
    import platformdirs

    return (given or platformdirs.user_state_path("mayfly")).resolve()


def recycle(
    slot: Annotated[
        str | None, typer.Argument(help="The slot to recycle, as `mayfly status` names it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All slots, one after the other.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Replace workers without losing requests.

    Running requests go on. If a slot has no worker because its starts failed, one starts at once.
    """
    from mayfly_protocol.roster import Recycle

    if (slot is not None) == every:
        raise typer.BadParameter("name one slot, or say --all", param_hint="SLOT")
    typer.echo(send_command(state_directory(state_dir), Recycle(slot or "")).message)


def drain(
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests may still take.", min=0)
    ] = 60.0,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return only when the server has ended.")
    ] = True,
    state_dir: StateDir = None,
) -> None:
    """Take no new requests, finish the running ones, and end the server.

    Ctrl-C ends only this command's waiting; the server still finishes its requests and ends.
    """
    from mayfly_protocol.roster import DrainNode

    state = state_directory(state_dir)
    typer.echo(send_command(state, DrainNode(grace)).message)
    while wait and has_node(state):
        time.sleep(POLL_S)


@app.command("list")
def list_quarantined(
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """List the refused requests, the fault that each caused, and for how long each is refused.

    A request is known by a fingerprint: a hash of its model, its prompt and its parameters.
    """
    found = read_roster(state_directory(state_dir)).quarantined
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(entry) for entry in found], indent=2))
        return
    for entry in found:
        typer.echo(f"{entry.fingerprint}  {entry.kind}  {_duration(entry.left_s)} left")
    if not found:
        typer.echo("nothing is in quarantine")


@app.command()
def clear(
    fingerprint: Annotated[
        str,
        typer.Argument(help="A request's fingerprint, or its beginning; by default all requests."),
    ] = "",
    state_dir: StateDir = None,
) -> None:
    """Release requests from quarantine, so that they are accepted again."""
    from mayfly_protocol.roster import Release

    typer.echo(send_command(state_directory(state_dir), Release(fingerprint)).message)


def send_command(state_dir: Path, message: ToNode) -> Done:
    """Sends a command to the node with this state directory, and returns the node's answer. Ends
    the ``mayfly`` command with an error if no node runs or answers, or if it refuses."""
    from mayfly_protocol.roster import Done

    answer = _exchange(state_dir, message)
    if not isinstance(answer, Done):
        fail(f"the server answers with {type(answer).__name__} to a command")
    if not answer.ok:
        fail(answer.message)
    return answer


def read_roster(state_dir: Path) -> Roster:
    """Asks the node with this state directory for its roster: the list of its workers and
    quarantined requests. Ends the ``mayfly`` command with an error if no node runs or answers."""
    from mayfly_protocol.roster import Ask, Roster

    answer = _exchange(state_dir, Ask())
    if not isinstance(answer, Roster):
        fail(f"the server answers with {type(answer).__name__} to a question")
    return answer


def has_node(state_dir: Path) -> bool:
    """True if the sockets of a node with this state directory exist. A node that was killed may
    have left its sockets behind."""
    return Path(_control_address(state_dir).removeprefix("ipc://")).exists()


def _exchange(state_dir: Path, message: ToNode) -> FromNode:
    import zmq

    from mayfly_protocol import codec
    from mayfly_protocol.transport.sockets import configure

    if not has_node(state_dir):
        fail(f"no server runs with the state directory {state_dir}; --state-dir names another one")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        configure(socket)
        socket.connect(_control_address(state_dir))
        socket.send(codec.encode(message))
        if not socket.poll(int(ANSWER_S * 1000)):
            fail(f"the server with the state directory {state_dir} does not answer")
        return codec.from_node.decode(socket.recv())


def _control_address(state_dir: Path) -> str:
    from mayfly_reaper.paths import runtime_of

    return runtime_of(state_dir).control


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

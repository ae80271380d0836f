"""Three Macs and a gateway: machines die, cables are pulled and everything is replaced, and no
request that a surviving front end held is lost or changed.

The tests share one fleet, and each leaves it whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.fleet import PROMPTS, Fleet, FleetLoad, fleet, wait_for
from support.network_namespaces import why_no_discipline, why_no_networks

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

CUT_S = 10.0
TRIES = 4
LOSSY = ("netem", "delay", "40ms", "10ms", "loss", "3%")
SLOW = ("tbf", "rate", "600kbit", "burst", "3kb", "latency", "50ms")


@pytest.fixture(scope="module")
def site(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if reason := why_no_networks():
        pytest.skip(f"no networks here: {reason}")
    with fleet(tiny_model, tmp_path_factory.mktemp("fleet")) as built:
        yield built


@pytest.fixture(autouse=True)
def whole(site: Fleet) -> Iterator[None]:
    site.mend()
    yield
    site.mend()


def generated(site: Fleet) -> dict[str, int]:
    """Tokens that each node has made, by its name."""
    return {
        name: sum(slot["generated_tokens"] for slot in node["slots"])
        for name, node in site.fronts[0].nodes().items()
    }


def continuations(site: Fleet) -> float:
    """Attempts that took over from another worker, through all front ends that are there."""
    return sum(front.metric("mayfly_continuations_total") for front in site.fronts)


def test_load_over_three_nodes_and_nobody_on_the_way_can_read_it(site: Fleet) -> None:
    before = generated(site)
    with (
        site.network.capture(site.gateway, "eth0") as outside,
        site.network.capture(site.gateway, "lo") as inside,
        FleetLoad(site) as load,
    ):
        load.wait_more(20)
    assert load.wrong == []
    assert set(load.done) == {front.number for front in site.fronts}
    wait_for(
        lambda: all(made > before[name] for name, made in generated(site).items()),
        "every node's share in it",
    )
    word = PROMPTS[0].encode()
    assert word in inside.seen, "clients speak to front ends in the clear, so it would be found"
    assert len(outside.seen) > 10_000
    assert word not in outside.seen


def again_until_a_request_moved(site: Fleet, disturb: Callable[[], None]) -> None:
    """A node that had work by its last roster may have none when it is disturbed."""
    before = continuations(site)
    for _ in range(TRIES):
        disturb()
        if continuations(site) > before:
            return
    raise AssertionError("no request was on a node that was disturbed")


def test_a_node_is_killed(site: Fleet) -> None:
    with FleetLoad(site) as load:

        def kill() -> None:
            site.mend()
            load.wait_more(1)
            site.busiest().running.kill()
            load.wait_more(6)

        again_until_a_request_moved(site, kill)
    assert load.wrong == []


def test_a_link_is_cut_and_heals(site: Fleet) -> None:
    with FleetLoad(site) as load:

        def cut() -> None:
            load.wait_more(1)
            apart = site.busiest().machine
            cut_at = time.monotonic()
            apart.cut()
            try:
                load.wait_more(6)
                time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))  # so long is the outage
            finally:
                apart.heal()
            site.wait_whole()
            before = generated(site)[apart.name]
            wait_for(lambda: generated(site)[apart.name] > before, "work for it again")

        again_until_a_request_moved(site, cut)
    assert load.wrong == []


def test_a_link_delays_and_loses(site: Fleet) -> None:
    if reason := why_no_discipline(*LOSSY):
        pytest.skip(f"the kernel cannot do that to a link: {reason}")
    with site.nodes[2].machine.behind(*LOSSY), FleetLoad(site) as load:
        load.wait_more(9)
    assert load.wrong == []


def test_links_are_too_slow(site: Fleet) -> None:
    """Slower than what the nodes have to say: packets wait, and are dropped where too many do."""
    if reason := why_no_discipline(*SLOW):
        pytest.skip(f"the kernel cannot do that to a link: {reason}")
    links = [node.machine for node in site.nodes]
    with ExitStack() as stack:
        for link in links:
            stack.enter_context(link.behind(*SLOW))
        with FleetLoad(site) as load:
            load.wait_more(6)
        dropped = sum(link.dropped() for link in links)
    assert load.wrong == []
    assert dropped > 0


def used(site: Fleet, name: str) -> bool:
    """Returns True if any front end sends requests to a node."""
    return any(name in front.usable() for front in site.fronts)


def test_a_node_is_replaced_under_the_same_address(site: Fleet) -> None:
    """Another machine: its key has to be the old one's, and nothing of its past is taken for its
    own."""
    old = site.nodes[2]
    name = old.machine.name
    with FleetLoad(site, clients=3, think_s=1.5) as load:  # two nodes start meanwhile
        load.wait_more(3)
        epoch = site.fronts[0].nodes()[name]["epoch"]
        old.running.kill()
        old.machine.remove()
        stranger = site.node(3, "stranger")
        try:
            wait_for(lambda: "ready (" in stranger.running.log(), "the stranger to be ready")
            wait_for(lambda: not used(site, name), "the old one to be given up")
            load.wait_more(6)
            assert not used(site, name), "the stranger's key is another one"
        finally:  # the other tests need a third node, whatever becomes of this one
            stranger.running.kill()
            stranger.machine.remove()
            # With the old one's key, as from a backup.
            shutil.copytree(old.folder / "state/wire", site.folder / "heir/state/wire")
            site.nodes[2] = site.node(3, "heir")
        site.wait_whole()
        before = generated(site)[name]
        wait_for(lambda: generated(site)[name] > before, "work for it")
    assert load.wrong == []
    assert site.fronts[0].nodes()[name]["epoch"] != epoch


def test_a_front_end_is_killed_among_three(site: Fleet) -> None:
    lost = site.fronts[0]
    with FleetLoad(site) as load:
        load.wait_more(3)
        load.killed.add(lost.number)
        lost.running.kill()
        load.wait_more(9)
    assert load.wrong == []
    # Its workers have noticed: nothing of it runs on.
    other = site.fronts[1]
    wait_for(
        lambda: all(
            slot["running"] + slot["waiting"] == 0
            for node in other.nodes().values()
            for slot in node["slots"]
        ),
        "nothing to run without clients",
    )


def test_everything_is_restarted_one_by_one_under_load(site: Fleet) -> None:
    with FleetLoad(site, clients=3, think_s=1.5) as load:
        load.wait_more(3)
        for node in site.nodes:
            node.running.stop()
            load.wait_more(1)
            node.start()
            site.wait_whole()
        for front in site.fronts:
            load.avoided.add(front.number)
            front.running.stop()
            front.start()
            wait_for(front.ready, "the new front end")
            load.avoided.discard(front.number)
            load.wait_more(1)
    assert load.wrong == []

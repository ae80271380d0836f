"""Dashboards, alert rules and their files fit together, and name metrics that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import GRAFANA, dashboards, filled_in, queries, variables
from support.required_programs import require_program

PROMETHEUS = GRAFANA / "prometheus"
DOCS = GRAFANA.parent / "docs"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in read(PROMETHEUS / name)["groups"] for rule in group["rules"]]


ALERTS = [rule["alert"] for rule in rules("alerts.yml")]


def known_metrics() -> set[str]:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(mayfly_\w+)` \| (counter|gauge|histogram) \|", text, re.M)
    names = {name for name, kind in found if kind != "histogram"}
    for name, kind in found:
        if kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names


@pytest.mark.process
def test_the_dashboards_are_those_that_are_described(tmp_path: Path) -> None:
    for kept in (GRAFANA / "dashboards").iterdir():
        (tmp_path / kept.name).write_bytes(kept.read_bytes())
    code = "import generate, sys, pathlib; generate.FOLDER = pathlib.Path(sys.argv[1]); "
    code += "generate.main()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=GRAFANA, check=True)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in (GRAFANA / "dashboards").iterdir()}
    assert made == kept, "run `make dashboards`"
    assert set(dashboards()) == {"overview", "worker", "latency", "memory", "fleet"}


def test_nothing_is_asked_for_that_does_not_exist() -> None:
    known = known_metrics()
    asked = dict(queries())
    asked |= {rule["alert"]: rule["expr"] for rule in rules("alerts.yml")}
    asked |= {rule["record"]: rule["expr"] for rule in rules("recording.yml")}
    asked |= {where: metric for where, metric, _ in variables()}
    for where, query in asked.items():
        for name in re.findall(r"\bmayfly_\w+", query):
            assert name in known, f"{where}: {name}"
    recorded = {rule["record"] for rule in rules("recording.yml")}
    for rule in rules("alerts.yml"):
        assert set(re.findall(r"\bmayfly:\w+:\w+", rule["expr"])) <= recorded


def test_every_metric_is_somewhere_to_be_seen() -> None:
    """But for a few that say of another one what it is out of, or by whom."""
    shown = " ".join(query for _, query in queries())
    unseen = {name for name in known_metrics() if name not in shown}
    unseen = {re.sub("_(bucket|sum|count)$", "", name) for name in unseen}
    seen_by_parts = {name for name in unseen if f"{name}_" in shown}
    assert unseen - seen_by_parts == {
        "mayfly_prompt_tokens_cached_total",
        "mayfly_quarantine_refusals_total",
        "mayfly_quarantined_total",
        "mayfly_worker_inferences_total",
        "mayfly_worker_prefill_tokens_total",
        "mayfly_worker_starts_total",
    }


def test_panels_do_not_overlap() -> None:
    for dashboard in dashboards().values():
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_runbook(name: str) -> None:
    [rule] = [rule for rule in rules("alerts.yml") if rule["alert"] == name]
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (GRAFANA.parent / file).read_text("utf-8"), re.M)
    assert anchor in {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    """Returns the anchor that Markdown renderers make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_firing_and_not(name: str) -> None:
    told = [
        bool(case.get("exp_alerts"))
        for test in read(PROMETHEUS / "alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert set(told) == {True, False}


def test_what_the_containers_are_given_is_there() -> None:
    composed = read(GRAFANA / "compose.yaml")
    for service in composed["services"].values():
        for volume in service["volumes"]:
            place, _, _ = volume.partition(":")
            assert place in composed["volumes"] or (GRAFANA / place).is_dir()
    [provider] = read(GRAFANA / "provisioning/dashboards/mayfly.yml")["providers"]
    mounted = [v.split(":")[1] for v in composed["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(arguments: tuple[str, ...]) -> None:
    command = [require_program("promtool"), *arguments]
    ran = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WARNING" not in ran.stdout + ran.stderr


def test_variables_are_filled_in() -> None:
    for _, query in queries():
        assert "$" not in filled_in(query, "1m")

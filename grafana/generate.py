"""Writes the dashboards beside this file: `make dashboards`.

Panels are described here in one line or three; Grafana's own JSON says the same in forty. The
files that come of it are kept, so that Grafana can be pointed at this folder as it is.
"""

from __future__ import annotations

from pathlib import Path

from panels import Dashboard, Panel, rendered

FOLDER = Path(__file__).parent / "dashboards"

MODEL = 'model=~"$model"'
SLOT = f'node=~"$node", slot=~"$slot", {MODEL}'


def quantiles(metric: str, by: str = "model") -> list[tuple[str, str]]:
    return [
        (
            f"histogram_quantile({q}, "
            f"sum by ({by}, le) (rate({metric}_bucket{{{MODEL}}}[$__rate_interval])))",
            f"{{{{{by}}}}} p{100 * q:g}",
        )
        for q in (0.5, 0.9, 0.99)
    ]


def rate(metric: str, by: str, where: str = MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def number(title: str, query: str, legend: str = "{{model}}") -> Panel:
    """What is now, in large digits."""
    return Panel(title, [(query, legend)], kind="stat", width=6)


OVERVIEW = Dashboard(
    "overview",
    "Mayfly: overview",
    [
        number("Ready workers", f'sum by (model) (mayfly_worker_state{{{MODEL}, state="ready"}})'),
        number("Requests running", f"sum by (model) (mayfly_num_requests_running{{{MODEL}}})"),
        number("Requests waiting", f"sum by (model) (mayfly_num_requests_waiting{{{MODEL}}})"),
        number(
            "Losses in a day",
            f'sum(increase(mayfly_worker_restarts_total{{{SLOT}, reason="lost"}}[1d]))',
            "lost",
        ),
        Panel(
            "Tokens per second",
            [
                (rate("mayfly_generation_tokens_total", "model"), "{{model}} generated"),
                (rate("mayfly_prompt_tokens_total", "model"), "{{model}} of prompts"),
            ],
        ),
        Panel(
            "Requests per second, by how they ended",
            [(rate("mayfly_requests_total", "outcome"), "{{outcome}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Choices per second, by why they ended",
            [(rate("mayfly_request_success_total", "finished_reason"), "{{finished_reason}}")],
            stacked=True,
        ),
        Panel(
            "Rejections per second",
            [("sum by (reason) (rate(mayfly_rejections_total[$__rate_interval]))", "{{reason}}")],
            stacked=True,
        ),
        Panel(
            "Continuations per second, by how far the prompt was",
            [(rate("mayfly_continuations_total", "phase"), "{{phase}}")],
            what="Requests that outlived their worker. Their clients need not have noticed.",
        ),
        Panel(
            "HTTP requests per second",
            [
                (
                    "sum by (route, status) (rate(mayfly_http_requests_total[$__rate_interval]))",
                    "{{route}} {{status}}",
                )
            ],
            unit="reqps",
        ),
    ],
    by=("node", "model", "slot"),
)

WORKER = Dashboard(
    "worker",
    "Mayfly: a worker's life",
    [
        Panel(
            "State",
            [(f"sum by (slot, state) (mayfly_worker_state{{{SLOT}}})", "{{slot}} {{state}}")],
            width=24,
            stacked=True,
            what="Two at a time while a worn worker's successor is loaded beside it.",
        ),
        Panel(
            "Workers that ended, by why",
            [
                (
                    "sum by (slot, reason) "
                    f"(increase(mayfly_worker_restarts_total{{{SLOT}}}[$__rate_interval]))",
                    "{{slot}} {{reason}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Faults, by kind",
            [
                (
                    "sum by (kind, scope) "
                    f"(increase(mayfly_faults_total{{{SLOT}}}[$__rate_interval]))",
                    "{{kind}} ({{scope}})",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Choices finished, and the budget",
            [
                (f"mayfly_worker_inferences_since_start{{{SLOT}}}", "{{slot}}"),
                (f"mayfly_worker_inferences_budget{{{SLOT}}}", "{{slot}} budget"),
            ],
        ),
        Panel("Age", [(f"mayfly_worker_age_seconds{{{SLOT}}}", "{{slot}}")], unit="s"),
        Panel(
            "Seconds to load, and to recover from a loss (means)",
            [
                (
                    f"sum by (slot) (increase(mayfly_worker_load_seconds_sum{{{SLOT}}}[1h])) "
                    f"/ sum by (slot) (increase(mayfly_worker_load_seconds_count{{{SLOT}}}[1h]))",
                    "{{slot}} load",
                ),
                (
                    f"sum by (slot) (increase(mayfly_worker_recovery_seconds_sum{{{SLOT}}}[1h])) "
                    "/ sum by (slot) "
                    f"(increase(mayfly_worker_recovery_seconds_count{{{SLOT}}}[1h]))",
                    "{{slot}} recovery",
                ),
            ],
            unit="s",
        ),
        Panel(
            "Age of the last heartbeat and of the last progress",
            [
                (f"mayfly_worker_heartbeat_age_seconds{{{SLOT}}}", "{{slot}} heartbeat"),
                (f"mayfly_worker_progress_age_seconds{{{SLOT}}}", "{{slot}} progress"),
            ],
            unit="s",
            what="A busy worker whose progress stands still past its budget is wedged.",
        ),
        Panel(
            "What a slot waits for",
            [(f"sum by (slot, reason) (mayfly_worker_held{{{SLOT}}})", "{{slot}} {{reason}}")],
        ),
        Panel(
            "Late messages, of all",
            [
                (
                    f"sum by (slot) (increase(mayfly_worker_late_messages_total{{{SLOT}}}[1h]))",
                    "{{slot}} late in an hour",
                ),
                (rate("mayfly_worker_messages_total", "slot", SLOT), "{{slot}} all, per second"),
            ],
        ),
    ],
    by=("node", "model", "slot"),
)

LATENCY = Dashboard(
    "latency",
    "Mayfly: latency",
    [
        Panel("Time to first token", quantiles("mayfly_time_to_first_token_seconds"), unit="s"),
        Panel("Between tokens", quantiles("mayfly_inter_token_latency_seconds"), unit="s"),
        Panel("Whole requests", quantiles("mayfly_e2e_request_latency_seconds"), unit="s"),
        Panel("In the queue", quantiles("mayfly_request_queue_time_seconds"), unit="s"),
        Panel(
            "Interruptions by lost workers, in an hour",
            [
                (
                    f"histogram_quantile({q}, sum by (model, le) "
                    f"(increase(mayfly_interruption_seconds_bucket{{{MODEL}}}[1h])))",
                    f"{{{{model}}}} p{100 * q:g}",
                )
                for q in (0.5, 0.99)
            ],
            unit="s",
        ),
        Panel(
            "Attempts, retries and continuations per second",
            [
                (rate("mayfly_request_attempts_total", "model"), "{{model}} attempts"),
                (rate("mayfly_request_retries_total", "model"), "{{model}} retries"),
                (rate("mayfly_continuations_total", "model"), "{{model}} continuations"),
            ],
        ),
        Panel(
            "Decode steps",
            quantiles("mayfly_worker_decode_step_seconds", "slot"),
            unit="s",
        ),
        Panel(
            "Chunks of prompts",
            quantiles("mayfly_worker_prefill_chunk_seconds", "slot"),
            unit="s",
        ),
        Panel(
            "Rows that decode together",
            [(f"sum by (slot) (mayfly_worker_batch_rows{{{MODEL}}})", "{{slot}}")],
        ),
        Panel(
            "Different lengths of chunks since a worker's start",
            [(f"sum by (slot) (mayfly_worker_prefill_lengths{{{MODEL}}})", "{{slot}}")],
            what="Each compiles or plans kernels anew: where this keeps growing, prefill is slow.",
        ),
    ],
)

MEMORY = Dashboard(
    "memory",
    "Mayfly: memory",
    [
        Panel(
            "Footprint of the processes",
            [
                (
                    f'sum by (slot) (mayfly_worker_memory_bytes{{{SLOT}, kind="footprint"}})',
                    "{{slot}}",
                )
            ],
            unit="bytes",
            stacked=True,
        ),
        Panel(
            "MLX: active, cached, peak",
            [
                (
                    "sum by (slot, kind) "
                    f'(mayfly_worker_memory_bytes{{{SLOT}, kind=~"active|cache|peak"}})',
                    "{{slot}} {{kind}}",
                )
            ],
            unit="bytes",
        ),
        Panel(
            "KV caches, and their budget",
            [
                (f"mayfly_worker_kv_bytes{{{SLOT}}}", "{{slot}}"),
                (f"mayfly_worker_kv_budget_bytes{{{SLOT}}}", "{{slot}} budget"),
            ],
            unit="bytes",
        ),
        Panel(
            "Prefix cache",
            [
                (
                    f'sum by (slot) (mayfly_worker_memory_bytes{{{SLOT}, kind="prefix_cache"}})',
                    "{{slot}}",
                )
            ],
            unit="bytes",
        ),
        Panel(
            "Share of prompts' tokens that the prefix cache had",
            [
                (
                    f"{rate('mayfly_worker_prompt_tokens_cached_total', 'slot', SLOT)} / "
                    f"{rate('mayfly_worker_prompt_tokens_total', 'slot', SLOT)}",
                    "{{slot}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "The machine: available, and wired where that is known",
            [('mayfly_node_memory_bytes{node=~"$node"}', "{{node}} {{kind}}")],
            unit="bytes",
        ),
        Panel(
            "Slots that wait for memory",
            [
                (
                    "sum by (slot, reason) "
                    f'(mayfly_worker_held{{{SLOT}, reason=~"memory|memory_lost"}})',
                    "{{slot}} {{reason}}",
                )
            ],
            width=24,
        ),
    ],
    by=("node", "model", "slot"),
)

FLEET = Dashboard(
    "fleet",
    "Mayfly: fleet",
    [
        Panel("Nodes heard of", [("min by (node) (mayfly_node_up)", "{{node}}")], kind="stat"),
        Panel(
            "Ready workers, as each front end sees them",
            [(f"sum by (instance, model) (mayfly_workers_ready{{{MODEL}}})", "{{instance}}")],
            kind="stat",
        ),
        Panel(
            "Ready workers, as their nodes say",
            [
                (
                    "sum by (node, model) "
                    f'(mayfly_worker_state{{{MODEL}, node=~"$node", state="ready"}})',
                    "{{node}} {{model}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Tokens per second, by node",
            [(rate("mayfly_worker_generated_tokens_total", "node"), "{{node}}")],
            stacked=True,
        ),
        Panel(
            "Requests on each node",
            [
                (f"sum by (node) (mayfly_worker_requests_running{{{MODEL}}})", "{{node}} running"),
                (f"sum by (node) (mayfly_worker_requests_waiting{{{MODEL}}})", "{{node}} waiting"),
            ],
        ),
        Panel(
            "Losses in an hour, by node",
            [
                (
                    "sum by (node) "
                    f'(increase(mayfly_worker_restarts_total{{{MODEL}, reason="lost"}}[1h]))',
                    "{{node}}",
                )
            ],
        ),
        Panel(
            "Peers that were refused on the wire, in an hour",
            [
                (
                    "sum by (by, reason) (increase(mayfly_wire_refusals_total[1h]))",
                    "{{by}} {{reason}}",
                )
            ],
        ),
        Panel(
            "Quarantine: requests that are refused",
            [("max(mayfly_quarantine_entries)", "entries")],
        ),
        Panel(
            "Late messages to front ends, of all, per second",
            [
                ("sum(rate(mayfly_late_messages_total[$__rate_interval]))", "late"),
                ("sum(rate(mayfly_messages_total[$__rate_interval]))", "all"),
            ],
        ),
        Panel(
            "Scrapes of nodes by front ends, and those without an answer, per second",
            [
                ("sum(rate(mayfly_node_scrapes_total[$__rate_interval]))", "all"),
                ("sum(rate(mayfly_node_scrape_failures_total[$__rate_interval]))", "failed"),
            ],
        ),
    ],
)

DASHBOARDS = (OVERVIEW, WORKER, LATENCY, MEMORY, FLEET)


def main() -> None:
    for dashboard in DASHBOARDS:
        path = FOLDER / f"{dashboard.name}.json"
        path.write_text(rendered(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes Grafana's dashboards into the folder beside this file: `make dashboards`.

A panel takes a few lines here and forty in Grafana's JSON. The JSON files are kept in the
repository, so that Grafana can read that folder as it is.
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
    """Makes a panel that shows the present value in large digits."""
    return Panel(title, [(query, legend)], kind="stat", width=6)


OVERVIEW = Dashboard(
    "overview",
    "Mayfly: overview",
    [
        number("Ready workers", f'sum by (model) (mayfly_worker_state{{{MODEL}, state="ready"}})'),
        number("Requests running", f"sum by (model) (mayfly_num_requests_running{{{MODEL}}})"),
        number("Requests waiting", f"sum by (model) (mayfly_num_requests_waiting{{{MODEL}}})"),
        number(
            "Workers lost in the last day",
            f'sum(increase(mayfly_worker_restarts_total{{{SLOT}, reason="lost"}}[1d]))',
            "lost",
        ),
        Panel(
            "Tokens per second",
            [
                (rate("mayfly_generation_tokens_total", "model"), "{{model}} generated"),
                (rate("mayfly_prompt_tokens_total", "model"), "{{model}} in prompts"),
            ],
        ),
        Panel(
            "Requests per second, by outcome",
            [(rate("mayfly_requests_total", "outcome"), "{{outcome}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Answers per second, by finish reason",
            [(rate("mayfly_request_success_total", "finished_reason"), "{{finished_reason}}")],
            stacked=True,
            description="A request with n > 1 has several answers (choices).",
        ),
        Panel(
            "Requests answered with an error, per second",
            [("sum by (reason) (rate(mayfly_rejections_total[$__rate_interval]))", "{{reason}}")],
            stacked=True,
        ),
        Panel(
            "Requests continued on another worker, per second, by phase",
            [(rate("mayfly_continuations_total", "phase"), "{{phase}}")],
            description="Requests whose worker was lost or gave them back, by how far they were. "
            "Their clients see a pause.",
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
    "Mayfly: workers",
    [
        Panel(
            "Workers by state",
            [(f"sum by (slot, state) (mayfly_worker_state{{{SLOT}}})", "{{slot}} {{state}}")],
            width=24,
            stacked=True,
            description="A slot is a node's place for one worker process. It has two workers while "
            "a successor loads beside the old worker.",
        ),
        Panel(
            "Workers ended, by reason",
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
            "Faults by kind and scope",
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
            "Answers since the worker's start, and the budget",
            [
                (f"mayfly_worker_inferences_since_start{{{SLOT}}}", "{{slot}}"),
                (f"mayfly_worker_inferences_budget{{{SLOT}}}", "{{slot}} budget"),
            ],
            description="A worker is replaced when it has given as many answers as its budget.",
        ),
        Panel(
            "Age of the worker process",
            [(f"mayfly_worker_age_seconds{{{SLOT}}}", "{{slot}}")],
            unit="s",
        ),
        Panel(
            "Mean time to load, and to recover from a loss",
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
            "Time since the last heartbeat and the last progress",
            [
                (f"mayfly_worker_heartbeat_age_seconds{{{SLOT}}}", "{{slot}} heartbeat"),
                (f"mayfly_worker_progress_age_seconds{{{SLOT}}}", "{{slot}} progress"),
            ],
            unit="s",
            description="A worker that has requests and makes no progress for longer than its time "
            "limit is killed and replaced.",
        ),
        Panel(
            "Slots that may not start a worker, by reason",
            [(f"sum by (slot, reason) (mayfly_worker_held{{{SLOT}}})", "{{slot}} {{reason}}")],
            description="orphans: workers of an earlier reaper (supervisor of workers) still run. "
            "pause: after a fault of the machine, the node starts no worker for a while. memory, "
            "memory_lost: the last worker's memory is not free again.",
        ),
        Panel(
            "Messages from workers to the reaper: late ones, and all",
            [
                (
                    f"sum by (slot) (increase(mayfly_worker_late_messages_total{{{SLOT}}}[1h]))",
                    "{{slot}} late, in an hour",
                ),
                (rate("mayfly_worker_messages_total", "slot", SLOT), "{{slot}} all, per second"),
            ],
            description="A late message comes from a worker that has ended already. It is dropped.",
        ),
    ],
    by=("node", "model", "slot"),
)

LATENCY = Dashboard(
    "latency",
    "Mayfly: latency",
    [
        Panel("Time to first token", quantiles("mayfly_time_to_first_token_seconds"), unit="s"),
        Panel("Time between tokens", quantiles("mayfly_inter_token_latency_seconds"), unit="s"),
        Panel("Time of whole requests", quantiles("mayfly_e2e_request_latency_seconds"), unit="s"),
        Panel("Time in the queue", quantiles("mayfly_request_queue_time_seconds"), unit="s"),
        Panel(
            "Length of interruptions after a lost worker, in the last hour",
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
            "Attempts, retries and continuations, per second",
            [
                (rate("mayfly_request_attempts_total", "model"), "{{model}} attempts"),
                (rate("mayfly_request_retries_total", "model"), "{{model}} retries"),
                (rate("mayfly_continuations_total", "model"), "{{model}} continuations"),
            ],
            description="Attempt: a prompt is sent to a worker. Retry: the attempt ended before a "
            "worker accepted it. Continuation: it ended later, and another worker took over.",
        ),
        Panel(
            "Time of a decode step",
            quantiles("mayfly_worker_decode_step_seconds", "slot"),
            unit="s",
        ),
        Panel(
            "Time of a prefill chunk",
            quantiles("mayfly_worker_prefill_chunk_seconds", "slot"),
            unit="s",
        ),
        Panel(
            "Rows in the batch",
            [(f"sum by (slot) (mayfly_worker_batch_rows{{{MODEL}}})", "{{slot}}")],
        ),
        Panel(
            "Different prefill chunk lengths since the worker's start",
            [(f"sum by (slot) (mayfly_worker_prefill_lengths{{{MODEL}}})", "{{slot}}")],
            description="Each new length compiles or plans kernels, which makes prefill slow.",
        ),
    ],
)

MEMORY = Dashboard(
    "memory",
    "Mayfly: memory",
    [
        Panel(
            "Memory footprint of worker processes",
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
            "MLX memory: active, cached, peak",
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
            "Memory of KV caches, and its budget",
            [
                (f"mayfly_worker_kv_bytes{{{SLOT}}}", "{{slot}}"),
                (f"mayfly_worker_kv_budget_bytes{{{SLOT}}}", "{{slot}} budget"),
            ],
            unit="bytes",
        ),
        Panel(
            "Memory of the prefix cache",
            [
                (
                    f'sum by (slot) (mayfly_worker_memory_bytes{{{SLOT}, kind="prefix_cache"}})',
                    "{{slot}}",
                )
            ],
            unit="bytes",
        ),
        Panel(
            "Prefix cache hit rate, in tokens of prompts",
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
            "Memory of the machine: available, and wired",
            [('mayfly_node_memory_bytes{node=~"$node"}', "{{node}} {{kind}}")],
            unit="bytes",
        ),
        Panel(
            "Slots that wait for memory before they start a worker",
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
        Panel("Nodes that report", [("min by (node) (mayfly_node_up)", "{{node}}")], kind="stat"),
        Panel(
            "Ready workers, by front end",
            [(f"sum by (instance, model) (mayfly_workers_ready{{{MODEL}}})", "{{instance}}")],
            kind="stat",
        ),
        Panel(
            "Ready workers, by node",
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
            "Requests by node",
            [
                (f"sum by (node) (mayfly_worker_requests_running{{{MODEL}}})", "{{node}} running"),
                (f"sum by (node) (mayfly_worker_requests_waiting{{{MODEL}}})", "{{node}} waiting"),
            ],
        ),
        Panel(
            "Workers lost in an hour, by node",
            [
                (
                    "sum by (node) "
                    f'(increase(mayfly_worker_restarts_total{{{MODEL}, reason="lost"}}[1h]))',
                    "{{node}}",
                )
            ],
        ),
        Panel(
            "Connections and messages refused in an hour",
            [
                (
                    "sum by (by, reason) (increase(mayfly_wire_refusals_total[1h]))",
                    "{{by}} {{reason}}",
                )
            ],
        ),
        Panel(
            "Requests in quarantine",
            [("max(mayfly_quarantine_entries)", "entries")],
            description="These requests are refused because workers died of them.",
        ),
        Panel(
            "Messages from workers to front ends, per second: late ones, and all",
            [
                ("sum(rate(mayfly_late_messages_total[$__rate_interval]))", "late"),
                ("sum(rate(mayfly_messages_total[$__rate_interval]))", "all"),
            ],
        ),
        Panel(
            "Metrics requests to nodes, per second: failed ones, and all",
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

"""Write the table of every metric into docs/statistics.md, from Octavo's own table.

Usage: python -m tools.metrics_table
"""

from __future__ import annotations

from pathlib import Path

from tools.sections import write_section

from octavo.observe.metrics.prometheus import METRICS, DeclaredMetric

PAGE = Path(__file__).parent.parent / "docs" / "statistics.md"
PER_TOKEN = {  # counted for each token, and exported by octavo.observe.metrics.prometheus itself
    "octavo_generation_tokens_total": ("counter", "", "tokens generated", "`vllm:generation_tokens_total`"),
    "octavo_inter_token_latency_seconds": (
        "histogram",
        "",
        "time between tokens",
        "`vllm:inter_token_latency_seconds`, `vllm:time_per_output_token_seconds`",
    ),
}


def table() -> str:
    """Return the table as Markdown."""
    rows = {_name(metric, metric.name): _row(metric) for metric in METRICS if metric.name} | PER_TOKEN
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in sorted(rows.items())]
    return "\n".join(["| metric | type | labels | meaning | vLLM's name |", "|---|---|---|---|---|", *lines]) + "\n"


def _row(metric: DeclaredMetric) -> tuple[str, str, str, str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    aliases = ", ".join(f"`{_name(metric, alias)}`" for alias in metric.vllm)
    return "gauge" if metric.kind == "info" else metric.kind, labels, metric.help, aliases


def _name(metric: DeclaredMetric, name: str) -> str:
    """Return a metric's name as it is exported: a counter's ends in _total."""
    return f"{name}_total" if metric.kind == "counter" else name


if __name__ == "__main__":
    write_section(PAGE, "metrics", table())

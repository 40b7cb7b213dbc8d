"""Boards find their series: vLLM's names, the queries of its documented Grafana boards, and our own board."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.config import Config, StatisticsConfig
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from tests.fake_model import FakeExecutor
from tests.observe.metrics.test_metrics import parse
from tests.server.fakes import Harness, Wire, make_text
from tests.source_tree import ROOT

LIMITS = Limits(block_size=16, num_blocks=(64,), max_model_len=512, vocab_size=258, max_batch_tokens=256)
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

# Every series that SERVING asks for under vLLM's name, as Prometheus stores it, with the labels that its boards use.
BOTH = {"engine", "model_name"}
HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "iteration_tokens_total",
]  # fmt: skip
NAMES = {
    "num_requests_running": BOTH,
    "num_requests_waiting": BOTH,
    "num_requests_waiting_by_reason": BOTH | {"reason"},
    "kv_cache_usage_perc": BOTH,
    "prompt_tokens_total": BOTH,
    "generation_tokens_total": BOTH,
    "request_success_total": BOTH | {"finished_reason"},
    "prefix_cache_queries_total": BOTH,
    "prefix_cache_hits_total": BOTH,
    "num_preemptions_total": BOTH,
    "cache_config_info": {"engine", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"},
    **{f"{name}_bucket": BOTH | {"le"} for name in HISTOGRAMS},
    **{f"{name}_{part}": BOTH for name in HISTOGRAMS for part in ("sum", "count")},
}

# What the boards in vLLM's documentation ask (its examples of Prometheus and Grafana, 2024 to 2026), one of each kind.
ONE = 'model_name="$model_name"'
MANY = 'job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
RANGE = "[$__rate_interval]"
VLLM_QUERIES = [
    f"histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{{{ONE}}}{RANGE})))",
    f"rate(vllm:e2e_request_latency_seconds_sum{{{ONE}}}{RANGE})"
    f" / rate(vllm:e2e_request_latency_seconds_count{{{ONE}}}{RANGE})",
    f"rate(vllm:prompt_tokens_total{{{ONE}}}{RANGE})",
    f"rate(vllm:generation_tokens_total{{{ONE}}}{RANGE})",
    f"histogram_quantile(0.95, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{{{ONE}}}{RANGE})))",
    f"histogram_quantile(0.95, sum by(le) (rate(vllm:time_per_output_token_seconds_bucket{{{ONE}}}{RANGE})))",
    f"vllm:num_requests_running{{{ONE}}}",
    f"vllm:num_requests_swapped{{{ONE}}}",
    f"vllm:num_requests_waiting{{{ONE}}}",
    f"histogram_quantile(0.9, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{{{ONE}}}{RANGE})))",
    f"vllm:kv_cache_usage_perc{{{ONE}}}",
    f"vllm:gpu_cache_usage_perc{{{ONE}}}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{{{ONE}}}{RANGE}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{{{ONE}}}{RANGE}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{{{ONE}}}{RANGE}))",
    f"rate(vllm:request_queue_time_seconds_sum{{{ONE}}}{RANGE})",
    f"rate(vllm:request_prefill_time_seconds_sum{{{ONE}}}{RANGE})",
    f"rate(vllm:request_decode_time_seconds_sum{{{ONE}}}{RANGE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{{{ONE}}}{RANGE})",
    'sum by (model_name) (rate(vllm:request_success_total{model_name=~"$Deployment_id"}[$__rate_interval]))',
    'histogram_quantile(0.50, sum by(le, model_name) (rate(vllm:request_prompt_tokens_bucket{model_name=~"$x"}[5m])))',
    "sum(increase(vllm:time_to_first_token_seconds_sum[$__range]))"
    " / sum(increase(vllm:time_to_first_token_seconds_count[$__range]))",
    f"max(vllm:kv_cache_usage_perc{{{MANY}}})",
    f"max by (instance, engine) (vllm:kv_cache_usage_perc{{{MANY}}})",
    f"sum(rate(vllm:prefix_cache_hits_total{{{MANY}}}{RANGE}))"
    f" / (sum(rate(vllm:prefix_cache_queries_total{{{MANY}}}{RANGE})) > 0)",
    f"sum(rate(vllm:prompt_tokens_cached_total{{{MANY}}}{RANGE}))"
    f" / sum(rate(vllm:prompt_tokens_total{{{MANY}}}{RANGE}))",
    f"sum(rate(vllm:num_preemptions_total{{{MANY}}}{RANGE}))",
    f'sum(vllm:num_requests_waiting_by_reason{{{MANY}, reason="capacity"}})',
    f'sum(vllm:num_requests_waiting_by_reason{{{MANY}, reason="deferred"}})',
    f"count(vllm:num_requests_running{{{MANY}}})",
    f'sum(rate(vllm:request_success_total{{{MANY}, finished_reason="abort"}}{RANGE}))',
    f"histogram_quantile(0.95, sum by (le) (rate(vllm:iteration_tokens_total_bucket{{{MANY}}}{RANGE})))",
    'sum(rate(http_requests_total{job=~"$job", instance=~"$instance", status="2xx"}[$__rate_interval]))',
    'sum by (handler) (rate(http_requests_total{job=~"$job", instance=~"$instance"}[$__rate_interval]))',
    "process_resident_memory_bytes",
]

_CALLS = re.compile(r"\b(sum|rate|increase|max|min|avg|count|histogram_quantile|or|vector|label_values)\b")
_BY = re.compile(r"\bby ?\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-z_][a-z0-9_:]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|=|!~)"([^"]*)"')
_SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def faults(expression: str, found: Series) -> list[str]:
    """What of a PromQL expression finds nothing among the series."""
    groups = [label.strip() for group in _BY.findall(expression) for label in group.split(",")]
    plain = re.sub(r"\[[^]]*\]", "", _BY.sub("", expression))
    plain = _CALLS.sub("", re.sub(r"(?<=\()\s*0?\.\d+\s*,", "", plain))
    missing = []
    for name, matchers in _SELECTOR.findall(plain):
        wanted = _MATCHER.findall(matchers)
        fitting = [dict(labels) for (series, labels) in found if series == name and _fits(dict(labels), wanted)]
        if not fitting:
            missing.append(f"{name} {matchers}")
        missing += [f"{name} by {label}" for label in groups if fitting and label not in {*fitting[0], *_SCRAPED}]
    return missing if _SELECTOR.search(plain) else [f"no series in {expression}"]


def _fits(labels: dict[str, str], wanted: list[tuple[str, str, str]]) -> bool:
    for label, how, value in wanted:
        if label in _SCRAPED:
            continue
        if label not in labels or ("$" not in value and how == "=" and labels[label] != value):
            return False
    return True


@pytest.fixture(scope="module")
def found() -> Series:
    """What /metrics of a server shows after an answer, a stream, a refusal and a client that left."""
    return asyncio.run(used())


async def used() -> Series:
    executor = FakeExecutor(vocab_size=258, max_model_len=512)
    capacity = executor.open(ExecutorSpec(LIMITS.max_sequences, LIMITS.max_batch_tokens, 16, num_blocks=64))
    scheduler = Scheduler(LIMITS)
    loop = EngineLoop(scheduler, executor)
    observe_engine(loop, scheduler, StatisticsConfig())
    client = LocalClient(loop)
    harness = Harness()
    sessions = Sessions(client, harness.text, capacity=capacity)
    harness.app = create_app(sessions, make_text(), Config(), client.statistics)
    try:
        assert (await harness.complete(max_tokens=20)).status_code == 200
        assert (await harness.complete(max_tokens=20, stream=True)).status_code == 200
        assert (await harness.complete(temperature=-1)).status_code == 400
        body = {"prompt": "leave", "max_tokens": 400, "ignore_eos": True, "stream": True}
        wire = Wire(harness.app, "/v1/completions", body)
        task = wire.start()
        await wire.until(lambda: '"text"' in wire.text)
        wire.leave()
        await task
        return parse((await harness.get("/metrics")).text)
    finally:
        await client.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_promised_name_is_there_with_its_labels(found: Series, name: str) -> None:
    shown = [dict(labels) for series, labels in found if series == f"vllm:{name}"]
    assert shown, f"vllm:{name} is not shown"
    assert all(NAMES[name] <= labels.keys() for labels in shown), shown[0]
    assert {labels["engine"] for labels in shown} == {"0"}


def test_the_ends_of_requests_are_told_in_vllms_words(found: Series) -> None:
    shown = [(dict(labels), n) for (name, labels), n in found.items() if name == "vllm:request_success_total"]
    ends = {labels["finished_reason"]: n for labels, n in shown}
    assert ends == {"stop": ends["stop"], "length": ends["length"], "abort": 1, "error": 0}
    assert ends["stop"] + ends["length"] == 2


def test_the_usual_http_series_count_by_route(found: Series) -> None:
    counts = {tuple(sorted(labels)): n for (name, labels), n in found.items() if name == "http_requests_total"}
    route = ("handler", "/v1/completions"), ("method", "POST")
    assert counts[(*route, ("status", "4xx"))] == 1
    assert counts[(*route, ("status", "2xx"))] == 3


def test_buckets_are_vllms_under_its_names(found: Series) -> None:
    bounds = [dict(labels)["le"] for name, labels in found if name == "vllm:e2e_request_latency_seconds_bucket"]
    assert bounds[0] == "0.3" and bounds[-1] == "+Inf" and len(bounds) == 22


@pytest.mark.parametrize("expression", VLLM_QUERIES)
def test_vllms_documented_queries_find_their_series(found: Series, expression: str) -> None:
    assert faults(expression, found) == []


def test_a_query_for_what_is_not_there_is_found_out(found: Series) -> None:
    assert faults("rate(vllm:num_dreams_total[5m])", found)
    assert faults('vllm:request_success_total{finished_reason="boredom"}', found)
    assert faults("sum by (le, mood) (rate(vllm:time_to_first_token_seconds_bucket[5m]))", found)
    assert faults("sum(1)", found)


def expressions(board: dict[str, Any]) -> Iterator[str]:
    """Every query of a Grafana board, those of its variables too."""
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.*), ?(\w+)\)", r"sum by (\2) (\1)", variable["query"])


# Shown once there is something to tell; tests of each show them.
LATER = {
    "octavo_queue_wait_estimate_seconds": "while the front can estimate it",
    "octavo_requests_waiting_by_reason": "while requests wait",
}


def test_our_board_is_one_that_grafana_takes_and_finds_its_series(found: Series) -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "octavo.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all({"h", "w", "x", "y"} == panel["gridPos"].keys() and panel["title"] for panel in panels)
    taken = [(p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy) for p in panels
             for dx in range(p["gridPos"]["w"]) for dy in range(p["gridPos"]["h"])]  # fmt: skip
    assert len(taken) == len(set(taken)) and max(x for x, _ in taken) < 24, "panels lie on each other"
    asked = list(expressions(board))
    missing = [fault for expression in asked for fault in faults(expression, found)]
    assert [fault for fault in missing if fault.split(" ")[0] not in LATER] == []
    assert len(asked) > 30

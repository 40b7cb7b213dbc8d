"""Series, and their Prometheus text under both names."""

from collections.abc import Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tools.metrics_table import PAGE, table
from tools.sections import read_section

from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineDeadError
from octavo.observe.metrics.prometheus import Finished, RequestMetrics, SnapshotMetrics, engine_snapshot
from octavo.observe.series import Histogram
from tests.server.fakes import STATISTICS, Harness


def samples(*collectors: object) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)  # type: ignore[arg-type]
    return parse(generate_latest(registry).decode())


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is exposed twice"
            found[key] = sample.value
    return found


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    matches = [v for (n, given), v in found.items() if n == name and labels.items() <= dict(given).items()]
    assert len(matches) == 1, (name, labels, matches)
    return matches[0]


def test_a_histogram_counts_into_inclusive_buckets() -> None:
    histogram = Histogram((1, 2, 4))
    for seen in (0.5, 1, 1.5, 4, 100):
        histogram.observe(seen)
    histogram.observe(2, times=3)
    assert dict(histogram.cumulative()) == {"1.0": 2, "2.0": 6, "4.0": 7, "+Inf": 8}
    assert histogram.total == 113


def of_engine(statistics: Mapping[str, object] | None) -> SnapshotMetrics:
    return SnapshotMetrics("tiny", {"engine": engine_snapshot(statistics)})


def test_requests_appear_under_both_names() -> None:
    metrics = RequestMetrics("tiny")
    metrics.first_tokens(0.3, 1, prompt_tokens=100)
    metrics.next_tokens(0.2, 4)
    metrics.finished(Finished("stop", 100, 5, 64, queue_s=0.1, ttft_s=0.3, e2e_s=0.5, max_tokens=7))
    found = samples(metrics)
    for prefix in ("octavo_", "vllm:"):
        assert value(found, prefix + "time_to_first_token_seconds_count") == 1
        assert value(found, prefix + "time_to_first_token_seconds_bucket", le="0.25") == 0
        assert value(found, prefix + "time_to_first_token_seconds_bucket", le="0.5") == 1
        assert value(found, prefix + "inter_token_latency_seconds_count") == 4
        assert abs(value(found, prefix + "inter_token_latency_seconds_sum") - 0.2) < 1e-9
        assert value(found, prefix + "generation_tokens_total") == 5
        assert value(found, prefix + "prompt_tokens_total") == 100
        assert abs(value(found, prefix + "request_prefill_time_seconds_sum") - 0.2) < 1e-9
        assert abs(value(found, prefix + "request_decode_time_seconds_sum") - 0.2) < 1e-9
        assert abs(value(found, prefix + "request_inference_time_seconds_sum") - 0.4) < 1e-9
        assert value(found, prefix + "request_params_max_tokens_sum", model_name="tiny") == 7
    assert abs(value(found, "vllm:request_time_per_output_token_seconds_sum", engine="0") - 0.05) < 1e-9
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert not any("_created" in name for name, _ in found), "prometheus_client's own extra series are left out"


def test_a_counter_sums_per_label() -> None:
    metrics = RequestMetrics("tiny")
    for code in ("a", "a", "a", "b"):
        metrics.failed(code)
    found = samples(metrics)
    assert {code: value(found, "octavo_requests_failed_total", code=code) for code in "ab"} == {"a": 3, "b": 1}


def test_an_unknown_method_makes_no_series_of_its_own() -> None:
    metrics = RequestMetrics("tiny")
    for method in ("GET", "BREW", "STEEP"):
        metrics.response_ended("/v1/models", method, 404, 0.2)
    found = samples(metrics)
    assert value(found, "http_requests_total", method="other", handler="/v1/models", status="4xx") == 2
    assert value(found, "http_request_duration_seconds_count", method="GET") == 1


def test_the_engines_gauges_are_filled_only_with_what_it_gives() -> None:
    found = samples(of_engine(STATISTICS))
    assert value(found, "vllm:num_requests_running") == value(found, "octavo_sequences_running") == 3
    assert value(found, "vllm:num_requests_waiting") == 2
    assert value(found, "vllm:kv_cache_usage_perc") == 0.25
    assert value(found, "vllm:num_preemptions_total") == 7
    assert value(found, "vllm:prefix_cache_hits_total") == 30
    assert value(found, "octavo_engine_up") == 1
    assert not any(name.startswith("octavo_steps") for name, _ in found), "not in the snapshot, so not shown"
    assert list(samples(of_engine(None)).values()) == [0]


async def test_the_endpoint_counts_what_was_served() -> None:
    harness = Harness()
    await harness.chat()
    await harness.chat(stream=True)
    await harness.chat(temperature=-1)
    response = await harness.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = parse(response.text)
    assert value(found, "vllm:request_success_total", finished_reason="stop", model_name="tiny") == 2
    assert value(found, "octavo_requests_failed_total", code="invalid_value") == 1
    assert value(found, "octavo_http_responses_total", status="200") == 2
    assert value(found, "octavo_http_responses_total", status="400") == 1
    assert value(found, "vllm:time_to_first_token_seconds_count") == 2
    assert value(found, "vllm:generation_tokens_total") == 20
    assert value(found, "octavo_engine_up") == 1


async def test_the_endpoint_answers_without_an_engine() -> None:
    harness = Harness()

    async def dead() -> None:
        raise EngineDeadError("gone")

    harness.engine.statistics = dead  # type: ignore[method-assign, assignment]
    harness = Harness(engine=harness.engine)
    response = await harness.get("/metrics")
    assert response.status_code == 200
    assert value(parse(response.text), "octavo_engine_up") == 0


def test_T01_waiting_by_reason_the_host_and_the_memory_are_exposed() -> None:
    scheduler = {"waiting_by_reason": {"kv_blocks": 2, "behind": 5}, "num_swapped": 1, "num_host_blocks": 64}
    scheduler |= {"num_host_blocks_used": 9, "num_swapped_out_tokens": 48, "num_swapped_in_tokens": 32}
    sections = {
        "scheduler": scheduler,
        "collected": {"choice_ends": {"stop": 3}},
        "memory": {"total": {"logical_blocks": 12, "saved_blocks": 4, "reserved_slots": 6, "wasted_share": 0.125}},
    }
    found = samples(of_engine(sections))
    assert value(found, "octavo_requests_waiting_by_reason", reason="kv_blocks", model_name="tiny") == 2
    assert value(found, "octavo_requests_waiting_by_reason", reason="behind") == 5
    assert value(found, "octavo_requests_swapped") == value(found, "vllm:num_requests_swapped") == 1
    assert (value(found, "octavo_host_kv_blocks"), value(found, "octavo_host_kv_blocks_used")) == (64, 9)
    assert value(found, "octavo_swapped_out_tokens_total") == 48
    assert value(found, "octavo_swapped_in_tokens_total") == 32
    assert value(found, "octavo_choices_finished_total", finished_reason="stop") == 3
    assert value(found, "octavo_kv_blocks_logical") == 12 and value(found, "octavo_kv_blocks_saved") == 4
    assert value(found, "octavo_kv_slots_reserved") == 6 and value(found, "octavo_kv_wasted_share") == 0.125


def test_drift_from_a_fit_is_told_where_one_is_compared() -> None:
    found = samples(of_engine({"drift": {"ratio": 1.25, "is_drifting": True, "alarms": 2, "steps": 64}}))
    assert value(found, "octavo_step_time_drift", model_name="tiny") == 1.25
    assert value(found, "octavo_step_time_drifting") == 1
    assert value(found, "octavo_step_time_drift_alarms_total") == 2


def test_T06_every_number_of_the_snapshot_has_a_series_or_a_reason_not_to() -> None:
    told_otherwise = {
        "step",
        "num_in_flight",
        "num_prompt_tokens",
        "num_output_tokens",
    }  # the front counts the last two
    snapshot = asdict(Scheduler(Limits(16, (8,), 64, 97)).statistics())
    numbers = {name: index + 1000 for index, name in enumerate(snapshot) if isinstance(snapshot[name], int)}
    found = samples(of_engine({"scheduler": numbers}))
    shown = {given for (name, _), given in found.items() if name.startswith("octavo_")}
    assert {name for name, number in numbers.items() if number not in shown} == told_otherwise


def test_T03_a_histogram_tells_quantiles_and_forgets() -> None:
    histogram = Histogram((1, 2, 4))
    for seen in (0.5, 1.5, 1.5, 3.0, 9.0):
        histogram.observe(seen)
    assert histogram.quantile(0.5) == 1.75, "halfway between the two that lie in its bucket"
    assert (histogram.quantile(1.0), histogram.max) == (9.0, 9.0)
    assert histogram.summary()["count"] == 5 and histogram.summary()["mean"] == 3.1
    histogram.reset()
    assert (histogram.quantile(0.5), histogram.total, sum(histogram.counts)) == (None, 0.0, 0)


def test_the_page_has_every_metric() -> None:
    assert read_section(PAGE, "metrics") == table(), "run: python -m tools.metrics_table"
    declared = samples(RequestMetrics("tiny"), of_engine(STATISTICS))
    names = {
        name for name, _ in declared if name.startswith("octavo_") and not name.endswith(("_bucket", "_count", "_sum"))
    }
    assert names and all(f"`{name}`" in table() for name in names)

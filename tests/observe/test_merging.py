"""Answers of several engines as one: sums, means, quantiles, waits and lists."""

from __future__ import annotations

from typing import Any

from octavo.observe import merging
from octavo.observe.forecast import WaitModel

REPORT = {
    "resumed_requests": 5, "moved_requests": 0, "inexact_requests": 0, "state": "ready",
    "replicas": [
        {"number": 0, "name": "one", "state": "ready"}, {"number": 1, "name": "two", "state": "draining"},
        {"number": 7, "name": "three", "state": "recovering"},
    ],
}  # fmt: skip


def merge_answers(verb: str, answers: Any) -> Any:
    return merging.merge_answers(verb, answers, REPORT)


def statistics(count: int, mean: float, p99: float) -> dict[str, Any]:
    return {
        "scheduler": {"num_running": count, "first_policy_error": ""},
        "steps": {"total_s": {"step": 2.0}, "median_s": {"step": p99}},
        "requests": {"count": count, "mean": mean, "p99": p99},
        "loop": {"is_draining": False, "max_step_tokens": None},
    }


def test_counters_are_added_and_quantiles_are_those_of_the_worst_replica() -> None:
    answers = {"one": statistics(1, 4.0, 9.0), "two": statistics(3, 8.0, 5.0)}
    merged: Any = merge_answers("statistics", answers)
    assert merged["scheduler"] == {"num_running": 4, "first_policy_error": ""}
    assert merged["steps"] == {"total_s": {"step": 4.0}, "median_s": {"step": 9.0}}
    assert merged["requests"] == {"count": 4, "mean": 7.0, "p99": 9.0}
    assert merged["loop"] == {"is_draining": False, "max_step_tokens": None}
    rows = merged["replicas"]
    assert [(number, row["up"], row["running"]) for number, row in rows.items()] == [
        ("0", 1, 1),
        ("1", 0, 3),
        ("7", 0, None),
    ]
    assert merged["fleet"] == {"resumed_requests": 5, "moved_requests": 0, "inexact_requests": 0}


def test_ranks_are_in_the_row_of_their_replica_with_its_state() -> None:
    place = {"rank": 1, "where": "gpu7", "state": "ready"}
    report = {**REPORT, "replicas": [{"number": 0, "name": "one", "state": "ready", "ranks": [place]}]}
    figures = {"scheduler": {}, "ranks": {"1": {"rank": 1, "state": "running", "step": 5}}}
    merged: Any = merging.merge_answers("statistics", {"one": figures}, report)
    assert merged["replicas"]["0"]["ranks"] == [{**place, "step": 5}]
    merged = merging.merge_answers("statistics", {"another": {}}, report)
    assert merged["replicas"]["0"]["ranks"] == [place]


def test_the_wait_for_a_fleet_is_that_of_its_parts_together() -> None:
    """Twice the engines with twice the work and twice the running requests wait as long."""
    model = {"step_s": 0.01, "token_s": 0.001, "answer_tokens": 50.0}
    answer = {"new_request_s": 3.0, "model": model}
    merged: Any = merge_answers("forecast", {"a": answer, "b": {**answer, "new_request_s": 2.0}})
    assert merged["new_request_s"] == 2.0
    one, two = (
        WaitModel(**model).expected_wait_s(1000, 400, 8),
        WaitModel(**merged["model"]).expected_wait_s(2000, 850, 16),
    )
    assert abs(one - two) < 1e-9
    idle = {"new_request_s": None, "model": None}
    assert merge_answers("forecast", {"a": idle, "b": idle}) == idle
    assert merge_answers("forecast", {"a": idle, "b": answer}) == answer


def test_explanations_are_of_all_engines_or_of_the_one_that_knows() -> None:
    both: Any = merge_answers(
        "explain",
        {
            "a": {"open": [{"id": "x"}], "num_waiting": 1, "new_request_s": None},
            "b": {"open": [{"id": "y"}], "num_waiting": 2, "new_request_s": 1.5},
        },
    )
    assert both == {"open": [{"id": "x"}, {"id": "y"}], "num_waiting": 3, "new_request_s": 1.5}
    unknown, known = {"state": "unknown", "text": "no"}, {"state": "ended", "text": "it ended"}
    assert merge_answers("explain", {"a": unknown, "b": known}) == known
    assert merge_answers("explain", {"a": unknown, "b": unknown}) == unknown


def test_an_order_is_done_if_all_engines_did_it() -> None:
    assert merge_answers("reset_prefix_cache", {"a": True, "b": True}) is True
    assert merge_answers("reset_prefix_cache", {"a": True, "b": False}) is False

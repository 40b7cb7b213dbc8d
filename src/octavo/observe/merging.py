"""Merges the answers of several engines to one verb, for readers that expect those of one.

Owns: how each value is merged. Does not: ask an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merge_answers(verb: str, answers: Mapping[str, Any]) -> object:
    """Return one answer for the answers of several replicas, by name.

    statistics: counters and gauges are added; `replicas` has those of each. explain: the requests of all.
    forecast: the shortest wait, and the figures of all engines together. Verbs that return a bool: True if all do.
    """
    values = list(answers.values())
    if verb == "statistics":
        return {**_sum(values), "replicas": dict(answers)}
    if verb == "forecast":
        return {"new_request_s": _least(value["new_request_s"] for value in values), "model": _merge_models(values)}
    if verb == "explain":
        return _merge_explanations(values)
    return all(values)


def _sum(values: list[Any]) -> Any:
    """Add numbers, at every depth; of other values keep the first."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value for value in values if isinstance(value, int | float))
    return first


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _merge_models(answers: list[Any]) -> dict[str, float] | None:
    """Return figures of engines that step at the same time: each computes its share of the tokens."""
    models = [answer["model"] for answer in answers if answer["model"] is not None]
    if not models:
        return None
    mean = {name: sum(model[name] for model in models) / len(models) for name in models[0]}
    return {**mean, "token_s": mean["token_s"] / len(models)}


def _merge_explanations(answers: list[Any]) -> Any:
    """Return the answer of an engine that knows the request; for all requests, the lists of all engines."""
    known = [answer for answer in answers if answer.get("state") != "unknown"]
    if not known or "text" in known[0]:
        return (known or answers)[0]
    merged = _sum(known)
    for key, value in merged.items():
        if isinstance(value, list):
            merged[key] = [entry for answer in known for entry in answer.get(key, ())]
    return {**merged, "new_request_s": _least(answer.get("new_request_s") for answer in known)}

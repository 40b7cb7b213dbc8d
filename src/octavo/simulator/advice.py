"""Finds what limits a run, what it cannot show, where a busy device is not full, and limits that can be raised.

Owns: the conditions and the texts, one line each. Does not: compute figures (summary) or lay out (report).
A line says what was found with its numbers, then what to try.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from octavo.simulator.columns import Facts

PREFIX_ROUTERS = ("prefix_affinity", "prefix_hash")
MIN_FOR_P99 = 500  # five requests beyond p99
IDLE_SHARE = 0.2
BUSY_SHARE = 0.8
LOW_USE = 0.15
OFTEN = 0.2  # share of steps at a limit
ROOM = 0.8  # a pool, or the device's compute, that is used less has room
MARGIN = 0.9  # share of a bound on tpot that may be used up before a limit is raised

NOTICED = 0.5  # requests of each replica that wait, on average, before what they lack counts as the limit of a run
SHOWN = 0.05  # requests
_LACKS = {
    "sequence_cap": "slots",
    **dict.fromkeys(("kv_blocks", "headroom", "swap_space", "fork_blocks"), "KV room"),
    "token_budget": "tokens of a step",
}  # of WaitReason


def name_limit(facts: Facts) -> tuple[str, str]:
    """Return what limits a run, and the figures that say so.

    It is what waiting requests lack (slots, KV room, tokens of a step), or if few wait, what the device's time goes to.
    """
    limits, replicas = facts["limits"], facts["replicas"]
    waiting, shares = limits["waiting"], limits["time"]
    figures = f"devices busy {replicas['busy_share']:.0%}"
    if shares:
        parts = sorted(shares.items(), key=lambda item: -item[1])[:2]
        figures += f" ({', '.join(f'{name} {share:.0%}' for name, share in parts)})"
    figures += (
        f", {limits['sequences_per_step']:.0f} of {limits['max_sequences']} slots in a step, KV pool held at most "
        f"{_kv_most(facts):.0%}"
    )
    if sum(waiting.values()) >= SHOWN:
        reason = max(waiting, key=lambda name: waiting[name])
        figures += f", {sum(waiting.values()):.1f} requests wait ({reason.replace('_', ' ')})"
        if sum(waiting.values()) >= NOTICED * replicas["count"]:
            return _LACKS.get(reason, reason.replace("_", " ")), figures
    return max(shares, key=lambda name: shares[name], default="unknown"), figures


def advise(facts: Facts, policy: str, router: str, bounds: Mapping[str, float] | None = None) -> list[str]:
    """Return lines about one run. `bounds` has the objectives: tpot, tpot_p99, ... with their seconds."""
    return [*_cannot_show(facts, policy, router), *_busy_not_full(facts), *_raise_limits(facts, bounds or {})]


def advise_comparison(runs: Mapping[str, Facts]) -> list[str]:
    """Return a line for each group of runs that have the same figures."""
    groups: list[list[str]] = []
    for label, facts in runs.items():
        group = next((group for group in groups if runs[group[0]] == facts), None)
        if group is None:
            groups.append([label])
        else:
            group.append(label)
    return [
        f"{_join(group)} have the same figures: nothing in this workload makes a difference between them; raise the "
        "load with --rate-scale, or vary the requests"
        for group in groups
        if len(group) > 1
    ]


def _join(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def _cannot_show(facts: Facts, policy: str, router: str) -> Iterator[str]:
    replicas, requests, busy = facts["replicas"], facts["requests"], facts["replicas"]["busy_share"]
    if policy == "fair" and facts["tenants"]["count"] < 2:
        yield "fair divides service among tenants, and all requests are of one: add tenants=N to --workload"
    if router != "round_robin" and replicas["count"] == 1:
        yield f"{router} chooses among replicas, and there is one: give --replicas N"
    elif router in PREFIX_ROUTERS and not facts["cache"]["requests_with_keys"]:
        yield (
            f"{router} compares prefixes, and no request has keys of its prefix: add prefix=N,groups=N to --workload, "
            "or take a workload with keys (chat, mooncake, agentic, a recording)"
        )
    if 0 < requests["served"] < MIN_FOR_P99:
        beyond = max(1, requests["served"] // 100)
        yield (
            f"p99 rests on the slowest {f'{beyond} of' if beyond > 1 else 'of'} {requests['served']:,} requests: "
            f"simulate {MIN_FOR_P99:,} or more"
        )
    if 0 < busy < IDLE_SHARE:
        yield (
            f"the device is idle {1 - busy:.0%} of the time, so settings hardly matter: try --rate-scale "
            f"{max(2, round(0.7 / busy))}"
        )
    elif replicas["busy_share_least"] < IDLE_SHARE < BUSY_SHARE * replicas["busy_share_most"]:
        yield (
            f"one of {replicas['count']} replicas is busy {replicas['busy_share_least']:.0%} of the time and another "
            f"{replicas['busy_share_most']:.0%}: try another --router"
        )


def _busy_not_full(facts: Facts) -> Iterator[str]:
    limits, replicas = facts["limits"], facts["replicas"]
    if not limits["max_sequences"] or replicas["busy_share"] < BUSY_SHARE or _kv_most(facts) >= ROOM:
        return
    slots = limits["sequences_per_step"] / limits["max_sequences"]
    tokens = replicas["tokens_per_step"] / limits["max_batch_tokens"]
    compute = limits["compute"]
    if slots < 0.5 and (compute if compute is not None else max(slots, tokens)) < LOW_USE:
        used = "" if compute is None else f" and {compute:.0%} of its compute"
        yield (
            f"busy is not full: the device is busy {replicas['busy_share']:.0%} of the time with {slots:.0%} of its "
            f"slots{used}; more requests would share the same steps: try --rate-scale 2"
        )


def _raise_limits(facts: Facts, bounds: Mapping[str, float]) -> Iterator[str]:
    limits, most = facts["limits"], _kv_most(facts)
    if most >= ROOM or not _tpot_has_margin(facts, bounds):
        return
    share, value = limits["at_max_sequences"], limits["max_sequences"]
    if share >= OFTEN and "sequence_cap" in limits["waiting"]:
        more = max(value + 1, int(value * min(4.0, MARGIN / max(most, 0.01))))
        yield (
            f"max_sequences is {value}: {share:.0%} of the steps reach it while requests wait, and at most {most:.0%} "
            f"of the KV pool is held: try --max-num-seqs {more // 8 * 8 if more >= value + 8 else more}"
        )
    share, value, compute = limits["at_max_batch_tokens"], limits["max_batch_tokens"], limits["compute"]
    if share >= OFTEN and "token_budget" in limits["waiting"] and (compute is None or compute < ROOM):
        used = "" if compute is None else f", and the device uses {compute:.0%} of its compute"
        yield (
            f"max_batch_tokens is {value:,}: {share:.0%} of the steps reach it while requests wait{used}: try "
            f"--max-num-batched-tokens {2 * value}"
        )


def _kv_most(facts: Facts) -> float:
    """Return the largest share of the KV pool that was held; 1 if unknown."""
    replicas = facts["replicas"]
    return float(replicas["kv_use_most"]) if replicas["num_blocks"] else 1.0


def _tpot_has_margin(facts: Facts, bounds: Mapping[str, float]) -> bool:
    """Return True if larger batches, which make steps longer, leave the objectives on tpot within reach."""
    for name, bound in bounds.items():
        metric, _, statistic = name.partition("_")
        value = facts[metric][statistic or "p99"] if metric == "tpot" else None
        if value is not None and value > MARGIN * bound:
            return False
    return True

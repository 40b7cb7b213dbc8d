"""Generated workloads: what their words promise, and the same for the same seed."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads import Shaping, open_workload


def take(text: str | list[str], **shape: Any) -> list[Arrival]:
    """All arrivals of a workload."""
    return list(open_workload(text, Shaping(**shape)))


def gaps(arrivals: list[Arrival]) -> list[float]:
    """Seconds between arrivals."""
    return [later.time - earlier.time for earlier, later in pairwise(arrivals)]


@pytest.mark.parametrize(
    ("text", "variation"),
    [
        ("poisson:rate=4,requests=8000", 1.0),
        ("constant:rate=4,requests=100", 0.0),
        ("bursty:rate=4,cv=2,requests=20000", 2.0),
        ("bursty:rate=4,cv=0.5,requests=8000", 0.5),
        ("weibull:rate=4,shape=0.5,requests=20000", 5**0.5),
    ],
)
def test_a_process_keeps_its_rate_and_burstiness(text: str, variation: float) -> None:
    between = gaps(take(text))
    assert fmean(between) == pytest.approx(0.25, rel=0.06)
    assert pstdev(between) / fmean(between) == pytest.approx(variation, rel=0.1, abs=1e-9)


def test_on_off_is_silent_between() -> None:
    arrivals = take("onoff:rate=10,on=2,off=8,requests=400")
    assert all(one.time % 10 < 2 + 1e-9 for one in arrivals)
    assert len({one.time // 10 for one in arrivals}) == pytest.approx(20, abs=4)


def test_a_modulated_process_has_quiet_and_busy_times() -> None:
    arrivals = take("mmpp:low=0,high=20,high_s=5,low_s=15,requests=5000")
    between = gaps(arrivals)
    assert len(arrivals) / arrivals[-1].time == pytest.approx(5, rel=0.35)
    assert pstdev(between) / fmean(between) > 2


def test_a_wave_swings() -> None:
    arrivals = take("wave:rate=10,swing=0.9,period=100,duration=400")
    crest = sum(40 <= one.time % 100 < 60 for one in arrivals)
    trough = sum(one.time % 100 < 10 or one.time % 100 >= 90 for one in arrivals)
    assert len(arrivals) == pytest.approx(4000, rel=0.1)
    assert crest > 5 * trough


def test_a_duration_ends_it() -> None:
    arrivals = take("poisson:rate=10,duration=20,prompt=5,output=3")
    assert arrivals[-1].time < 20
    assert len(arrivals) == pytest.approx(200, rel=0.3)
    assert {(one.prompt_tokens, one.output_tokens) for one in arrivals} == {(5, 3)}


def test_other_lengths_move_no_arrival_and_another_seed_moves_all() -> None:
    times = [one.time for one in take("poisson:rate=3,requests=50,prompt=9")]
    assert times == [one.time for one in take("poisson:rate=3,requests=50,prompt=lognormal(800,1)")]
    assert times != [one.time for one in take("poisson:rate=3,requests=50,prompt=9", seed=1)]


def test_a_workload_may_be_asked_again() -> None:
    workload = open_workload("chat:rate=1,requests=60,tenants=3,prefix=64,groups=2")
    assert list(workload) == list(workload)


def test_a_million_are_not_made_to_give_the_first() -> None:
    assert len(list(islice(open_workload("poisson:rate=1,requests=1M"), 5))) == 5


def test_lengths_follow_their_distribution() -> None:
    arrivals = take("all_at_once:requests=4000,prompt=lognormal(500,0.8),output=quantiles(0:1,50:10,100:30)")
    prompts, outputs = (
        sorted(pair) for pair in zip(*((a.prompt_tokens, a.output_tokens) for a in arrivals), strict=True)
    )
    assert prompts[2000] == pytest.approx(500, rel=0.06)
    assert prompts[3364] == pytest.approx(500 * 2.2255, rel=0.08)  # a sigma above the median
    assert outputs[2000] == pytest.approx(10, abs=1)
    assert outputs[3000] == pytest.approx(20, abs=2)


def test_presets_have_the_azure_traces_means() -> None:
    conversation = take("all_at_once:requests=8000,lengths=azure_conv")
    assert fmean(one.prompt_tokens for one in conversation) == pytest.approx(1155, rel=0.08)
    assert fmean(one.output_tokens for one in conversation) == pytest.approx(211, rel=0.08)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    arrivals = take("poisson:rate=1,requests=200,prefix=100,groups=4,prompt=50,group_tenants=yes")
    by_group: dict[str, list[Arrival]] = {}
    for one in arrivals:
        by_group.setdefault(one.tenant, []).append(one)
    assert sorted(by_group) == ["group0", "group1", "group2", "group3"]
    keys = {name: {tuple(one.keys) for one in group} for name, group in by_group.items()}
    assert all(len(group) == 1 for group in keys.values())
    every = [key for group in keys.values() for key in next(iter(group))]
    assert len(every) == len({*every}) == 4 * (100 // 16)
    assert all(one.prompt_tokens == 150 for one in arrivals)


def test_a_conversation_goes_on_where_it_was() -> None:
    arrivals = take("chat:rate=1,requests=300,turns=5,prefix=64,groups=2,prompt=uniform(1,60),output=uniform(1,60)")
    for place, one in enumerate(arrivals):
        if one.follows is None:
            assert one.prompt_tokens <= 64 + 60
            continue
        before = arrivals[one.follows]
        assert one.follows < place and before.session == one.session
        said = (*before.keys, *before.output_keys)
        assert one.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert tuple(one.keys)[: len(said)] == said
        assert len(one.keys) == one.prompt_tokens // 16


def test_a_closed_loop_has_a_chain_for_each_user() -> None:
    arrivals = take("closed:users=3,think=uniform(1,5),requests=30")
    assert sum(one.follows is None for one in arrivals) == 3
    for place, one in enumerate(arrivals):
        if one.follows is not None:
            assert one.follows < place and arrivals[one.follows].session == one.session
            assert 1 <= one.time <= 5
    assert len({one.follows for one in arrivals}) == 28  # nobody is followed twice


def test_several_are_merged_in_time_and_keep_who_follows_whom() -> None:
    texts = [
        "poisson:rate=2,requests=40,tenant=api,priority=3,ttft=0.5",
        "closed:users=2,think=3,requests=20,tenant=desk",
    ]
    arrivals = take(texts)
    assert len(arrivals) == 60
    opened = [one.time for one in arrivals if one.follows is None]
    assert opened == sorted(opened)
    for one in arrivals:
        assert (one.tenant, one.priority, one.ttft_objective) in (("api", 3, 0.5), ("desk", 0, None))
        if one.follows is not None:
            assert arrivals[one.follows].session == one.session and one.tenant == "desk"


def test_two_alike_are_not_the_same() -> None:
    arrivals = take(["poisson:rate=2,requests=40,tenant=a", "poisson:rate=2,requests=40,tenant=b"])
    assert {one.time for one in arrivals if one.tenant == "a"} != {one.time for one in arrivals if one.tenant == "b"}


def test_tenants_are_drawn_by_zipf() -> None:
    arrivals = take("poisson:rate=2,requests=4000,tenants=3,zipf=1")
    counts = [sum(one.tenant == f"tenant{place}" for one in arrivals) for place in range(3)]
    assert counts[0] == pytest.approx(4000 * 6 / 11, rel=0.1)
    assert counts[2] == pytest.approx(4000 * 2 / 11, rel=0.15)

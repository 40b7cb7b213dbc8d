"""A fleet's router: what it is shown of a request, and a log whose replay makes the same choices."""

from __future__ import annotations

import itertools
import json
import random
import threading
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.settings import load_config

from octavo.cli import main
from octavo.core.kv.prefix import prompt_keys
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.routing import ROUTERS, RoutedPrompt
from octavo.fleet.routing_log import (
    ChoiceRecord,
    EndRecord,
    LogEndRecord,
    RoutingHeader,
    RoutingLog,
    read_routing_log,
    replay_routing,
    routing_logs,
)
from octavo.observe.recording.format import RecordingError
from octavo.simulator.workloads import Shaping, open_workload

BLOCK = 4


@dataclass
class Engine:
    number: int
    load: int = 0
    num_open: int = 0


def request(name: str, tokens: int = 40, first: int = 0, tenant: str = "", session: str = "") -> Request:
    return Request(name, array("i", (first + index for index in range(tokens))), tenant=tenant, session=session)


def open_log(folder: Path, router: str = "prefix_affinity", seed: int = 0, max_bytes: int = 1 << 20) -> RoutingLog:
    return RoutingLog(folder, max_bytes, RoutingHeader(router, seed, BLOCK, 0.0))


class Fleet:
    """Engines with their open requests, as the front end's ledger keeps them."""

    def __init__(self, router: FleetRouter, count: int) -> None:
        self.router = router
        self.up = {number: Engine(number) for number in range(count)}
        self.open: dict[str, tuple[Request, Engine]] = {}
        self.choices: list[int] = []

    def route(self, wanted: Request) -> None:
        engine = self.router.choose(wanted, tuple(self.up.values()))
        engine.load += wanted.num_prompt_tokens
        engine.num_open += 1
        self.open[wanted.request_id] = wanted, engine
        self.choices.append(engine.number)

    def leave(self, name: str) -> Request:
        wanted, engine = self.open.pop(name)
        engine.load -= wanted.num_prompt_tokens
        engine.num_open -= 1
        return wanted

    def end(self, name: str) -> None:
        self.leave(name)
        self.router.ended(name, 7, None)

    def fail(self, number: int) -> None:
        self.up.pop(number)
        for name in [name for name, (_, engine) in self.open.items() if engine.number == number]:
            self.route(self.leave(name))


def drive(fleet: Fleet, seed: int, steps: int) -> None:
    """Let requests arrive and end, and engines fail, drain and return."""
    rng = random.Random(seed)
    for step in range(steps):
        kind = rng.random()
        if kind < 0.6 or not fleet.open:
            tokens, first = rng.randrange(1, 60), rng.randrange(4)
            tenant = rng.choice(("", "a", "b"))
            fleet.route(request(f"r{step}", tokens, first, tenant=tenant, session=rng.choice(("", "chat", "other"))))
        elif kind < 0.85:
            fleet.end(rng.choice(sorted(fleet.open)))
        elif kind < 0.9 and len(fleet.up) > 1:
            fleet.fail(rng.choice(sorted(fleet.up)))
        elif kind < 0.93 and len(fleet.up) > 1:
            fleet.up.pop(rng.choice(sorted(fleet.up)))  # drained: its requests end there
        else:
            number = rng.randrange(8)
            fleet.up.setdefault(number, Engine(number))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(ROUTERS)), st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 120))
def test_a_replay_makes_every_choice_of_the_fleet(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, count: int, steps: int
) -> None:
    log = open_log(tmp_path_factory.mktemp("log"), name, seed % 7)
    fleet = Fleet(FleetRouter(name, BLOCK, seed % 7, log), count)
    drive(fleet, seed, steps)
    log.close()
    replay = replay_routing(log.path)
    assert replay.is_equal and replay.num_choices == len(fleet.choices), replay.difference
    assert replay.router == name and replay.end_reason == "the fleet was stopped"
    recorded = [one.chosen for one in read_routing_log(log.path)[1] if isinstance(one, ChoiceRecord)]
    assert recorded == fleet.choices


def test_a_choice_that_the_router_did_not_make_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    router = FleetRouter("prefix_affinity", BLOCK, log=log)
    engines = [Engine(0, 96, 2), Engine(1, 100, 2), Engine(2, 104, 2)]
    for number in range(4):
        router.choose(request(f"r{number}"), engines)
    wrong = log.mask(RoutedPrompt(prompt_keys(request("wrong"), BLOCK), 40))
    log.chosen(request("wrong"), wrong, engines, 2)
    router.choose(request("after"), engines)
    log.close()
    replay = replay_routing(log.path)
    assert not replay.is_equal and (replay.num_equal, replay.num_choices) == (4, 6)
    assert replay.difference.startswith("choice 5, ")
    assert replay.difference.endswith(
        "the fleet chose replica 2 (104 prompt tokens in 2 open requests), the replay "
        "replica 0 (96 prompt tokens in 2 open requests)"
    )


def test_the_keys_are_those_of_the_engines_cache_and_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(wanted: Request, block_size: int) -> tuple[bytes, ...]:
        made.append(wanted.request_id)
        return prompt_keys(wanted, block_size)

    monkeypatch.setattr("octavo.fleet.fleet_router.prompt_keys", counted)
    router, engines = FleetRouter(block_size=BLOCK), [Engine(0), Engine(1, 5, 2)]
    router.choose(replace(request("given"), block_keys=prompt_keys(request("given"), BLOCK)), engines)
    router.choose(request("alone"), engines[:1])
    assert not made  # the front end made the keys, or there was nothing to choose
    engines[0].load, engines[0].num_open = 6, 3
    assert router.choose(request("found"), engines).number == 0  # the prefix's replica, though the other is less loaded
    assert made == ["found"]


def test_a_tenant_shares_no_prefix_with_another() -> None:
    router, engines = FleetRouter(block_size=BLOCK), [Engine(0, 5, 2), Engine(1, 6, 2)]
    assert router.choose(request("first"), engines).number == 0
    engines[0].load = 7
    assert router.choose(request("same"), engines).number == 0
    assert router.choose(request("tenant", tenant="b"), engines).number == 1


def test_a_session_stays_at_its_replica() -> None:
    router, engines = FleetRouter("sessions", BLOCK), [Engine(0, 5, 2), Engine(1, 6, 2)]
    assert router.choose(request("first", session="chat"), engines).number == 0
    engines[0].load = 70
    assert router.choose(request("second", 8, 90, session="chat"), engines).number == 0
    assert router.choose(request("other", session="else"), engines).number == 1


def test_the_log_has_no_text_and_nothing_that_verifies_a_guess_of_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    router, wanted = FleetRouter(block_size=BLOCK, log=log), request("named", tenant="acme", session="chat")
    router.choose(wanted, [Engine(0), Engine(1)])
    router.ended("named", 5, None)
    log.close()
    header, records = read_routing_log(log.path)
    choice, end, last = records
    assert isinstance(choice, ChoiceRecord) and isinstance(end, EndRecord) and isinstance(last, LogEndRecord)
    assert (header.router, header.key_tokens) == ("prefix_affinity", BLOCK) and end.output_tokens == 5
    assert choice.prompt is not None and len(choice.prompt.prompt().keys) == 10
    told = repr((choice, end))
    assert "named" not in told and "acme" not in told and "chat" not in told
    for key in prompt_keys(wanted, BLOCK):
        assert key[:8] not in choice.prompt.keys
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = open_log(tmp_path, max_bytes=4000)
    router, engines = FleetRouter(block_size=BLOCK, log=log), [Engine(0), Engine(1)]
    for number in range(200):
        router.choose(request(f"r{number}", 50, 1000 * number), engines)
    log.close()
    assert log.path.stat().st_size <= 4000
    replay = replay_routing(log.path)
    assert replay.is_equal and replay.end_reason == "its folder holds its bound of bytes (--record-bytes)"
    with pytest.raises(ConfigError, match="--record-bytes"):
        open_log(tmp_path, max_bytes=1000)


def test_a_log_that_was_cut_off_is_read_to_its_last_frame(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    router, engines = FleetRouter(block_size=BLOCK, log=log), [Engine(0), Engine(1)]
    router.choose(request("first"), engines)
    log.close()
    log.path.write_bytes(log.path.read_bytes()[:-3])
    replay = replay_routing(log.path)
    assert (replay.num_equal, replay.num_choices, replay.end_reason) == (1, 1, "")


def test_each_start_of_a_fleet_has_its_own_log(tmp_path: Path) -> None:
    for _ in range(2):
        open_log(tmp_path).close()
    assert [path.name for path in routing_logs(tmp_path)] == ["0001.octroute", "0002.octroute"]
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-routing-log"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is no routing log"), (b"octavo-routing\n\x02\x00", "is no routing log"),
     (b"octavo-routing\n\x01\x00", "has no header")],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "0001.octroute"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        replay_routing(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        replay_routing(tmp_path / "none.octroute")


def test_a_fleet_s_recording_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(10.0, 0.5)
    log = RoutingLog(tmp_path, 1 << 20, RoutingHeader("prefix_affinity", 0, BLOCK, 1e9), lambda: next(clock))
    drive(Fleet(FleetRouter(block_size=BLOCK, log=log), 3), 1, 80)
    log.close()
    workload = open_workload([str(tmp_path)], Shaping())
    requests = list(workload)
    assert requests[0].time == 0.0 and [one.time for one in requests] == sorted(one.time for one in requests)
    assert {one.output_tokens for one in requests} == {1, 7} and requests[0].key_tokens == BLOCK
    assert len({one.session for one in requests}) == 3 and len({one.tenant for one in requests}) == 3
    assert any(one.keys and one.keys[0] == other.keys[0] for one, other in itertools.pairwise(requests) if other.keys)
    words = ("--replicas", "2", "--router", "prefix_affinity", "--json", "-")
    assert main(["simulate", "-w", str(tmp_path), *words]) == 0
    facts = json.loads(capsys.readouterr().out)["runs"]["fcfs"]
    assert facts["requests"]["came"] == len(requests)


def test_replay_says_which_choice_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config({"record": str(tmp_path), "block_size": BLOCK})
    router, engines = FleetRouter.from_config(config), [Engine(0, 96, 2), Engine(1, 100, 2)]
    for number in range(3):
        router.choose(request(f"r{number}"), engines)
    router.close()
    assert main(["replay", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "router prefix_affinity, 3 requests, the fleet was stopped\n3 of 3 choices equal" in told
    log = open_log(tmp_path)
    log.chosen(request("wrong"), log.mask(RoutedPrompt((), 40)), engines, 1)
    log.close()
    assert main(["replay", str(tmp_path), "--json", str(tmp_path / "told.json")]) == 1
    told = capsys.readouterr().out
    assert "0 of 1 choices equal\nNOT EQUAL: choice 1, 0.0" in told and "the fleet chose replica 1 (100 prompt" in told
    facts = json.loads((tmp_path / "told.json").read_text())
    assert [one["is_equal"] for one in facts.values()] == [True, False]
    assert main(["replay", str(tmp_path), "--what-if", "router=random"]) == 2
    assert "octavo simulate -w" in capsys.readouterr().err


def test_a_router_that_is_not_there_is_refused_before_a_log_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="router is 'nearest'; choose one of least_loaded, "):
        FleetRouter.from_config(load_config({"record": str(tmp_path / "new")}), "nearest")
    assert not (tmp_path / "new").exists()

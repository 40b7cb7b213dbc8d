"""octavo fleet: real fleets with scripted models, and what its users see and change."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fake_server import FakeServer

from octavo import cli
from octavo.cli.servers import call_admin

WAIT_S = 60.0
SCRIPT = '{"rules": [{"say": "All is well. ", "finish": "length", "delay_ms": 5}]}'


class Fleet(FakeServer):
    """A real one, of scripted engines."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0", "--max-num-seqs", "4")
    verb = "fleet"

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """The statuses of its replicas."""
        found: list[dict[str, Any]] = self.status()["engine"]["replicas"]
        return found

    def complete(self, max_tokens: int, prompt: str = "hello") -> dict[str, Any]:
        """The answer to a prompt."""
        status, _, body = self.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, WAIT_S)
        assert status == 200, body
        answer: dict[str, Any] = body
        return answer


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        (Path(short) / "script.json").write_text(SCRIPT)
        yield Path(short)


@pytest.fixture(autouse=True)
def run_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_RUN_DIR", str(folder))


def start(folder: Path, name: str, *flags: str) -> Fleet:
    words = ("--served-model-name", name, *flags)
    return Fleet(f"scripted:{folder}/script.json", folder / f"{name}.log", *words, env={"OCTAVO_RUN_DIR": str(folder)})


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    words = ("--replicas", "3", "--router", "least_requests", "--log-level", "info")
    with start(folder, "fleet", *words) as running:
        yield running
        assert running.end() == 0, running.text
        assert "Traceback" not in running.text


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class Streams:
    """Requests that are answered in the background, each with this many tokens."""

    def __init__(self, fleet: Fleet, count: int, max_tokens: int) -> None:
        self.answers: list[dict[str, Any]] = []
        run = lambda number: self.answers.append(fleet.complete(max_tokens, f"hello {number}"))  # noqa: E731
        self._threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        self._max_tokens = max_tokens
        for thread in self._threads:
            thread.start()
        wait_until(lambda: fleet.status()["open_requests"] >= count or len(self.answers) == count)

    def end(self) -> None:
        """Wait for all answers, which are complete."""
        for thread in self._threads:
            thread.join(WAIT_S)
        assert [answer["usage"]["completion_tokens"] for answer in self.answers] == [self._max_tokens] * len(
            self._threads
        )


@contextmanager
def running_requests(fleet: Fleet, count: int) -> Iterator[None]:
    """Requests that run until they are cancelled, which is at the end."""
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        status, _, body = fleet.post("/v1/completions", {"prompt": "hello", "max_tokens": 12_000}, 2 * WAIT_S)
        answers.append((status, body["error"]["code"]))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: [row["state"] for row in call_admin(fleet.admin, "explain")["open"]] == ["decode"] * count)
        yield
    finally:
        for row in call_admin(fleet.admin, "explain")["open"]:
            call_admin(fleet.admin, "cancel", row["id"])
        for thread in threads:
            thread.join(WAIT_S)
    assert answers == [(499, "cancelled")] * count


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints; it must succeed."""
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_the_report_has_a_line_of_the_replicas_and_the_log_their_processes(fleet: Fleet) -> None:
    assert "replicas  3, router least_requests" in fleet.text
    assert fleet.replicas[0]["where"] == "local" and fleet.replicas[0]["state"] == "ready"
    naming = [line for line in fleet.text.splitlines() if "replica-" in line]
    assert len(naming) == 1 and "processes: supervisor " in naming[0], naming
    assert all(f", {replica['name']} {replica['pid']}" in naming[0] for replica in fleet.replicas)


def test_requests_finish_although_a_replica_is_killed(fleet: Fleet) -> None:
    streams = Streams(fleet, 6, 800)
    wait_until(lambda: all(row["open_requests"] for row in fleet.replicas))
    os.kill(fleet.replicas[0]["pid"], signal.SIGKILL)
    streams.end()
    wait_until(lambda: [row["state"] for row in fleet.replicas] == ["ready"] * 3)
    report = fleet.status()["engine"]
    assert report["restarts"] == 1 and report["resumed_requests"] >= 1


def test_ps_top_and_metrics_have_a_row_for_each_replica(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    with running_requests(fleet, 6):
        shown = json.loads(run(capsys, "top", "fleet", "--json"))
        assert [row["number"] for row in shown["replicas"]] == [row["number"] for row in fleet.replicas]
        assert shown["requests"]["running"] == 6 and len(shown["running"]) == 6
        assert shown["server"]["max_sequences"] == 12
        out = run(capsys, "top", "fleet", "--once")
        assert out.count(" local  ") == 3 and "6 of 12" in out
        lines = run(capsys, "ps").splitlines()
        assert len([line for line in lines if line.startswith("  replica ")]) == 3
        text = fleet_metrics(fleet)
        for row in fleet.replicas:
            assert f'octavo_replica_up{{model_name="fleet",replica="{row["number"]}"}} 1.0' in text
        assert "octavo_fleet_resumed_requests_total" in text
        assert 'octavo_sequences_running{model_name="fleet"} 6.0' in text


def fleet_metrics(fleet: Fleet) -> str:
    import urllib.request

    with urllib.request.urlopen(fleet.url + "/metrics", timeout=WAIT_S) as answer:
        text: str = answer.read().decode()
        return text


def test_health_names_the_replicas(fleet: Fleet) -> None:
    status, _, body = fleet.get("/health")
    assert status == 200
    assert [row["state"] for row in body["replicas"]] == ["ready"] * 3


def test_explain_names_the_replica(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    with running_requests(fleet, 1):
        [found] = call_admin(fleet.admin, "explain")["open"]
        out = run(capsys, "explain", found["id"], "--server", "fleet")
        assert "engine   replica-" in out


def test_it_is_scaled_rolled_and_drained_without_a_lost_request(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = Streams(fleet, 6, 500)
    assert "draining" in run(capsys, "admin", "scale", "2", "--server", "fleet") and len(fleet.replicas) == 2
    before = {row["number"] for row in fleet.replicas}
    run(capsys, "admin", "roll", "--server", "fleet")
    after = {row["number"] for row in fleet.replicas}
    assert len(after) == 2 and not before & after
    run(capsys, "admin", "scale", "3", "--server", "fleet")
    last = str(max(row["number"] for row in fleet.replicas))
    run(capsys, "admin", "drain_replica", last, "--server", "fleet")
    run(capsys, "admin", "scale", "3", "--server", "fleet")
    run(capsys, "admin", "remove_replica", str(fleet.replicas[0]["number"]), "--server", "fleet")
    assert json.loads(run(capsys, "admin", "replicas", "--server", "fleet"))["change"]["state"] == "done"
    run(capsys, "admin", "scale", "3", "--server", "fleet")
    streams.end()


def test_a_change_that_is_not_possible_says_why(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["scale", "many"], "scale is given 'many'; give the number of replicas"),
        (["drain_replica", "999"], "there is no replica 999; there are: "),
        (["scale", "2", "--model", "other"], "--model is 'other'; give one of fleet"),
        (["scale", "2", "--to", "x"], "--to and --revision are for roll; leave them out of scale"),
        (["status", "--model", "fleet"], "--model is for changes of a fleet"),
        (["roll", "--to", "scripted:/none.json"], "roll --to scripted:/none.json failed: "),
    ):
        assert cli.main(["admin", *words, "--server", "fleet"]) == 2, words
        assert f"error: {message}" in capsys.readouterr().err
    assert [row["state"] for row in fleet.replicas] == ["ready"] * 3


def test_a_client_of_openai_is_served(fleet: Fleet) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    parts = client.chat.completions.create(
        model="fleet", messages=[{"role": "user", "content": "hello"}], max_tokens=20, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text.startswith("All is well.")


def test_chaos_kills_a_random_replica(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kill-engine", "1s", "--streams", "4", "--duration", "3s", "--max-tokens", "100", "--yes", "--json"]
    assert cli.main(["chaos", "fleet", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["faults"]["kill_engine"] >= 1 and report["lost"] == 0 and not report["errors"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas is 0 and no engine can join; give --hosts FILE or --fleet-address HOST:PORT"),
        (["--replicas", "-1"], "--replicas is '-1'; give a whole number from 0 to 1024"),
        (["--router", "nearest"], "unknown --router 'nearest'; give one of prefix_affinity, "),
        (["--in-process"], "--in-process is for one engine; leave it out, or use octavo serve"),
        (["--dp", "2"], "--dp is not supported: octavo fleet --replicas N"),
        (["--plan", "/none.json"], "/none.json cannot be read"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fleet", "--port", "0", *words]) == 2
    assert f"error: {message}" in capfd.readouterr().err


def test_serve_refuses_the_settings_of_a_fleet(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--replicas", "2"]) == 2
    assert "unknown flag '--replicas'" in capfd.readouterr().err


def test_a_server_is_no_fleet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Server(Fleet):
        verb = "serve"

    words = ("--served-model-name", "alone")
    with Server(f"scripted:{folder}/script.json", folder / "alone.log", *words) as server:
        assert cli.main(["admin", "scale", "2", "--server", "alone"]) == 2
        assert "error: scale is for a fleet; start one with: octavo fleet MODEL" in capsys.readouterr().err
        assert not [line for line in run(capsys, "ps").splitlines() if "alone" in line and "replica" in line]
        assert server.end() == 0


def test_a_server_with_ranks_shows_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Server(Fleet):
        verb = "serve"

    words = ("--served-model-name", "ranked", "-tp", "2")
    with Server(f"scripted:{folder}/script.json", folder / "ranked.log", *words) as server:
        server.complete(5)
        rows = lambda: json.loads(run(capsys, "top", "ranked", "--json"))["replicas"]  # noqa: E731
        [row] = rows()
        assert [(rank["rank"], rank["state"]) for rank in row["ranks"]] == [(0, "ready"), (1, "ready")]
        assert all(rank["pid"] for rank in row["ranks"]) and row["tokens_per_s"] is not None
        wait_until(lambda: all(rank["step"] > 0 for rank in rows()[0]["ranks"]))  # they come with pings
        out = run(capsys, "top", "ranked", "--once")
        assert "rank 0  localhost" in out and "rank 1  localhost" in out
        assert 'octavo_rank_step_seconds{model_name="ranked",rank="1"}' in fleet_metrics(server)
        assert server.end() == 0, server.text


def test_a_plan_sets_what_no_flag_sets(folder: Path) -> None:
    plan = {
        "model": f"scripted:{folder}/script.json", "replicas": 2, "router": "round_robin",
        "settings": {"max-num-seqs": 9, "max-num-batched-tokens": 300},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps({"plan": plan}))
    with start(folder, "planned", "--plan", str(folder / "plan.json")) as fleet:
        assert len(fleet.replicas) == 2 and "replicas  2, router round_robin" in fleet.text
        assert "replicas 2, router round_robin, max_batch_tokens 300" in fleet.text
        assert "not taken, because they are set: model, max_sequences" in fleet.text
        assert fleet.replicas[0]["num_slots"] == 4
        assert fleet.end() == 0

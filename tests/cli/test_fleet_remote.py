"""octavo fleet with engines of other processes that join it, or that it dials."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.test_fleet import Fleet, Streams, folder, run_dir, wait_until
from tests.ports import free_port

from octavo.cli.server_registry import find_servers

assert folder and run_dir  # fixtures


@contextmanager
def engine(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run octavo serve for a front."""
    model = f"scripted:{folder}/script.json"
    command = [sys.executable, "-m", "octavo", "serve", model, "--max-num-seqs", "4", "--quiet", *words]
    process = subprocess.Popen(command, env={**os.environ, "OCTAVO_RUN_DIR": str(folder)})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_engines_join_are_killed_and_no_request_is_lost(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    model = f"scripted:{folder}/script.json"
    flags = ("--served-model-name", "joined", "--replicas", "0", "--fleet-address", address)
    with (
        engine(folder, "--join", address) as one,
        engine(folder, "--join", address),
        Fleet(model, folder / "joined.log", *flags, env={"OCTAVO_RUN_DIR": str(folder)}) as fleet,
    ):
        wait_until(lambda: len(fleet.replicas) == 2)
        assert f"octavo serve MODEL --join {address}" in fleet.text
        streams = Streams(fleet, 6, 800)
        wait_until(lambda: all(row["open_requests"] for row in fleet.replicas))
        one.send_signal(signal.SIGKILL)
        streams.end()
        assert len(fleet.replicas) == 1
        assert fleet.status()["engine"]["resumed_requests"] >= 1
        fleet.complete(5)
        assert fleet.end() == 0, fleet.text
        assert "Traceback" not in fleet.text


def test_a_fleet_whose_replicas_have_left_is_not_ready_and_its_requests_wait(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ("--served-model-name", "left", "--replicas", "0", "--fleet-address", address)
    env = {"OCTAVO_RUN_DIR": str(folder)}
    with (
        engine(folder, "--join", address) as one,
        Fleet(f"scripted:{folder}/script.json", folder / "left.log", *flags, env=env) as fleet,
    ):
        assert fleet.get("/readyz")[0] == 200
        one.terminate()
        wait_until(lambda: not fleet.replicas)
        status, _, body = fleet.get("/readyz")
        assert status == 503 and "no replica has joined yet" in str(body)
        assert fleet.get("/livez")[0] == 200
        streams = Streams(fleet, 2, 20)
        assert not streams.answers
        with engine(folder, "--join", address):
            streams.end()
            assert fleet.get("/readyz")[0] == 200
        assert fleet.end() == 0, fleet.text


def test_listed_engines_are_dialled_beside_a_local_one(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts = folder / "hosts"
    hosts.write_text(f"# engines\n{address}  # here\n")
    model = f"scripted:{folder}/script.json"
    flags = ("--served-model-name", "listed", "--replicas", "1", "--hosts", str(hosts), "--max-num-seqs", "4")
    env = {"OCTAVO_RUN_DIR": str(folder)}
    with engine(folder, "--offer", address), Fleet(model, folder / "listed.log", *flags, env=env) as fleet:
        wait_until(lambda: len(fleet.replicas) == 2)
        Streams(fleet, 8, 50).end()
        one, other = (row["fingerprint"] for row in fleet.replicas)
        assert one == other and one


def test_before_the_first_engine_has_joined_requests_are_refused_with_503(folder: Path) -> None:
    address, log = f"127.0.0.1:{free_port()}", folder / "empty.log"
    model = f"scripted:{folder}/script.json"
    command = [sys.executable, "-m", "octavo", "fleet", model, "--port", "0", "--replicas", "0"]
    with log.open("wb") as out:
        fleet = subprocess.Popen([*command, "--fleet-address", address], stdin=subprocess.DEVNULL, stderr=out)
    try:
        wait_until(lambda: "waiting for the first engine" in log.read_text())
        (url,) = [record.url for record in find_servers() if record.pid == fleet.pid]
        wait_until(lambda: _status(f"{url}/readyz") == (503, "no_replica"))
        assert _status(f"{url}/v1/models") == (503, "no_replica")
        with engine(folder, "--join", address):
            wait_until(lambda: _status(f"{url}/readyz")[0] == 200)
        fleet.terminate()
        assert fleet.wait(30) == 0, log.read_text()
    finally:
        fleet.kill()
        fleet.wait(30)


def _status(url: str) -> tuple[int, str]:
    """Return the status of an answer, and the code of its error."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["code"]
    except (OSError, ValueError):
        return 0, ""

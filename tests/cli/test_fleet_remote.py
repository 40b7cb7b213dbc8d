"""octavo fleet with engines of other processes that join it, or that it dials."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.test_fleet import Fleet, Streams, folder, run_dir, wait_until

assert folder and run_dir  # fixtures


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
        streams = Streams(fleet, 6, 400)
        wait_until(lambda: all(row["open_requests"] for row in fleet.replicas))
        one.send_signal(signal.SIGKILL)
        streams.end()
        assert len(fleet.replicas) == 1
        assert fleet.status()["engine"]["resumed_requests"] >= 1
        fleet.complete(5)
        assert fleet.end() == 0, fleet.text
        assert "Traceback" not in fleet.text


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

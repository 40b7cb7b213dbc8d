"""octavo fleet --ray: replicas that a local Ray places."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from tests.cli.test_fleet import Fleet, Streams, folder, run, run_dir, wait_until

from octavo import cli

assert folder and run_dir  # fixtures
pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")


@pytest.mark.timeout(300)
def test_replicas_on_a_local_ray_lose_no_request_and_are_scaled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--served-model-name", "placed", "--replicas", "2", "--ray=local", "--router", "least_requests")
    model = f"scripted:{folder}/script.json"
    with Fleet(model, folder / "placed.log", *flags, env={"OCTAVO_RUN_DIR": str(folder)}) as fleet:
        assert "on this machine, listening on loopback only" in fleet.text
        assert [row["state"] for row in fleet.replicas] == ["ready", "ready"]
        streams = Streams(fleet, 6, 400)
        wait_until(lambda: all(row["open_requests"] for row in fleet.replicas))
        agent = psutil.Process(int(fleet.replicas[0]["name"].partition(":")[2]))
        actor = agent.parent()
        assert actor is not None and actor.pid != os.getpid()
        actor.kill()
        streams.end()
        assert fleet.status()["engine"]["resumed_requests"] >= 1
        wait_until(lambda: len(fleet.replicas) == 2)  # Ray started it again, and it joined
        assert cli.main(["admin", "roll", "--to", "other", "--server", str(fleet.process.pid)]) == 2
        assert "an engine that joins must have the fleet's model; leave them out" in capsys.readouterr().err
        run(capsys, "admin", "scale", "1", "--server", str(fleet.process.pid))
        assert len(fleet.replicas) == 1
        fleet.complete(5)
        children = psutil.Process(fleet.process.pid).children(recursive=True)
        assert fleet.end() == 0, fleet.text
        assert "Traceback" not in fleet.text
    wait_until(lambda: not [child for child in children if child.is_running() and child.status() != "zombie"])

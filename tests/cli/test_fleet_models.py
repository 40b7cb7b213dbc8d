"""octavo fleet with several models: each has its replicas, is loaded on demand, and is seen in every view."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.cli.test_fleet import WAIT_S, Fleet, folder, run_dir  # noqa: F401  fixtures
from tests.server.several_models import write_script

from octavo import cli


def _says(fleet: Fleet, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    status, _, answer = fleet.post("/v1/chat/completions", body, WAIT_S)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def _until_unloaded(fleet: Fleet, model: str) -> None:
    end = time.monotonic() + WAIT_S
    while fleet.status()["engine"]["models"][model]["state"] != "unloaded":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_several_models_with_replicas_are_loaded_seen_and_changed(
    folder: Path,  # noqa: F811  the fixture
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    red, blue = write_script(tmp_path, "red"), write_script(tmp_path, "blue")
    models = tmp_path / "models.yaml"
    models.write_text(json.dumps({"models": [{"model": blue, "name": "small", "replicas": 2}]}))
    flags = ("--models", str(models), "--keep-alive", "1.5", "--kv-cache-tokens", "4096")
    with Fleet(red, tmp_path / "log", *flags) as fleet:
        assert "red is loaded; when a request needs them: small; unloaded after 1.5 s" in fleet.text
        assert _says(fleet, "red") == "I am red."
        assert _says(fleet, "small") == "I am blue."
        rows = fleet.status()["engine"]["models"]["small"]["engine"]["replicas"]
        assert [row["state"] for row in rows] == ["ready", "ready"]
        capsys.readouterr()
        assert cli.main(["ps"]) == 0
        shown = capsys.readouterr().out
        assert "  model" in shown and "small" in shown
        _until_unloaded(fleet, "small")
        assert cli.main(["admin", "scale", "3", "--model", "small"]) != 0
        assert "model small is not loaded" in capsys.readouterr().err
        assert cli.main(["admin", "scale", "3", "--model", "other"]) != 0
        assert "give one of red, small" in capsys.readouterr().err
        assert _says(fleet, "small") == "I am blue."

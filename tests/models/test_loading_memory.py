"""Peak memory of loading: with 300 MB here; `python -m tools.loading_memory` measures 4 GB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools.loading_memory import GIB, measure, write_checkpoint

from octavo.ops import cpu

SIZE = 300 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(not cpu.status().is_loaded, reason="weights are packed by the C++ library"),
]


@pytest.mark.parametrize("kind, quantization", [("bf16", "auto"), ("bf16", "int4"), ("gptq", "auto"), ("fp8", "auto")])
def test_loading_holds_little_more_than_the_packed_weights(kind: str, quantization: str, tmp_path: Path) -> None:
    """At most 1.3 times the packed weights, and 2 GiB for 4 GiB of a checkpoint, above what was there before."""
    folder = write_checkpoint(tmp_path / "model", SIZE, kind)
    size = (folder / "model.safetensors").stat().st_size
    assert size == pytest.approx(SIZE, rel=0.25)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        found = measure(folder, quantization, cache)
        assert not [note for note in found["notes"] if "cache" in note]
        assert found["peak"] - found["before"] <= 1.3 * found["packed"] + 2 * GIB * size / (4 * GIB), (cache, found)
    assert any((tmp_path / "cache").iterdir())

"""A GGUF type is an entry of two files: Q5_0 is removed, then added: bits kept, quantised again, and as floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from octavo.artifacts import hub
from octavo.artifacts.hub import choose_file
from octavo.errors import ModelFileError, UnknownModelError
from octavo.nn.gguf_blocks import GGUF_TYPES, BlockCodes, BlockParts, GGUFType
from octavo.nn.packed_weight import Bytes, WeightKind
from tests.models.dense_backend import all_logits, load_decoder
from tests.models.test_decoder import prompt
from tests.models.test_native_decoder import Probe
from tests.source_tree import ROOT
from tests.tiny_gguf import make_tiny_gguf

Q5_0 = GGMLQuantizationType.Q5_0


# Begin of the worked example of docs/extending.md.
def q5_0(blocks: Bytes) -> BlockParts:
    """Convert blocks of 32: one float16, the fifth bits in 4 bytes, the lower four in 16; codes are offset by 16."""
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)[:, 0]
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate((blocks[:, 6:] & 15, blocks[:, 6:] >> 4), axis=1)
    return (low | high << 4).view(np.int8) - np.int8(16), scales, None


ENTRY = GGUFType(BlockCodes(WeightKind.INT8, 32, q5_0))
# End of the worked example.


def test_the_document_has_this_entry() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    example = source.split("# Begin of the worked example of docs/extending.md.\n")[1].split("# End of")[0]
    example = example.replace("ENTRY =", "GGUF_TYPES[GGMLQuantizationType.Q5_0] =")
    assert example in (ROOT / "docs/extending.md").read_text(encoding="utf-8")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    monkeypatch.delitem(GGUF_TYPES, Q5_0)
    monkeypatch.setattr(hub, "ORDER", tuple(label for label in hub.ORDER if label != "Q5_0"))
    path = tmp_path / "tiny.gguf"
    return path, make_tiny_gguf("llama2", path, "Q5_0")


def test_without_its_entry_it_is_refused(tiny: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(ModelFileError, match="has type Q5_0; F32, F16"):
        load_decoder(tiny[0])
    with pytest.raises(UnknownModelError, match="none is supported"):
        choose_file("a/b", ["m-Q5_0.gguf"], None)


@pytest.mark.parametrize(
    "entry", [ENTRY, GGUFType(nearest=WeightKind.INT8), GGUFType()], ids=["bits kept", "quantised again", "floats"]
)
def test_one_entry_reads_it(
    tiny: tuple[Path, dict[str, torch.Tensor]], entry: GGUFType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(GGUF_TYPES, Q5_0, entry)
    path, stored = tiny
    make_tiny_gguf("llama2", tmp_path / "floats.gguf", "F32", tensors=stored)
    rows = [prompt(40), prompt(1, 2), prompt(17, 3)]
    expected = all_logits(load_decoder(tmp_path / "floats.gguf"), rows)
    for found, logits in zip(all_logits(load_decoder(path), rows), expected, strict=True):
        assert torch.equal(found, logits)
    native = Probe(path, "native")
    assert native.decoder is not None
    kinds = {part.kind for layer in native.decoder._weights.layers for part in layer.qkv}
    assert kinds == {WeightKind.BFLOAT16 if entry == GGUFType() else WeightKind.INT8}
    for logits, found in zip(expected, native.all_logits(rows), strict=True):
        assert (found - logits[-1]).norm() < 0.05 * logits[-1].norm()


def test_and_one_place_in_the_order_has_it_chosen(
    tiny: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ORDER", (*hub.ORDER, "Q5_0"))
    assert choose_file("a/b", ["m-Q9_K.gguf", "m-Q5_0.gguf"], None) == "m-Q5_0.gguf"

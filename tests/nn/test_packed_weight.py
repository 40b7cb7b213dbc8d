"""Packed weights: what C++ packs is what torch reads back, in every kind, in pieces, with padding."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from octavo.nn.gguf_blocks import GGUF_TYPES, GGUFType, RawMatrix
from octavo.nn.packed_weight import (
    ALIGNMENT,
    Codes,
    PackedWeight,
    WeightKind,
    WeightShape,
    empty_buffer,
    pack_rows,
)
from octavo.nn.packing import codes_of_floats
from octavo.ops import cpu, packed_linear
from tests.tiny_gguf import random_blocks

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason="weights are packed by the C++ library")


def some_codes(kind: WeightKind, outputs: int, inputs: int) -> Codes:
    codes = codes_of_floats(torch.randn(outputs, inputs).numpy(), kind)
    assert codes is not None
    return codes


def rows_of(codes: Codes, start: int, end: int) -> Codes:
    parts = (None if part is None else part[start:end] for part in (codes.scales, codes.minima))
    return Codes(codes.kind, codes.group, codes.codes[start:end], *parts)


@pytest.mark.parametrize("kind", WeightKind)
@pytest.mark.parametrize("outputs, inputs", [(16, 32), (1, 64), (40, 96), (33, 576)])
def test_the_packed_bytes_are_the_codes(kind: WeightKind, outputs: int, inputs: int) -> None:
    codes = some_codes(kind, outputs, inputs)
    packed = PackedWeight.pack(codes)
    assert (packed.kind, packed.outputs, packed.inputs, packed.group) == (kind, outputs, inputs, codes.group)
    assert torch.equal(packed.dequantize(), codes.dequantize())
    assert packed.buffer.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("kind", [WeightKind.FLOAT32, WeightKind.BFLOAT16])
def test_float_kinds_take_any_number_of_inputs(kind: WeightKind) -> None:
    codes = some_codes(kind, 19, 47)
    assert torch.equal(PackedWeight.pack(codes).dequantize(), codes.dequantize())


@pytest.mark.parametrize(
    "kind", [kind for kind in GGUF_TYPES if GGUF_TYPES[kind] != GGUFType()], ids=lambda kind: kind.name
)
def test_every_block_type_is_packed_and_multiplied(kind: GGMLQuantizationType) -> None:
    matrix = RawMatrix(random_blocks(kind), kind, range(768))
    codes = matrix.codes(0, 40) if matrix.is_kept else codes_of_floats(matrix.values(0, 40), WeightKind.INT8)
    assert codes is not None
    packed = PackedWeight.pack(codes)
    values = packed.dequantize()
    assert torch.equal(values, codes.dequantize())
    x_TE, out_TF = torch.randn(3, 768), torch.empty(3, 40)
    packed_linear.linear(packed.descriptor(), packed_linear.prepare(x_TE, packed.kind), out_TF)
    expected = packed_linear.linear_reference(x_TE, values, None, packed.kind)
    assert (out_TF - expected).abs().max() <= 2e-6 * expected.abs().max()
    rows, places = torch.empty(2, 768), torch.tensor([1, 39])
    unpack = cpu.function("octavo_linear_unpack_rows", c_void_p, c_void_p, c_int64, c_void_p, c_int64)
    assert unpack is not None
    descriptor = packed.descriptor()
    unpack(ctypes.addressof(descriptor), places.data_ptr(), 2, rows.data_ptr(), 768)
    assert torch.equal(rows, values[places])


@pytest.mark.parametrize("kind", WeightKind)
def test_pieces_packed_by_several_threads_are_the_whole(kind: WeightKind) -> None:
    codes = some_codes(kind, 301, 64)
    whole = PackedWeight.pack(codes)
    buffer = empty_buffer(whole.nbytes)
    pieces = [(start, min(start + 7, 301)) for start in range(0, 301, 7)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: pack_rows(whole.shape, buffer, piece[0], rows_of(codes, *piece)), pieces))
    np.testing.assert_array_equal(buffer, whole.buffer)


def test_the_descriptor_has_the_addresses() -> None:
    bias = np.arange(40, dtype=np.float32)
    packed = PackedWeight.pack(some_codes(WeightKind.INT4, 40, 64), bias)
    descriptor = packed.descriptor()
    assert ctypes.sizeof(descriptor) == 6 * 8
    assert (descriptor.kind, descriptor.outputs, descriptor.inputs, descriptor.group) == (3, 40, 64, 32)
    assert descriptor.packed == packed.buffer.ctypes.data and descriptor.bias == bias.ctypes.data
    assert PackedWeight.pack(some_codes(WeightKind.INT8, 16, 32)).descriptor().bias is None


def test_rows_that_do_not_fit_are_a_programmers_mistake() -> None:
    shape = WeightShape(WeightKind.INT8, 16, 64, 32)
    buffer = empty_buffer(shape.nbytes)
    with pytest.raises(AssertionError, match="rows inside"):
        pack_rows(shape, buffer, 10, some_codes(WeightKind.INT8, 7, 64))
    with pytest.raises(AssertionError, match="rows of this weight"):
        pack_rows(shape, buffer, 0, some_codes(WeightKind.INT4, 7, 64))
    with pytest.raises(AssertionError, match="aligned"):
        PackedWeight(shape, empty_buffer(shape.nbytes + 1)[1:])

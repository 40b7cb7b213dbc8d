"""Write quantised checkpoints from known codes, as the tools that publish them lay them out.

Owns: one packer for each format: from a matrix of floats to the tensors of its files and the values of their codes.
Does not: use the reader's code. Codes are packed by shifting them into words one after another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny_models import write_tensors

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names, the values
Packer = Callable[[Tensor], Packed]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def shift_together(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes along the last axis into int32 words, least significant bits first."""
    *shape, count = codes.shape
    words = []
    for row in codes.reshape(-1, count).tolist():
        number = sum(code << index * bits for index, code in enumerate(row))
        for index in range(-(-count * bits // 32)):
            word = number >> 32 * index & 0xFFFFFFFF
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words, dtype=torch.int32).reshape(*shape, -1)


def on_grid(values: Tensor, bits: int, group: int, *, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [F, E], float16 scales [F, G] and zero points [F, G] of values [F, E]."""
    groups = values.unflatten(1, (-1, group if group > 0 else values.shape[1]))
    middle, largest = 1 << bits - 1, (1 << bits) - 1
    if has_zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / largest).half()
        zeros = (-low / scales.float()).round().clamp(1, largest).int()
    else:
        scales = (groups.abs().amax(-1) / (middle - 1)).half()
        zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, largest).int().flatten(1), scales, zeros


def by_activation(
    values: Tensor, bits: int, group: int, *, has_zeros: bool, desc_act: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return on_grid's codes, scales and zero points, and each input's group, in random order with `desc_act`."""
    order = torch.arange(values.shape[1]) // (group if group > 0 else values.shape[1])
    if desc_act:
        order = order[torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(5))]
    by_group = torch.argsort(order, stable=True)
    codes, scales, zeros = on_grid(values[:, by_group], bits, group, has_zeros=has_zeros)
    return codes[:, torch.argsort(by_group)], scales, zeros, order


def from_grid(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> Tensor:
    """Return (code - zero) * scale in float32; `order` has each input's group."""
    if order is None:
        order = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, order]).float() * scales.float()[:, order]


def gptq(
    values: Tensor, bits: int = 4, group: int = 32, *, has_zeros: bool = False, version: int = 1, desc_act: bool = False
) -> Packed:
    """AutoGPTQ's layout: codes of one output in consecutive rows' bits; zero points less one in version 1."""
    codes, scales, zeros, order = by_activation(values, bits, group, has_zeros=has_zeros, desc_act=desc_act)
    stored_zeros = zeros - 1 if version == 1 else zeros
    tensors = {
        ".qweight": shift_together(codes, bits).T,
        ".qzeros": shift_together(stored_zeros.T, bits),
        ".scales": scales.T,
        ".g_idx": order.int(),
    }
    return tensors, from_grid(codes, scales, zeros, order)


def awq(values: Tensor, group: int = 32) -> Packed:
    """AutoAWQ's GEMM layout: eight outputs in a word, in its order."""
    codes, scales, zeros = on_grid(values, 4, group, has_zeros=True)

    def interleaved(transposed: Tensor) -> Tensor:
        return shift_together(transposed.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    tensors = {".qweight": interleaved(codes.T), ".qzeros": interleaved(zeros.T), ".scales": scales.T}
    return tensors, from_grid(codes, scales, zeros)


def fp8(
    values: Tensor, scale: str = "tensor", name: str = "weight_scale", dtype: torch.dtype = torch.float32
) -> Packed:
    """8-bit floats with one scale, one a row, or one a block of 128 x 128."""
    num_rows, num_inputs = values.shape
    if scale == "block":
        rows, columns = -(-num_rows // 128), -(-num_inputs // 128)
        scales = torch.empty(rows, columns)
        whole = torch.empty_like(values)
        for row in range(rows):
            for column in range(columns):
                where = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
                scales[row, column] = values[where].abs().max() / 448
                whole[where] = scales[row, column]
        scales = scales.to(dtype)
    else:
        largest = values.abs().amax(1, keepdim=True) if scale == "channel" else values.abs().amax()
        scales = (largest / 448).to(dtype)
        whole = scales.float().expand_as(values)
    codes = (values / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, f".{name}": scales, ".input_scale": torch.tensor(0.5)}
    return tensors, codes.float() * whole


def packed_integers(
    values: Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    has_zeros: bool = False,
    desc_act: bool = False,
    is_flat: bool = False,
) -> Packed:
    """pack-quantized of compressed-tensors. `is_flat`: scales of rows are a vector."""
    codes, scales, zeros, order = by_activation(values, bits, group, has_zeros=has_zeros, desc_act=desc_act)
    tensors = {
        ".weight_packed": shift_together(codes, bits),
        ".weight_scale": scales[:, 0] if is_flat else scales,
        ".weight_shape": torch.tensor(values.shape),
    }
    if desc_act:
        tensors[".weight_g_idx"] = order.int()
    if has_zeros:
        tensors[".weight_zero_point"] = shift_together(zeros.T, bits).T
    return tensors, from_grid(codes, scales, zeros, order)


def plain_integers(values: Tensor, group: int = -1, *, has_zeros: bool = False, desc_act: bool = False) -> Packed:
    """int-quantized of compressed-tensors."""
    codes, scales, zeros, order = by_activation(values, 8, group, has_zeros=has_zeros, desc_act=desc_act)
    tensors = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}
    if has_zeros:
        tensors[".weight_zero_point"] = (zeros - 128).to(torch.int8)
    if desc_act:
        tensors[".weight_g_idx"] = order.int()
    return tensors, from_grid(codes, scales, zeros, order)


def e2m1(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit floats, two in a byte with the first in the low half, and their values."""
    groups = values.unflatten(1, (scales.shape[1], -1)) / scales[..., None]
    codes = (groups[..., None] - E2M1).abs().argmin(-1)
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, ::2] | flat[:, 1::2] << 4, (E2M1[codes] * scales[..., None]).flatten(1)


def mxfp4(values: Tensor) -> Packed:
    """mxfp4-pack-quantized of compressed-tensors."""
    exponents = (values.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    codes, found = e2m1(values, exponents.exp2())
    return {".weight_packed": codes, ".weight_scale": (exponents + 127).to(torch.uint8)}, found


def nvfp4(values: Tensor) -> Packed:
    """nvfp4-pack-quantized of compressed-tensors."""
    whole = torch.tensor([448 * 6 / float(values.abs().max())])
    scales = (values.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    codes, found = e2m1(values, scales.float() / whole)
    return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": whole}, found


def bnb_four_bit(values: Tensor, kind: str = "nf4", block: int = 64, *, is_nested: bool = True) -> Packed:
    """bitsandbytes' 4 bits over the flattened matrix; the first of two values in the high half of a byte."""
    table = NF4 if kind == "nf4" else FP4
    blocks = values.reshape(-1, block)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(values.shape)}
    tensors = {".weight.quant_map": table}
    if is_nested:
        nested_map = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        rest = absmax - offset
        padded = torch.cat((rest, rest.new_zeros(-len(rest) % 256))).reshape(-1, 256)
        nested = padded.abs().amax(1)
        stored = ((padded / nested[:, None])[..., None] - nested_map).abs().argmin(-1).flatten()[: len(rest)]
        absmax = nested_map[stored] * nested.repeat_interleave(256)[: len(rest)] + offset
        tensors |= {
            ".weight.absmax": stored.to(torch.uint8),
            ".weight.nested_absmax": nested,
            ".weight.nested_quant_map": nested_map,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors[".weight.absmax"] = absmax
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
    flat = codes.flatten().to(torch.uint8)
    tensors[".weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    text = json.dumps(state).encode()
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (table[codes] * absmax[:, None]).reshape(values.shape)


def bnb_int8(values: Tensor) -> Packed:
    """bitsandbytes' int8 with each row's largest magnitude."""
    largest = values.abs().amax(1)
    codes = (values * (127 / largest)[:, None]).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * largest[:, None] / 127


def quantise_folder(source: Path, target: Path, pack: Packer, config: dict[str, Any]) -> Path:
    """Copy a model folder with its projections packed; return a copy with the values that the codes stand for."""
    plain = target.with_name(target.name + "-plain")
    for folder in (target, plain):
        shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, tensors[name] = pack(packed.pop(name))
        base = name.removesuffix(".weight")
        packed |= {base + end: part.clone(memory_format=torch.contiguous_format) for end, part in parts.items()}
    write_tensors(target, packed)
    write_tensors(plain, tensors)
    values = json.loads((target / "config.json").read_text()) | {"quantization_config": config}
    (target / "config.json").write_text(json.dumps(values))
    return plain

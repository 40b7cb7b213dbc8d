"""How a safetensors checkpoint declares that its weights are quantised.

Owns: the declarations of each tool (`quantization_config` of config.json, hf_quant_config.json) as one value; the
refusal of methods that cannot be read. Does not: read tensors; nn/checkpoint_formats does, and what a tensor is follows
from the tensors, so lists of modules that stay floats need no reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError

_REMEDY = (
    "use a checkpoint without quantization or in one of the supported formats (GPTQ, AWQ, FP8, compressed-tensors, "
    "bitsandbytes, MXFP4), or a GGUF file"
)


class QuantMethod(Enum):
    """A family of formats; one module of nn/checkpoint_formats reads each."""

    GPTQ = "gptq"
    AWQ = "awq"
    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    BITSANDBYTES = "bitsandbytes"
    MXFP4 = "mxfp4"


_METHODS = {
    "gptq": QuantMethod.GPTQ,
    "awq": QuantMethod.AWQ,
    "fp8": QuantMethod.FP8,
    "fbgemm_fp8": QuantMethod.FP8,
    "modelopt": QuantMethod.FP8,
    "compressed-tensors": QuantMethod.COMPRESSED_TENSORS,
    "compressed_tensors": QuantMethod.COMPRESSED_TENSORS,
    "bitsandbytes": QuantMethod.BITSANDBYTES,
    "mxfp4": QuantMethod.MXFP4,
}
_READ_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """A checked declaration. `label` is its name for users; `is_zero_offset`: GPTQ files have zero points less one."""

    method: QuantMethod
    label: str
    is_zero_offset: bool = False


def find_quantization(path: Path, table: object, hf_quant: Mapping[str, Any]) -> CheckpointQuantization | None:
    """Return the declaration in config.json's `quantization_config`, else in hf_quant_config.json; None if none is.

    Raises ModelFileError for a method or a variant that cannot be read.
    """
    if not isinstance(table, Mapping):
        if table is not None:
            raise ModelFileError(path, f"quantization_config is {str(table)[:99]}; an object is needed")
        table = hf_quant.get("quantization")
        if not isinstance(table, Mapping):
            return None
        path, table = path.with_name("hf_quant_config.json"), {**table, "quant_method": "modelopt"}
    method = _method(path, table)
    label, is_zero_offset = method.name, False
    if method is QuantMethod.GPTQ:
        _check_value(path, table, "checkpoint_format", ("gptq", "gptq_v2", None))
        label = f"GPTQ {_bits(path, table, (2, 3, 4, 8))}-bit"
        is_zero_offset = table.get("checkpoint_format") != "gptq_v2"
    elif method is QuantMethod.AWQ:
        _check_value(path, table, "version", ("gemm", "GEMM", None))
        _check_value(path, table, "checkpoint_format", ("gemm", None))
        label = f"AWQ {_bits(path, table, (4,))}-bit"
    elif method is QuantMethod.COMPRESSED_TENSORS:
        label = f"compressed-tensors {_compressed_format(path, table)}"
    elif method is QuantMethod.BITSANDBYTES:
        label = f"bitsandbytes {table.get('bnb_4bit_quant_type', 'fp4') if table.get('load_in_4bit') else 'int8'}"
    return CheckpointQuantization(method, label, is_zero_offset)


def _method(path: Path, table: Mapping[str, Any]) -> QuantMethod:
    name = table.get("quant_method")
    if name is None and (table.get("load_in_4bit") or table.get("load_in_8bit")):
        name = "bitsandbytes"
    if name == "auto-round":  # its packing_format is "auto_round:auto_gptq" or "auto_round:auto_awq"
        name = str(table.get("packing_format")).rpartition("auto_")[2]
    method = _METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise ModelFileError(path, f"quantization method {name!r} is not supported; {_REMEDY}")
    if name == "modelopt":
        _check_value(path, table, "quant_algo", ("FP8",))
    return method


def _bits(path: Path, table: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = table.get("bits", table.get("w_bit", 4))
    if bits not in known or isinstance(bits, bool):
        raise _unsupported(path, table, "bits", bits)
    return int(bits)


def _check_value(path: Path, table: Mapping[str, Any], key: str, known: tuple[str | None, ...]) -> None:
    value = table.get(key)
    if value not in known:
        raise _unsupported(path, table, key, value)


def _compressed_format(path: Path, table: Mapping[str, Any]) -> str:
    """Return the format's name. Formats of groups may differ; sparse ones and rotated weights are refused."""
    groups = table.get("config_groups")
    tables = groups.values() if isinstance(groups, Mapping) else ()
    of_groups = [group.get("format") for group in tables if isinstance(group, Mapping)]
    for name in (table.get("format"), *of_groups):
        if name not in (*_READ_COMPRESSED, None):
            raise _unsupported(path, table, "format", name)
    sparsity = table.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _unsupported(path, table, "sparsity_config.format", sparsity["format"])
    transforms = table.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ModelFileError(path, f"transform_config (rotated weights) is not supported; {_REMEDY}")
    return str(table.get("format") or next(filter(None, of_groups), "int-quantized"))


def _unsupported(path: Path, table: Mapping[str, Any], key: str, value: object) -> ModelFileError:
    method = table.get("quant_method", "bitsandbytes")
    return ModelFileError(path, f"{key} {value!r} of a {method} checkpoint is not supported; {_REMEDY}")

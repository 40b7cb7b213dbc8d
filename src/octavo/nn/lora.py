"""Low-rank adapters (Hu et al., "LoRA", arXiv 2106.09685) of a model's linear layers, and their slow twin.

Owns: reading an adapter's tensors for a model, with its scale in B; adding it to the rows of a torch linear layer.
Does not: pack for the kernels (models/native_adapters.py does), or choose rows.
Invariants: an adapter changes only linear layers of attention and MLP, in the model's canonical row order. A failure is
a ModelFileError that names the file, the tensor and the reason. A row's result depends on that row alone.
Shapes: T rows, N rows with an adapter, E inputs, F outputs, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifacts.adapter import AdapterFiles, adapter_id, find_adapter
from octavo.artifacts.families import FAMILIES, layer_linears, linear_shape, linear_tensors
from octavo.artifacts.family import LINEARS
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ModelFileError
from octavo.nn.coded_linear import CodedLinear
from octavo.nn.gguf_blocks import GGUF_TYPES, dequantize
from octavo.nn.gguf_weights import stored_order
from octavo.nn.layers import Linear
from octavo.nn.safetensors_file import FLOAT_TYPES, SafetensorsFile
from octavo.nn.weights import text_name

Values = npt.NDArray[np.float32]
Place = tuple[int, str]  # a layer and one of its linear layers
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_GGUF_NAME = re.compile(r"(?P<module>.+\.weight)\.lora_(?P<half>[ab])")


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The adapter of consecutive outputs of a linear layer. B has the scale."""

    first_output: int
    a_RE: Values
    b_FR: Values


Adapter = Mapping[Place, tuple[LoraPart, ...]]


@dataclass(frozen=True, slots=True)
class _Half:
    """A or B of a module, as the file has it."""

    name: str  # the tensor's
    values: Values


def read_adapter(path: str, spec: ModelSpec, max_rank: int, expected_id: int = 0) -> Adapter:
    """Read an adapter for this model. Raises ModelFileError, also if its id is not the expected one (0: any)."""
    files = find_adapter(path)
    if expected_id and adapter_id(files) != expected_id:
        raise ModelFileError(files.weights, "has changed since the adapter was loaded; load it under a new name")
    halves, scales = _read_peft(files, spec) if files.kind == "peft" else _read_gguf(files, spec)
    found: dict[Place, tuple[LoraPart, ...]] = {}
    for layer in range(spec.num_layers):
        for linear in (name for name in layer_linears(spec, layer) if name in LINEARS):
            parts, first = [], 0
            for module, rows in linear_tensors(spec, linear, layer).items():
                if module in halves:
                    size = (rows, linear_shape(spec, linear)[1], max_rank)
                    part = _part(files, halves.pop(module), size, scales.get(module))
                    parts.append(LoraPart(first, part[0], part[1]))
                first += rows
            if parts:
                found[layer, linear] = tuple(parts)
    for module, pair in halves.items():
        name = next(iter(pair.values())).name
        raise ModelFileError(files.weights, f"adapts {module}, which is no linear layer that adapters change", name)
    if not found:
        raise ModelFileError(files.weights, "has no adapter of any linear layer")
    return found


def _part(
    files: AdapterFiles, pair: dict[str, _Half], size: tuple[int, int, int], scale: float | None
) -> tuple[Values, Values]:
    """Check the halves of one module; return A and B times the scale."""
    outputs, inputs, max_rank = size
    for half, other in (("A", "B"), ("B", "A")):
        if half not in pair:
            raise ModelFileError(files.weights, f"has no lora_{half} beside it", pair[other].name)
    a, b = pair["A"], pair["B"]
    rank = a.values.shape[0] if a.values.ndim == 2 else 0
    for found, shape in ((a, (rank, inputs)), (b, (outputs, rank))):
        if found.values.shape != shape or not rank:
            reason = f"has shape {list(found.values.shape)}, the model needs {list(shape)}"
            raise ModelFileError(files.weights, reason, found.name)
        if not np.isfinite(found.values).all():
            raise ModelFileError(files.weights, "has values that are not finite", found.name)
    if rank > max_rank:
        raise ModelFileError(files.weights, f"has rank {rank}; --max-lora-rank is {max_rank}", a.name)
    module = a.name.split(".lora_A")[0].removeprefix("base_model.model.")
    factor = files.scale(module, rank) if scale is None else scale / rank if scale else 1.0
    return a.values, b.values * np.float32(factor)


def _read_peft(files: AdapterFiles, spec: ModelSpec) -> tuple[dict[str, dict[str, _Half]], dict[str, float]]:
    """Return the halves of each module by its canonical name."""
    halves: dict[str, dict[str, _Half]] = {}
    for name, tensor in SafetensorsFile(files.weights).tensors.items():
        match = _PEFT_NAME.fullmatch(name)
        if match is None:
            raise tensor.error("is no lora_A or lora_B of a linear layer; only these are supported")
        tensor.check(FLOAT_TYPES)
        module = match["module"]
        if spec.text_part:
            module = text_name(module) or module
        halves.setdefault(module, {})[match["half"]] = _Half(name, tensor.floats())
    return halves, {}


def _read_gguf(files: AdapterFiles, spec: ModelSpec) -> tuple[dict[str, dict[str, _Half]], dict[str, float]]:
    """Return the halves of each module, and its alpha (0: none)."""
    family, file = FAMILIES[spec.family], GGUFFile.open(files.weights)
    kinds = [file.metadata.get(key) for key in ("general.type", "adapter.type")]
    if kinds != ["adapter", "lora"]:
        raise ModelFileError(files.weights, f"is of type {kinds[0]!r}, {kinds[1]!r}; give an adapter of type lora")
    architecture = file.metadata.get("general.architecture")
    if architecture != (family.gguf_architecture or family.name):
        raise ModelFileError(files.weights, f"is for {architecture!r}; the model is of family {family.name!r}")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, (int, float)) or not np.isfinite(alpha):
        raise ModelFileError(files.weights, f"adapter.lora.alpha is {alpha!r}; a number is needed")
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if family.has_rotary_pairs else {}
    halves: dict[str, dict[str, _Half]] = {}
    for name, tensor in file.tensors.items():
        match = _GGUF_NAME.fullmatch(name)
        if match is None or tensor.type not in GGUF_TYPES or len(tensor.shape) != 2:
            raise ModelFileError(files.weights, "is no lora_a or lora_b of a linear layer", name)
        role, module = family.from_gguf(match["module"])
        values = dequantize(file.raw(name).reshape(tensor.shape[0], -1), tensor.type).reshape(tensor.shape)
        if match["half"] == "b" and role in heads and len(values) == heads[role] * spec.head_dim:
            values = values[stored_order(len(values), heads[role])]
        halves.setdefault(module.removesuffix(".weight"), {})[match["half"].upper()] = _Half(name, values)
    return halves, dict.fromkeys(halves, float(alpha))


class AdapterBank:
    """The adapters of a torch decoder, by number, and the rows of its step that have one."""

    def __init__(self) -> None:
        self._adapters: dict[int, dict[Place, list[tuple[int, Tensor, Tensor]]]] = {}
        self.rows: list[tuple[int, Tensor]] = []  # of each adapter of the step

    def put(self, number: int, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        """Add an adapter."""
        self._adapters[number] = {
            place: [
                (
                    part.first_output,
                    torch.from_numpy(part.a_RE).to(device, dtype),
                    torch.from_numpy(part.b_FR).to(device, dtype),
                )
                for part in parts
            ]
            for place, parts in adapter.items()
        }

    def drop(self, number: int) -> None:
        """Remove an adapter."""
        del self._adapters[number]

    def begin(self, adapters_T: Tensor | None, device: torch.device) -> None:
        """Begin a step whose rows have these adapters (-1: none); `device` gets them in one copy, without a wait."""
        self.rows = []
        if adapters_T is None:
            return
        numbers = sorted({int(number) for number in adapters_T.tolist() if number >= 0})
        rows = [(adapters_T == number).nonzero()[:, 0] for number in numbers]
        if device.type != "cpu":
            sizes = [len(one) for one in rows]
            staging = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
            torch.cat(rows, out=staging)
            rows = list(torch.split(staging.to(device, non_blocking=True), sizes))
        self.rows = list(zip(numbers, rows, strict=True))

    def add(self, place: Place, x_TE: Tensor, out_TF: Tensor) -> None:
        """Add to each row what its adapter gives; a matrix product of one row each, so that others do not change it."""
        for number, rows_N in self.rows:
            for first, a_RE, b_FR in self._adapters[number].get(place, ()):
                x_NE1 = x_TE.index_select(0, rows_N)[..., None]
                count = len(rows_N)
                h_NR1 = torch.bmm(a_RE.expand(count, -1, -1), x_NE1)
                added_NF = torch.bmm(b_FR.expand(count, -1, -1), h_NR1)[..., 0]
                out_TF[:, first : first + len(b_FR)].index_add_(0, rows_N, added_NF)


class AdaptedLinear:
    """A linear layer to whose results the adapters of a bank are added."""

    __slots__ = ("_bank", "_linear", "_place")

    def __init__(self, linear: Linear | CodedLinear, bank: AdapterBank, place: Place) -> None:
        self._linear, self._bank, self._place = linear, bank, place

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._linear.nbytes

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return self._linear.num_weights

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F]."""
        out_TF = self._linear(x_TE)
        if self._bank.rows:
            self._bank.add(self._place, x_TE, out_TF)
        return out_TF

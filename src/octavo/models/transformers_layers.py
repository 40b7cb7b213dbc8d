"""Replace the plain layers of a transformers model by packed ones that the C++ kernels compute.

Owns: which modules are replaced (linear layers, embeddings, RMS norms), packing of weights in memory, and linear layers
that share one input as one product. Does not: know families: a layer is recognised by what it computes.
Invariants: replaced layers get and return float32. A norm is replaced only if it gives the same values on random rows.
Shapes: T tokens, E inputs, F outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.native_weights import TABLES
from octavo.models.transformers_probe import LinearCall, running
from octavo.nn.packed_weight import PackedWeight, WeightKind
from octavo.nn.packing import WantedTensor, pack_matrices
from octavo.nn.segments import PackedLinear, PackedTable
from octavo.nn.weights import Weights
from octavo.ops.rms_norm import add_rms_norm

_FLOAT32 = WantedTensor("none", WeightKind.FLOAT32)
_ATOL = 1e-5  # between a norm and its replacement, on values around 1


def plain_linears(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that multiply by a weight and add a bias, and nothing else, with their names."""
    return {module: name for name, module in model.named_modules() if _is_linear(module)}


def _is_linear(module: nn.Module) -> bool:
    if type(module).forward is nn.Linear.forward:
        return True
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # GPT-2's, with the weight transposed


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear layer's weight as [F, E]."""
    weight = module.get_parameter("weight").data
    return weight.T if type(module).__name__ == "Conv1D" else weight


class _ModuleWeights:
    """A WeightSource over the weights of modules."""

    def __init__(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        self._weights = weights
        self._folder = folder
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {name: tuple(weight.shape) for name, weight in weights.items()}
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()

    def path(self, name: str) -> Path:
        """Return the model's folder."""
        return self._folder

    def drop_pages(self) -> None:
        """Do nothing: the weights are not mapped."""

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert a window of the weight into `out`."""
        rows = self._weights[name][first_row : first_row + out.shape[0]]
        out.copy_(rows if rows.dim() == 1 else rows[:, first_column : first_column + out.shape[1]])

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> None:
        """Return None: the weights are floats."""
        return None


class ModulePacker:
    """Packs weights in memory, keeping what was packed."""

    def __init__(self, folder: Path, wanted: WantedTensor) -> None:
        self._folder = folder
        self._wanted = wanted
        self.multiplied: list[PackedWeight] = []  # the weights of replaced linear layers

    @property
    def is_exact(self) -> bool:
        """Return True if all weights are float32; the kernels of other kinds round activations too."""
        return all(weight.kind == WeightKind.FLOAT32 for weight in self.multiplied)

    def pack(
        self, weights: Mapping[str, Tensor], biases: Sequence[Tensor | None], is_coded: bool = True
    ) -> list[PackedWeight]:
        """Pack matrices of equal width as one weight, or as several in order if their kinds differ.

        Without `is_coded`, the weight is float32.
        """
        return self._pack(weights, biases, self._wanted if is_coded else _FLOAT32)

    def pack_table(self, name: str, weight_VE: Tensor, bias_V: Tensor | None) -> list[PackedWeight]:
        """Pack an embedding or a head, which keep at least 8 bits."""
        quantization = TABLES.get(self._wanted.quantization, self._wanted.quantization)
        return self._pack({name: weight_VE}, [bias_V], replace(self._wanted, quantization=quantization))

    def _pack(
        self, weights: Mapping[str, Tensor], biases: Sequence[Tensor | None], wanted: WantedTensor
    ) -> list[PackedWeight]:
        view = Weights(_ModuleWeights(weights, self._folder))
        rows = {name: weight.shape[0] for name, weight in weights.items()}
        inputs = next(iter(weights.values())).shape[1]
        bias_F = _joined(list(rows.values()), biases)
        return pack_matrices(view, rows, inputs, wanted, bias_F)


def _joined(sizes: Sequence[int], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return the biases side by side in float32, zeros for those that are missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    parts = [torch.zeros(size) if bias is None else bias.float() for size, bias in zip(sizes, biases, strict=True)]
    return torch.cat(parts).contiguous()


def _nothing(*shape: int) -> Tensor:
    """Return a tensor of this shape in no memory, for models that ask for a weight's dtype, device or shape."""
    return torch.zeros(1).expand(shape)


class SharedProduct:
    """One product of an input with the weights of several linear layers, which take their columns of it in turn."""

    __slots__ = ("linear", "num_inputs", "num_outputs", "out", "source")

    def __init__(self, linear: PackedLinear, num_inputs: int) -> None:
        self.linear = linear
        self.num_inputs, self.num_outputs = num_inputs, linear.num_outputs
        self.source: Tensor | None = None
        self.out: Tensor | None = None

    def multiply(self, x: Tensor) -> Tensor:
        """Return all columns for x [..., E]."""
        return self.linear(x.reshape(-1, self.num_inputs)).view(*x.shape[:-1], self.num_outputs)


class LinearColumns:
    """Replaces one linear layer: columns [start, start + out_features) of a shared product."""

    def __init__(self, product: SharedProduct, start: int, count: int, is_last: bool) -> None:
        self.in_features, self.out_features = product.num_inputs, count
        self.weight = _nothing(count, product.num_inputs)
        self.bias = None
        self.product = product
        self.start = start
        self.is_whole = count == product.num_outputs
        self._is_last = is_last

    def __call__(self, x: Tensor) -> Tensor:
        """Return the columns for x [..., E]. They are computed for the first of the layers that gets x."""
        if running.recorder is not None:
            recorded: Tensor = running.recorder.leaf(self, x)
            return recorded
        product = self.product
        if product.source is not x or product.out is None:
            product.source, product.out = x, product.multiply(x)
        out = product.out
        if self._is_last:
            product.source = product.out = None
        return out if self.is_whole else out.narrow(-1, self.start, self.out_features)


class EmbeddingRows:
    """Replaces an embedding: lookup of rows of a packed table."""

    def __init__(self, table: PackedTable, num_embeddings: int, embedding_dim: int) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = _nothing(num_embeddings, embedding_dim)
        self._table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids of any shape."""
        if running.recorder is not None:
            recorded: Tensor = running.recorder.leaf(self, token_ids)
            return recorded
        return self._table(token_ids.reshape(-1).long()).view(*token_ids.shape, -1)


class KernelNorm:
    """Replaces an RMS norm."""

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.weight = weight_E
        self.eps = self.variance_epsilon = eps
        self._size = weight_E.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., E] normalised."""
        if running.recorder is not None:
            recorded: Tensor = running.recorder.leaf(self, x)
            return recorded
        return add_rms_norm(x.reshape(-1, self._size), None, self.weight, self.eps)[0].view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, both [..., E], and the sum."""
        rows = x.reshape(-1, self._size), residual.reshape(-1, self._size)
        normed, total = add_rms_norm(*rows, self.weight, self.eps)
        return normed.view(x.shape), total.view(x.shape)

    @classmethod
    def of(cls, module: nn.Module) -> KernelNorm | None:
        """Return the replacement of a module, or None if it is no RMS norm of the kernels' kind.

        The weight may be stored as its difference from 1.
        """
        weights = dict(module.named_parameters())
        eps = next(
            (getattr(module, name) for name in ("variance_epsilon", "eps", "norm_eps") if hasattr(module, name)), None
        )
        if list(weights) != ["weight"] or not isinstance(eps, float) or weights["weight"].dim() != 1:
            return None
        if len(inspect.signature(module.forward).parameters) != 1:
            return None
        weight_E = weights["weight"].detach().float()
        rows = torch.linspace(-2.0, 3.0, 3 * weight_E.shape[0]).view(3, -1) * torch.tensor([[1.0], [30.0], [0.01]])
        for candidate in (weight_E, weight_E + 1.0):
            norm = cls(candidate.contiguous(), eps)
            if torch.allclose(norm(rows), module.float()(rows), rtol=_ATOL, atol=_ATOL):
                return norm
        return None


def shared_groups(calls: Sequence[LinearCall]) -> list[list[nn.Module]]:
    """Group linear layers that got one tensor, in the order of their calls. A layer called twice is by itself."""
    counts: dict[nn.Module, int] = {}
    for call in calls:
        counts[call.module] = counts.get(call.module, 0) + 1
    groups: dict[tuple[int, int], list[nn.Module]] = {}
    for call in calls:
        key = (id(call.source), weight_of(call.module).shape[1])
        if counts[call.module] > 1:
            key = (-id(call.module), 0)
        group = groups.setdefault(key, [])
        if call.module not in group:
            group.append(call.module)
    return list(groups.values())


def replace_module(model: nn.Module, name: str, replacement: Callable[[Tensor], Tensor]) -> None:
    """Put a callable in the place of a submodule; one in a list stays a module."""
    parent_name, _, own_name = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        setattr(parent, own_name, _Wrapped(replacement))
        return
    delattr(parent, own_name)
    setattr(parent, own_name, replacement)  # no module, so that a call costs no hooks and an access no lookup


class _Wrapped(nn.Module):
    """A module that only calls."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def replace_layers(
    model: nn.Module,
    packer: ModulePacker,
    linears: Mapping[nn.Module, str],
    calls: Sequence[LinearCall],
    router_sizes: Collection[int],
) -> None:
    """Replace the tables, the linear layers that `calls` names or that are like them, and the norms.

    Linear layers with a number of outputs in `router_sizes` choose experts and stay float32.
    """
    _replace_tables(model, packer)
    groups = shared_groups(calls)
    called = {module for group in groups for module in group}
    places = {_place(model, linears[module]) for module in called}
    # experts that the probe did not reach
    groups += [[module] for module, name in linears.items() if module not in called and _place(model, name) in places]
    for group in groups:
        routers = [module for module in group if weight_of(module).shape[0] in router_sizes]
        for part, is_coded in ((routers, False), ([module for module in group if module not in routers], True)):
            if part:
                _replace_group(model, packer, {linears[module]: module for module in part}, is_coded)
    for name, module in list(model.named_modules()):
        if name and (norm := KernelNorm.of(module)) is not None:
            replace_module(model, name, norm)


def _place(model: nn.Module, name: str) -> tuple[type, str]:
    parent, _, own = name.rpartition(".")
    return type(model.get_submodule(parent)), own


def _replace_tables(model: Any, packer: ModulePacker) -> None:
    """Replace the embedding and the head; tied ones share a packed table. A scaled embedding stays as it is."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    is_plain = type(embedding).forward is nn.Embedding.forward and embedding.max_norm is None
    is_tied = head.weight is embedding.weight
    weights: list[PackedWeight] = []
    if is_plain:
        weights = packer.pack_table("embedding", embedding.weight, None)
        table = EmbeddingRows(PackedTable(weights), *embedding.weight.shape)
    if _is_linear(head):
        if not (is_tied and is_plain and head.bias is None):
            weights = packer.pack_table("head", weight_of(head), head.bias)
        packer.multiplied += weights
        columns = LinearColumns(SharedProduct(PackedLinear(weights), weights[0].inputs), 0, head.weight.shape[0], True)
        replace_module(model, names[head], columns)
    if is_plain:
        replace_module(model, names[embedding], table)


def _replace_group(model: nn.Module, packer: ModulePacker, group: Mapping[str, nn.Module], is_coded: bool) -> None:
    """Pack linear layers with one input as one product, and replace them."""
    weights = {name: weight_of(module) for name, module in group.items()}
    packed = packer.pack(weights, [dict(module.named_parameters()).get("bias") for module in group.values()], is_coded)
    packer.multiplied += packed
    product = SharedProduct(PackedLinear(packed), packed[0].inputs)
    start = 0
    for index, (name, weight) in enumerate(weights.items()):
        count = weight.shape[0]
        replace_module(model, name, LinearColumns(product, start, count, index == len(weights) - 1))
        start += count

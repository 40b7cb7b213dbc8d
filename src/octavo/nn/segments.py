"""The linear layers, embedding and head of a rank: weights cut into the segments of virtual ranks.

Owns: multiplication by segments, the order in which segments are summed, and gathering over ranks.
Does not: divide a model (models/shards.py does), read weights, or pack them.
Invariants: a segment's arithmetic does not depend on which rank has it. The C++ kernels give each output the same bits
in any weight, so a rank's outputs are multiplied at once; torch gives them only for equal shapes, so it multiplies
segment by segment. Inputs are always multiplied by segments, whose products `tree_sum` adds.
Shapes: T tokens, E inputs, F outputs, N rows that sample, V vocabulary, W rows of the table in one rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64, c_void_p
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from octavo.nn.layers import Linear
from octavo.nn.packed_weight import PackedWeight
from octavo.nn.parallel import Collective, tree_sum
from octavo.ops import cpu
from octavo.ops.packed_linear import linear, prepare


class PackedLinear:
    """y_TF = x_TE W_FE^T + b_F over packed weights, which have consecutive outputs. Float32, on the CPU."""

    __slots__ = ("_descriptors", "_weights", "nbytes", "num_outputs", "num_weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = tuple(weights)
        self._descriptors = [weight.descriptor() for weight in weights]
        self.num_outputs = sum(weight.outputs for weight in weights)
        self.num_weights = sum(weight.outputs * weight.inputs for weight in weights)
        self.nbytes = sum(weight.nbytes for weight in weights)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F]. x may be any columns of a wider tensor."""
        out_TF = torch.empty(x_TE.shape[0], self.num_outputs)
        threads = torch.get_num_threads() if cpu.status().is_parallel else 1
        prepared, kind, start = None, None, 0
        for descriptor, weight in zip(self._descriptors, self._weights, strict=True):
            if prepared is None or weight.kind != kind:
                prepared, kind = prepare(x_TE, weight.kind, threads), weight.kind
            linear(descriptor, prepared, out_TF[:, start : start + weight.outputs], num_threads=threads)
            start += weight.outputs
        return out_TF


class OutputSegments:
    """A linear layer of torch whose outputs are cut into segments.

    `activation` is applied to each segment by itself, because torch's values depend on the shape of a tensor.
    """

    __slots__ = ("_activation", "_segments", "nbytes", "num_weights")

    def __init__(self, segments: Sequence[Linear], activation: Callable[[Tensor], Tensor] | None = None) -> None:
        self._segments = tuple(segments)
        self._activation = activation
        self.num_weights = sum(segment.num_weights for segment in segments)
        self.nbytes = sum(segment.nbytes for segment in segments)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return the segments' outputs side by side, [T, F]."""
        parts = [segment(x_TE) for segment in self._segments]
        if self._activation is not None:
            parts = [self._activation(part) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class InputSegments:
    """A linear layer whose inputs are cut into segments, one per virtual rank of this rank (None: it has no inputs).

    `has_part` says for each rank whether it has any segment; a rank without one takes part in the exchange, but its
    tensor is not added.
    """

    __slots__ = ("_collective", "_columns", "_has_part", "_num_outputs", "_segments", "nbytes", "num_weights")

    def __init__(
        self,
        segments: Sequence[tuple[int, PackedLinear | Linear] | None],
        num_outputs: int,
        has_part: Sequence[bool],
        collective: Collective,
    ) -> None:
        self._segments, self._columns, start = [], [], 0
        for entry in segments:
            width = 0 if entry is None else entry[0]
            self._segments.append(None if entry is None else entry[1])
            self._columns.append(slice(start, start + width))
            start += width
        self._num_outputs = num_outputs
        self._has_part = tuple(has_part)
        self._collective = collective
        present = [segment for segment in self._segments if segment is not None]
        self.num_weights = sum(segment.num_weights for segment in present)
        self.nbytes = sum(segment.nbytes for segment in present)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return the sum over all ranks, [T, F]; x has this rank's inputs."""
        pieces = zip(self._segments, self._columns, strict=True)
        own_TF = tree_sum([None if multiply is None else multiply(x_TE[:, columns]) for multiply, columns in pieces])
        if len(self._has_part) == 1:
            assert own_TF is not None
            return own_TF
        if own_TF is None:
            own_TF = x_TE.new_zeros((x_TE.shape[0], self._num_outputs))
        gathered_RTF = self._collective.all_gather(own_TF)
        total_TF = tree_sum([part if has else None for part, has in zip(gathered_RTF, self._has_part, strict=True)])
        assert total_TF is not None, "some rank has inputs"
        return total_TF


class PackedTable:
    """Lookup of rows of a packed table, float32."""

    __slots__ = ("_descriptors", "_unpack", "_weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = tuple(weights)
        self._descriptors = [weight.descriptor() for weight in weights]
        unpack = cpu.function("octavo_linear_unpack_rows", c_void_p, c_void_p, c_int64, c_void_p, c_int64)
        assert unpack is not None, "weights are packed only where the kernels are"
        self._unpack = unpack

    def __call__(self, rows_T: Tensor) -> Tensor:
        """Return these rows as a new tensor [T, E]."""
        if len(self._weights) == 1:
            return self._rows(0, rows_T)
        out_TE = torch.empty(len(rows_T), self._weights[0].inputs)
        start = 0
        for index, weight in enumerate(self._weights):
            at = ((rows_T >= start) & (rows_T < start + weight.outputs)).nonzero()[:, 0]
            out_TE[at] = self._rows(index, rows_T[at] - start)
            start += weight.outputs
        return out_TE

    def _rows(self, index: int, rows_T: Tensor) -> Tensor:
        rows_T = rows_T.contiguous()
        out_TE = torch.empty(len(rows_T), self._weights[index].inputs)
        address = addressof(self._descriptors[index])
        self._unpack(address, rows_T.data_ptr(), len(rows_T), out_TE.data_ptr(), out_TE.stride(0))
        return out_TE


class ShardedEmbedding:
    """Lookup in a table whose rows are divided among ranks: each looks up its own rows, and all rows are gathered.

    `bounds` has each rank's first id, and the size of the vocabulary.
    """

    __slots__ = ("_bounds", "_collective", "_own", "_scale", "_table")

    def __init__(
        self,
        table: Callable[[Tensor], Tensor],
        bounds: Sequence[int],
        tensor_rank: int,
        collective: Collective,
        scale: float | None = None,
    ) -> None:
        self._table = table
        self._bounds = tuple(bounds)
        self._own = range(bounds[tensor_rank], bounds[tensor_rank + 1])
        self._collective = collective
        self._scale = scale

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows as a new tensor [T, E]."""
        ids_T = token_ids_T.long()
        if len(self._bounds) == 2:
            x_TE = self._table(ids_T)
        else:
            own_TE = self._table((ids_T - self._own.start).clamp(0, len(self._own) - 1))
            owner_T = torch.bucketize(ids_T, ids_T.new_tensor(self._bounds[1:-1]), right=True)
            x_TE = self._collective.all_gather(own_TE)[owner_T, torch.arange(len(ids_T), device=ids_T.device)]
        return x_TE if self._scale is None else x_TE.mul_(self._scale)


class ShardedHead:
    """The head of a vocabulary that is divided among ranks; every rank gets all logits."""

    __slots__ = ("_collective", "_multiply", "_sizes", "nbytes", "num_weights")

    def __init__(self, multiply: PackedLinear | OutputSegments, bounds: Sequence[int], collective: Collective) -> None:
        self._multiply = multiply
        self._sizes = [end - first for first, end in pairwise(bounds)]
        self._collective = collective
        self.num_weights, self.nbytes = multiply.num_weights, multiply.nbytes

    def __call__(self, hidden_NE: Tensor) -> Tensor:
        """Return logits [N, V]."""
        own_NW = self._multiply(hidden_NE)
        if len(self._sizes) == 1:
            return own_NW
        own_NW = functional.pad(own_NW, (0, max(self._sizes) - own_NW.shape[1]))
        gathered_RNW = self._collective.all_gather(own_NW)
        return torch.cat([part[:, :size] for part, size in zip(gathered_RNW, self._sizes, strict=True)], dim=1)

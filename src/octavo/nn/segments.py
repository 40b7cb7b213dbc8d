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
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from octavo.nn.coded_linear import CodedLinear
from octavo.nn.layers import Linear
from octavo.nn.packed_weight import PackedWeight
from octavo.nn.parallel import Collective, tree_sum
from octavo.ops import cpu
from octavo.ops.packed_linear import Product, multiply


class PackedLinear:
    """y_TF = x_TE W_FE^T + b_F over packed weights, which have consecutive outputs. Float32, on the CPU."""

    __slots__ = ("_held", "_products", "nbytes", "num_outputs", "num_weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._products, self.num_outputs = [], 0
        self._held = [(weight, weight.descriptor()) for weight in weights]
        for weight, descriptor in self._held:
            self._products.append(
                Product(addressof(descriptor), weight.kind, weight.inputs, first_output=self.num_outputs)
            )
            self.num_outputs += weight.outputs
        self.num_weights = sum(weight.outputs * weight.inputs for weight in weights)
        self.nbytes = sum(weight.nbytes for weight in weights)

    @property
    def weights(self) -> list[PackedWeight]:
        """The weights, in the order of their outputs."""
        return [weight for weight, _ in self._held]

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F]."""
        out_BTF = torch.empty(1, x_TE.shape[0], self.num_outputs)
        multiply(self._products, x_TE, out_BTF, cpu.team_size())
        return out_BTF[0]


class PackedProducts:
    """The products of input segments with packed weights (None: no inputs), summed by one rank's part of the tree."""

    __slots__ = ("_held", "_num_buffers", "_num_outputs", "_pairs", "_products", "nbytes", "num_weights")

    def __init__(self, weights: Sequence[PackedWeight | None], num_outputs: int) -> None:
        self._held = [(weight, weight.descriptor()) for weight in weights if weight is not None]
        descriptors = iter(self._held)
        self._products: list[Product] = []
        self._pairs: list[int | None] = []  # the buffer of each two segments, the leaves of the tree
        self._num_buffers = self.num_weights = self.nbytes = first = 0
        self._num_outputs = num_outputs
        for first_of_pair in range(0, len(weights), 2):
            is_added = False
            for weight in weights[first_of_pair : first_of_pair + 2]:
                if weight is None:
                    continue
                address = addressof(next(descriptors)[1])
                self._products.append(
                    Product(address, weight.kind, weight.inputs, first, 0, self._num_buffers, is_added)
                )
                is_added, first = True, first + weight.inputs
                self.num_weights += weight.outputs * weight.inputs
                self.nbytes += weight.nbytes
            self._pairs.append(self._num_buffers if is_added else None)
            self._num_buffers += is_added

    def __call__(self, x_TE: Tensor) -> Tensor | None:
        """Return the sum [T, F], or None if the rank has no inputs."""
        if not self._products:
            return None
        out_BTF = torch.empty(self._num_buffers, x_TE.shape[0], self._num_outputs)
        multiply(self._products, x_TE, out_BTF, cpu.team_size())
        buffers = out_BTF.unbind(0)
        return tree_sum([None if index is None else buffers[index] for index in self._pairs])


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


class TorchProducts:
    """The products of input segments by torch or a device's kernel (None: no inputs), summed as PackedProducts does."""

    __slots__ = ("_columns", "_segments", "nbytes", "num_weights")

    def __init__(self, segments: Sequence[Linear | CodedLinear | None]) -> None:
        self._segments = tuple(segments)
        present = [segment for segment in segments if segment is not None]
        ends = accumulate(0 if segment is None else segment.in_features for segment in segments)
        self._columns = [slice(first, end) for first, end in pairwise((0, *ends))]
        self.num_weights = sum(segment.num_weights for segment in present)
        self.nbytes = sum(segment.nbytes for segment in present)

    def __call__(self, x_TE: Tensor) -> Tensor | None:
        """Return the sum [T, F], or None if the rank has no inputs."""
        pieces = zip(self._segments, self._columns, strict=True)
        return tree_sum([None if one is None else one(x_TE[:, columns].contiguous()) for one, columns in pieces])


class InputSegments:
    """A linear layer whose inputs are divided among ranks; each multiplies its own, and all add the same tree.

    `has_part` says for each rank whether it has any inputs; a rank without takes part in the exchange, but its tensor
    is not added. Every rank has the whole bias and adds it to the sum.
    """

    __slots__ = ("_bias_F", "_collective", "_has_part", "_num_outputs", "_products", "nbytes", "num_weights")

    def __init__(
        self,
        products: PackedProducts | TorchProducts,
        num_outputs: int,
        has_part: Sequence[bool],
        collective: Collective,
        bias_F: Tensor | None = None,
    ) -> None:
        self._bias_F = bias_F
        self._products = products
        self._num_outputs = num_outputs
        self._has_part = tuple(has_part)
        self._collective = collective
        self.num_weights, self.nbytes = products.num_weights, products.nbytes

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return the sum over all ranks, [T, F]; x has this rank's inputs."""
        total_TF = self._sum(x_TE)
        return total_TF if self._bias_F is None else total_TF.add_(self._bias_F)

    def _sum(self, x_TE: Tensor) -> Tensor:
        own_TF = self._products(x_TE)
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

    def __init__(
        self, multiply: PackedLinear | OutputSegments | CodedLinear, bounds: Sequence[int], collective: Collective
    ) -> None:
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

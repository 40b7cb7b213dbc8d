"""Load one rank's part of a decoder: its layers, heads, columns of the MLP and rows of the vocabulary.

Owns: which windows of the files a rank reads, and the form of its weights: packed for the C++ kernels if `wanted` says
how, for the kernels of a device if `coded` does, else plain for torch. Does not: divide the model (shards.py does), or
compute.
Invariants: a tensor is read, coded and packed by segments of virtual ranks, so a segment's values do not depend on the
number of ranks. Norms are whole in every rank.
Shapes: T tokens, E hidden size, F output rows, W rows of a table in one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from octavo.artifacts.families import linear_shape, linear_tensors
from octavo.artifacts.model_spec import ModelSpec
from octavo.models.loader import Begin, End, Loader, Multiplication, embedding_of
from octavo.models.native_weights import TABLES
from octavo.models.shards import ModelShard
from octavo.nn.coded_linear import CodedLinear, Part, read_parts
from octavo.nn.layers import Linear
from octavo.nn.packed_weight import PackedWeight, most_frequent_code
from octavo.nn.packing import WantedTensor, pack_matrices
from octavo.nn.parallel import Parallel
from octavo.nn.segments import (
    InputSegments,
    OutputSegments,
    PackedLinear,
    PackedProducts,
    PackedTable,
    ShardedEmbedding,
    ShardedHead,
    TorchProducts,
)
from octavo.nn.weights import TensorWindow, Weights
from octavo.ops.gated_mul import activate_rows

_DIVIDED_BY_OUTPUTS = ("qkv", "gate_up")


class ShardLoader(Loader):
    """Loads one rank's part. With `wanted` the device is the CPU, and activations and norms are float32.

    With `coded` weights are a device's: codes where there are any, and floats that its own kernel multiplies.
    """

    def __init__(
        self,
        spec: ModelSpec,
        place: tuple[torch.dtype, torch.device],
        weights: Weights,
        parallel: Parallel,
        wanted: WantedTensor | None = None,
        coded: WantedTensor | None = None,
    ) -> None:
        dtype, device = place
        super().__init__(spec, dtype if wanted is None else torch.float32, device, weights, coded=coded)
        self._place, self._collective = parallel.shard, parallel.collective
        self._shard = ModelShard(spec, parallel.shard)
        self._wanted = wanted
        self._made: list[PackedWeight] = []
        self.layers = self._shard.layers
        self.num_heads, self.num_kv_heads = len(self._shard.query_heads), len(self._shard.kv_heads)

    @property
    def quantization(self) -> str:
        """The code of most weights that were packed, or "none" if most are floats."""
        return most_frequent_code(self._made) if self._made else super().quantization

    def tables(self) -> tuple[Begin, Multiplication | None]:
        """Read this rank's rows of the embedding, of the head, of both or of neither."""
        place, is_tied = self._place, self.spec.tie_word_embeddings
        has_head = place.is_last_stage
        begin: Begin = self._receive
        head: Multiplication | None = None
        if place.is_first_stage or (is_tied and has_head):
            lookup, head = self._table(self.embedding_name)
            begin = lookup if place.is_first_stage else begin
        if has_head and not is_tied:
            head = self._table(self.head_name)[1]
        return begin, head if has_head else None

    def end(self) -> End:
        """Read the final norm, or send to the next stage."""
        return super().end() if self._place.is_last_stage else self._send

    def activation(self) -> Callable[[Tensor], Tensor]:
        """Return the MLP's activation; torch's is part of the segments of gate_up."""
        if self._coded is not None:
            return super().activation()
        if self._wanted is None:
            return lambda x_TI: x_TI
        return activate_rows(self.spec.activation, self.family.has("gate_proj"))

    def linear(self, linear: str, layer: int) -> Multiplication:
        """Read this rank's segments of a linear layer."""
        has_bias = linear in self.spec.biases
        num_inputs = linear_shape(self.spec, linear)[1]
        for name, count in linear_tensors(self.spec, linear, layer).items():
            self.weights.claim(f"{name}.weight", (count, num_inputs))
            if has_bias:
                self.weights.claim(f"{name}.bias", (count,))
        if linear in _DIVIDED_BY_OUTPUTS:
            windows = self._shard.output_windows(linear, layer)
            bias_F = self._plain(self._shard.output_windows(linear, layer, "bias")) if has_bias else None
            return self._outputs(windows, bias_F) if linear == "qkv" else self._activated(windows, bias_F)
        return self._inputs(linear, layer)

    def check_all_read(self) -> None:
        """Raise ModelFileError for a tensor that no stage would read."""
        ends = {self.embedding_name, self.head_name, f"{self.family.tensor('final_norm')}.weight"}
        foreign = {name for name in self.weights.names if self._shard.is_foreign(name)}
        is_alone = self._place.num_stages == 1
        tied = {self.head_name} if self.spec.tie_word_embeddings else set()
        self.weights.check_all_read(frozenset(tied if is_alone else foreign | ends))

    def _table(self, name: str) -> tuple[Begin, Multiplication]:
        """Read this rank's rows of a table; return the lookup of ids and the head, which share them."""
        shard, spec = self._shard, self.spec
        self.weights.claim(name, (spec.vocab_size, spec.hidden_size))
        windows = shard.table_windows(name)
        ranks = [shard.of_rank(shard.vocabulary_bounds, rank) for rank in range(self._place.tensor_size)]
        bounds = [ids.start for ids in ranks] + [spec.vocab_size]
        where = (bounds, self._place.tensor_rank, self._collective)
        if self._wanted is not None:
            quantization = TABLES.get(self._wanted.quantization, self._wanted.quantization)
            packed = self._packed(windows, None, replace(self._wanted, quantization=quantization))
            scale = None if spec.stream_scale == 1.0 else spec.stream_scale
            lookup = ShardedEmbedding(PackedTable(packed), *where, scale)
            return lookup, ShardedHead(PackedLinear(packed), bounds, self._collective)
        if self._coded is not None:
            quantization = TABLES.get(self._coded.quantization, self._coded.quantization)
            (part,) = self._kept(windows, replace(self._coded, quantization=quantization))
            return ShardedEmbedding(self._lookup(part), *where), ShardedHead(
                CodedLinear([part]), bounds, self._collective
            )
        weight_WE = self._plain(windows)
        ends = list(accumulate(len(window.rows) for window in windows))
        segments = [Linear(weight_WE[end - len(window.rows) : end]) for window, end in zip(windows, ends, strict=True)]
        lookup = ShardedEmbedding(embedding_of(spec, weight_WE), *where)
        return lookup, ShardedHead(OutputSegments(segments), bounds, self._collective)

    def _outputs(self, windows: Sequence[TensorWindow], bias_F: Tensor | None) -> Multiplication:
        if self._wanted is not None:
            return PackedLinear(self._packed(windows, bias_F, self._wanted))
        if self._coded is not None:
            return CodedLinear(self._kept(windows, self._coded), bias_F)
        segments, start = [], 0
        for window in windows:
            end = start + len(window.rows)
            segments.append(Linear(self._plain([window]), None if bias_F is None else bias_F[start:end]))
            start = end
        return OutputSegments(segments)

    def _activated(self, windows: Sequence[TensorWindow], bias_F: Tensor | None) -> Multiplication:
        """Read gate (if any) and up; windows of all gates come first."""
        if self._wanted is not None or self._coded is not None:
            return self._outputs(windows, bias_F)
        count = len(windows) // (2 if self.family.has("gate_proj") else 1)
        parts = [windows[first::count] for first in range(count)]
        biases: list[Tensor | None] = [None] * count
        if bias_F is not None:
            rows = torch.split(bias_F, [len(window.rows) for window in windows])
            biases = [torch.cat(rows[first::count]) for first in range(count)]
        segments = [Linear(self._plain(part), bias) for part, bias in zip(parts, biases, strict=True)]
        return OutputSegments(segments, super().activation())

    def _inputs(self, linear: str, layer: int) -> Multiplication:
        windows, size = self._shard.input_windows(linear, layer), self.spec.hidden_size
        products: PackedProducts | TorchProducts
        if (wanted := self._wanted) is not None:
            packed = [None if window is None else self._packed([window], None, wanted)[0] for window in windows]
            products = PackedProducts(packed, size)
        else:
            products = TorchProducts([None if window is None else self._segment(window) for window in windows])
        has_part = self._shard.has_part(self._shard.inputs(linear)[1])
        bias_F = None
        if linear in self.spec.biases:
            ((name, count),) = linear_tensors(self.spec, linear, layer).items()
            bias_F = self.tensor(f"{name}.bias", count)
        return InputSegments(products, size, has_part, self._collective, bias_F)

    def _packed(
        self, windows: Sequence[TensorWindow], bias_F: Tensor | None, wanted: WantedTensor
    ) -> list[PackedWeight]:
        """Code and pack the windows; those of one kind become one weight. A window without codes stays float."""
        if not windows:
            return []
        view = self.weights.windows(windows)
        rows = {window.key: len(window.rows) for window in windows}
        weights = pack_matrices(view, rows, view.shape(windows[0].key)[1], wanted, bias_F)
        self._made += weights
        return weights

    def _segment(self, window: TensorWindow) -> Linear | CodedLinear:
        """Read the weight of one segment of inputs."""
        if self._coded is not None:
            return CodedLinear(self._kept([window], self._coded))
        return Linear(self._plain([window]))

    def _kept(self, windows: Sequence[TensorWindow], coded: WantedTensor) -> list[Part]:
        """Read windows of equal width into parts for a device's kernels; one of no values if there is no window."""
        if not windows:
            return [torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)]
        view, rows = self.weights.windows(windows), {window.key: len(window.rows) for window in windows}
        inputs = view.shape(windows[0].key)[1]
        parts, runs = read_parts(view, rows, inputs, coded, (self.dtype, self.device))
        self._runs += runs
        return parts

    def _plain(self, windows: Sequence[TensorWindow]) -> Tensor:
        """Read windows of vectors, or of matrices of equal width, into one tensor of the model's dtype."""
        view, rows = self.weights.windows(windows), {window.key: len(window.rows) for window in windows}
        inputs = view.shape(windows[0].key)[1:] if windows else ()
        return view.read(rows, *inputs, dtype=self.dtype, device=self.device)

    def _receive(self, token_ids_T: Tensor) -> Tensor:
        """Return the previous stage's hidden states for these tokens."""
        size = (len(token_ids_T), self.spec.hidden_size)
        return self._collective.receive(torch.empty(size, dtype=self.dtype, device=self.device))

    def _send(self, x_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Send the hidden states to the next stage, which norms them."""
        hidden_TE = x_TE if residual_TE is None else x_TE + residual_TE
        self._collective.send(hidden_TE)
        return hidden_TE, hidden_TE

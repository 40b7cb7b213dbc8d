"""How a model is divided among ranks: heads, columns of the MLP and rows of the vocabulary over eight virtual ranks,
layers over pipeline stages.

Owns: the sizes of every rank's part, and the refusal of numbers of ranks that a model does not allow.
Does not: read weights, compute, or load torch.
Invariants: the division over virtual ranks is a function of the model alone. A rank has the parts of its virtual ranks,
which are consecutive. A virtual rank may have no heads. Each rank's KV heads have equal numbers of its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from octavo.artifacts.families import FAMILIES, linear_roles
from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ConfigError
from octavo.nn.parallel import TENSOR_SIZES, VIRTUAL_RANKS, ShardSpec
from octavo.nn.weights import TensorWindow

_COLUMN_UNIT = 32  # columns of the MLP that stay together, since quantised weights and activations have groups of 32


@dataclass(frozen=True)
class ModelShard:
    """The part of `spec` that the rank at `shard` has. Raises ConfigError for a number of ranks that cannot be."""

    spec: ModelSpec
    shard: ShardSpec

    def __post_init__(self) -> None:
        spec, shard = self.spec, self.shard
        if shard.num_stages > spec.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size is {shard.num_stages}; the model has {spec.num_layers} layers: "
                f"give 1 to {spec.num_layers}"
            )
        if spec.family not in FAMILIES:
            raise ConfigError(
                f"{spec.path_reason}; its layers are not divided among ranks; give --tensor-parallel-size 1 and "
                "--pipeline-parallel-size 1"
            )
        family = FAMILIES[spec.family]
        if shard.tensor_size > 1 and spec.qk_norm and family.qk_norm_is_wide:
            raise ConfigError(
                f"tensor_parallel_size is {shard.tensor_size}; a {family.name} model norms all heads of a token "
                "together, which cannot be divided: give 1"
            )
        if spec.mixture is not None:
            raise ConfigError(
                f"tensor_parallel_size is {shard.tensor_size}, pipeline_parallel_size {shard.num_stages}; models with "
                "mixtures of experts are not divided among ranks: give 1 for both, without tp_invariant"
            )
        sizes = {"MLP columns": spec.intermediate_size, "vocabulary": spec.vocab_size}
        name, smallest = min(sizes.items(), key=lambda item: item[1])
        if smallest < shard.tensor_size:
            fitting = [str(size) for size in TENSOR_SIZES if size <= smallest]
            raise ConfigError(
                f"tensor_parallel_size is {shard.tensor_size}; the model's {name} ({smallest}) can be divided among "
                f"{' or '.join(fitting)} ranks"
            )

    @property
    def layers(self) -> range:
        """The layers of this stage. The last stage, which has the head, has the fewest."""
        stage, num_stages = self.shard.stage, self.shard.num_stages
        first, end = (-(-self.spec.num_layers * one // num_stages) for one in (stage, stage + 1))
        return range(first, end)

    @cached_property
    def query_bounds(self) -> Sequence[int]:
        """The first query head of each virtual rank, and the number of heads.

        If the KV heads divide the virtual ranks, query heads are divided, and ranks that share a KV head each have a
        copy of it. Otherwise KV heads are divided with their query heads, since copies would take memory.
        """
        spec = self.spec
        unit = 1 if VIRTUAL_RANKS % spec.num_kv_heads == 0 else spec.num_heads // spec.num_kv_heads
        return _bounds(spec.num_heads, unit)

    @cached_property
    def column_bounds(self) -> Sequence[int]:
        """The first column of the MLP of each virtual rank, and the number of columns."""
        size = self.spec.intermediate_size
        is_in_units = size % _COLUMN_UNIT == 0 and size >= _COLUMN_UNIT * VIRTUAL_RANKS
        return _bounds(size, _COLUMN_UNIT if is_in_units else 1)

    @cached_property
    def vocabulary_bounds(self) -> Sequence[int]:
        """The first id of each virtual rank, and the size of the vocabulary."""
        return _bounds(self.spec.vocab_size, 1)

    def of_rank(self, bounds: Sequence[int], tensor_rank: int | None = None) -> range:
        """Return what lies within the bounds of a tensor rank's virtual ranks (None: this rank's)."""
        virtual = self.shard.virtual_ranks(tensor_rank)
        return range(bounds[virtual.start], bounds[virtual.stop])

    @cached_property
    def query_heads(self) -> range:
        """The query heads of this rank."""
        return self.of_rank(self.query_bounds)

    @cached_property
    def kv_heads(self) -> range:
        """The KV heads that this rank's query heads read."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        heads = self.query_heads
        return range(heads.start // group, -(-heads.stop // group)) if heads else range(0)

    def has_part(self, bounds: Sequence[int]) -> tuple[bool, ...]:
        """Return, per tensor rank, whether it has anything within these bounds."""
        return tuple(len(self.of_rank(bounds, rank)) > 0 for rank in range(self.shard.tensor_size))

    def output_windows(self, linear: str, layer: int, kind: str = "weight") -> list[TensorWindow]:
        """Return the rows of this rank's part of a linear layer that is divided by outputs, in segments, in order.

        `kind` is "weight" or "bias".
        """
        windows = []
        for part in linear_roles(self.spec, linear, layer):
            for rows in self._segments(part.role):
                first = part.first_row + rows.start
                windows.append(TensorWindow(f"{part.tensor}.{kind}", range(first, first + len(rows))))
        return windows

    def input_windows(self, linear: str, layer: int) -> list[TensorWindow | None]:
        """Return each own virtual rank's columns of a linear layer that is divided by inputs; None if it has none."""
        (part,) = linear_roles(self.spec, linear, layer)
        unit, bounds = self.inputs(linear)
        windows: list[TensorWindow | None] = []
        for virtual in self.shard.virtual_ranks():
            columns = range(bounds[virtual] * unit, bounds[virtual + 1] * unit)
            window = TensorWindow(
                f"{part.tensor}.weight", range(part.first_row, part.first_row + part.num_rows), columns
            )
            windows.append(window if columns else None)
        return windows

    def inputs(self, linear: str) -> tuple[int, Sequence[int]]:
        """Return the bounds of the inputs of such a layer, and the columns of one unit of them."""
        return (self.spec.head_dim, self.query_bounds) if linear == "output" else (1, self.column_bounds)

    def table_windows(self, name: str) -> list[TensorWindow]:
        """Return this rank's rows of the embedding or the head, one window per virtual rank."""
        bounds = self.vocabulary_bounds
        return [TensorWindow(name, range(bounds[one], bounds[one + 1])) for one in self.shard.virtual_ranks()]

    def is_foreign(self, tensor: str) -> bool:
        """Return True for a tensor of a layer of another stage."""
        family = FAMILIES[self.spec.family]
        others = (layer for layer in range(self.spec.num_layers) if layer not in self.layers)
        prefixes = tuple(family.tensor("attention_norm", layer).rpartition(".")[0] + "." for layer in others)
        return tensor.startswith(prefixes)

    def _segments(self, role: str) -> list[range]:
        """Return the rows of a role that this rank has, cut where any number of ranks may cut them."""
        size = self.spec.head_dim
        if role in ("gate_proj", "up_proj"):
            bounds, own, size = self.column_bounds, self.of_rank(self.column_bounds), 1
        elif role == "q_proj":
            bounds, own = self.query_bounds, self.query_heads
        else:
            bounds, own = self._kv_bounds(), self.kv_heads
        cuts = [bound for bound in sorted(set(bounds)) if own.start <= bound <= own.stop]
        return [range(first * size, end * size) for first, end in pairwise(cuts)]

    def _kv_bounds(self) -> Sequence[int]:
        spec = self.spec
        if VIRTUAL_RANKS % spec.num_kv_heads == 0:
            return range(spec.num_kv_heads + 1)
        return [bound * spec.num_kv_heads // spec.num_heads for bound in self.query_bounds]


def _bounds(size: int, unit: int) -> Sequence[int]:
    """Divide `size` over the virtual ranks, in units; the first ranks have the fewest."""
    return [size // unit * virtual // VIRTUAL_RANKS * unit for virtual in range(VIRTUAL_RANKS + 1)]

"""Mixtures of experts in files: a family's differences, the keys of their sizes, and the names of their tensors.

Owns: MixtureFamily, reading a MixtureSpec from config.json or GGUF metadata, the layouts of experts' tensors.
Does not: know a family by name (families.py does), or read tensors.
Invariant: nothing is guessed; a key of another family's mixtures has the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from octavo.artifacts.model_spec import MixtureSpec
from octavo.artifacts.settings import Settings
from octavo.errors import ModelFileError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_k")
_SIZE = ("moe_intermediate_size", "intermediate_size")
_NUM_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
_GGUF_SCORINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}


@dataclass(frozen=True, slots=True)
class MixtureFamily:
    """A family's mixtures of experts; the defaults are Qwen2-MoE's without a shared expert.

    `is_normalised`: weights are always divided by their sum; if not, config.json's `norm_topk_prob` decides, and
    `gguf_is_normalised` in GGUF files without a key for it. The other fields are those of MixtureSpec, or say how the
    files name experts: `gate_up` and `down` are the tensors of all experts, if one tensor has them: of three
    dimensions, gate and up as the halves of each expert's rows, in alternate rows if `is_interleaved`, with rows and
    columns exchanged if `is_transposed`.
    """

    scoring: str = "softmax"
    is_normalised: bool = False
    gguf_is_normalised: bool = False
    has_choice_bias: bool = False
    has_shared_gate: bool = False
    has_bias: bool = False
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    is_interleaved: bool = False
    is_transposed: bool = False


class ExpertMatrix(NamedTuple):
    """One role's matrices of all experts of a layer, [X * num_rows, num_inputs], or their biases, if that is 0.

    `name` is the canonical name; an expert's own tensor has its number after `experts`. `whole` is the tensor of all
    experts, of which this role has `num_rows` of each expert's rows from `first_row` on, every `step`-th.
    """

    name: str
    num_experts: int
    num_rows: int
    num_inputs: int
    whole: str
    first_row: int = 0
    step: int = 1
    rows_of_expert: int = 1
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked matrix or vector."""
        rows = self.num_experts * self.num_rows
        return (rows, self.num_inputs) if self.num_inputs else (rows,)

    def of_expert(self, expert: int) -> str:
        """Return the name of one expert's own tensor."""
        return self.name.replace(".experts.", f".experts.{expert}.")


def read_hf_mixture(config: Settings, family: MixtureFamily) -> MixtureSpec:
    """Read the mixture of a config.json. Raises ModelFileError."""
    values = config.values

    def first_of(keys: tuple[str, ...], default: int | None = None) -> int:
        found = [key for key in keys if values.get(key) is not None]
        return config.integer(found[0] if found else keys[0], default)

    size, num_shared = first_of(_SIZE), first_of(_NUM_SHARED, 0)
    for key, expected in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if values.get(key, expected) != expected:
            raise ModelFileError(config.path, f"{key} is {values[key]!r}; only {expected} is supported")
    return MixtureSpec(
        num_experts=first_of(_NUM_EXPERTS),
        top_k=first_of(_TOP_K),
        intermediate_size=size,
        layers=tuple(_hf_mixture_layers(config)),
        scoring=family.scoring,
        is_normalised=family.is_normalised or values.get("norm_topk_prob") is True,
        least_sum=config.number("moe_norm_min", 1e-20),
        scale=config.number("routed_scaling_factor", 1.0),
        has_choice_bias=family.has_choice_bias,
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        shared_size=config.integer("shared_expert_intermediate_size", 0) or num_shared * size,
        has_shared_gate=family.has_shared_gate,
        has_bias=family.has_bias,
    )


def _hf_mixture_layers(config: Settings) -> Iterator[int]:
    """Yield the layers with experts, by any family's keys, as transformers decides."""
    count = config.num_layers()
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelFileError(config.path, f"mlp_only_layers is {dense!r}; a list is needed")
    step = config.integer("decoder_sparse_step", 1)
    every = config.integer("moe_layer_interval", 1)
    if step < 1 or every < 1:
        raise ModelFileError(config.path, f"every {step if step < 1 else every}-th layer cannot have experts")
    first = max(config.integer("first_k_dense_replace", 0), config.integer("moe_layer_start_index", 0))
    last = config.integer("moe_layer_end_index", -1)
    for layer in range(first, count):
        if (layer + 1) % step == 0 and (layer + 1) % every == 0 and layer not in dense and (last < 0 or layer <= last):
            yield layer


def read_gguf_mixture(metadata: Settings, family: MixtureFamily, layers: tuple[int, ...]) -> MixtureSpec:
    """Read the mixture of GGUF metadata; `layers` are those that have a router. Raises ModelFileError."""
    size = metadata.integer("expert_feed_forward_length", metadata.integer("feed_forward_length"))
    num_shared = metadata.integer("expert_shared_count", 0)
    function = metadata.integer("expert_gating_func", 0)
    if function not in (0, *_GGUF_SCORINGS):
        raise ModelFileError(metadata.path, f"expert_gating_func {function} is not supported")
    is_normalised = family.gguf_is_normalised or family.is_normalised
    return MixtureSpec(
        num_experts=metadata.integer("expert_count"),
        top_k=metadata.integer("expert_used_count"),
        intermediate_size=size,
        layers=layers,
        scoring=_GGUF_SCORINGS.get(function, family.scoring),
        is_normalised=metadata.get("expert_weights_norm", is_normalised) is True,
        scale=metadata.number("expert_weights_scale", 1.0) or 1.0,
        has_choice_bias=family.has_choice_bias,
        num_groups=metadata.integer("expert_group_count", 1),
        top_groups=metadata.integer("expert_group_used_count", 1),
        shared_size=metadata.integer("expert_shared_feed_forward_length", num_shared * size),
        has_shared_gate=family.has_shared_gate,
        has_bias=family.has_bias,
    )

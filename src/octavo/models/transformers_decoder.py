"""A decoder that runs a model of the transformers library on Octavo's paged keys and values.

Owns: loading the model, its steps over flat ragged tokens, and its head. Does not: own KV memory, sample, or implement
any family.
Invariants: no code of a model's repository runs. A model is served only after transformers_check. On a CPU with
kernels, activations are float32 and plain layers are packed (transformers_layers); elsewhere the model runs as it is.
Shapes: T tokens of the step, N rows that sample, E hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.artifacts.transformers_spec import OTHER_MODEL
from octavo.errors import ConfigError, ModelFileError
from octavo.models.step_extras import StepExtras
from octavo.models.transformers_check import check_steps, compared_ids
from octavo.models.transformers_layers import ModulePacker, plain_linears, replace_layers, weight_of
from octavo.models.transformers_probe import (
    PROBED,
    SERVED,
    PagedStep,
    Probe,
    UnfitModelError,
    probe,
    register,
    running,
)
from octavo.models.transformers_program import NoProgramError, Program, record
from octavo.nn.packed_weight import most_frequent_code
from octavo.nn.packing import WantedTensor
from octavo.nn.weights import open_weights
from octavo.ops.attention import AttentionBackend, KVPool, LayerAttention, ReferenceAttention
from octavo.ops.attention_kernel import KernelAttention, PoolLayers, has_kernel

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_ROUNDED_TOLERANCE = 0.05  # kernels that round activations may round them the other way
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
# What a model raises if it cannot run over flat tokens without a cache.
_RUN_ERRORS = (
    RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError, ImportError,
)  # fmt: skip
_LOAD_ERRORS = (*_RUN_ERRORS, ArithmeticError, OSError, StrictDataclassError)
_MAX_ERROR_LEN = 300


class TransformersDecoder:
    """A decoder over a model of transformers. With `wanted` (a CPU with kernels), plain layers are packed so."""

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        place: tuple[torch.dtype, torch.device],
        wanted: WantedTensor | None,
        max_model_len: int | None = None,
    ) -> None:
        """Load, probe, pack and check. Raises ModelFileError, and ConfigError if transformers is missing."""
        self.spec = spec
        dtype, device = place
        library = _library(spec)
        self._model = _load(library, files, spec, dtype if wanted is None else None)
        self._config = self._model.config.get_text_config(decoder=True)
        self.max_model_len, self.notes = _limit(
            self._config, min(spec.max_model_len, max_model_len or spec.max_model_len)
        )
        self._program: Program | None = None
        self._pool_layers: PoolLayers | None = None
        self.no_program = ""  # why the modules' own code runs
        self._packer = None if wanted is None else ModulePacker(files.root, wanted)
        try:
            with torch.inference_mode():
                self._open(device, _TOLERANCE[torch.float32 if wanted is not None else dtype])
        except UnfitModelError as error:
            raise ModelFileError(files.root / "config.json", _refusal(spec, str(error))) from error

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend, extras: StepExtras | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, [T, E]. `backend.begin` was called for this step."""
        assert extras is None, "requests whose rows have extras are refused before this decoder is chosen"
        if self._program is not None:
            self._pool_layers = PoolLayers.begin(backend, len(self.attention), self._pool_layers)
        running.step = PagedStep(backend, self._pool_layers)
        try:
            if self._program is not None:
                return self._program.run(token_ids_T.long().unsqueeze(0), positions_T.unsqueeze(0)).squeeze(0)
            output = self._base(
                input_ids=token_ids_T.long().unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False
            )
        finally:
            running.step = None
        hidden_TE: Tensor = output[0].squeeze(0)
        return hidden_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V] of gathered rows of `forward`'s result; 4 * N * V bytes."""
        self._states.hidden_BNE = hidden_NE.unsqueeze(0)
        logits_BNV: Tensor = self._model(
            input_ids=hidden_NE.new_zeros((1, hidden_NE.shape[0]), dtype=torch.int64), use_cache=False
        ).logits
        return logits_BNV.squeeze(0).float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding's table; of experts, those of all tokens."""
        packed = sum(part.nbytes for part in self._packer.multiplied) if self._packer is not None else 0
        return packed + int(self._kept_bytes)

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention."""
        return 2 * self._multiplied

    @property
    def quantization(self) -> str:
        """The code of most packed weights, or "none" if most weights are floats."""
        made = [] if self._packer is None else self._packer.multiplied
        return most_frequent_code(made) if made else "none"

    def _open(self, device: torch.device, tolerance: float) -> None:
        """Probe the model, replace its layers, and check the result. Raises UnfitModelError."""
        model = self._model.to(device)
        base = model.get_decoder()
        if base is model or base is model.get_output_embeddings():  # ModernBERT's head is called `decoder`
            base = next((part for part in model.children() if hasattr(part, "get_input_embeddings")), None)
        if base is None or model.get_output_embeddings() is None:
            raise UnfitModelError(f"{type(model).__name__} has no model and head of its own")
        self._base = base
        linears = plain_linears(model)
        found = self._probe(linears)
        self.attention: tuple[LayerAttention, ...] = tuple(found.attention)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._is_tied = head.weight is embedding.weight
        self._multiplied: int = sum(weight_of(call.module).numel() for call in found.linears) + head.weight.numel()
        self._multiplied += _expert_weights(base, self._config)
        table = embedding.weight
        if self._packer is not None:
            experts = {size for key in _EXPERT_COUNTS if isinstance(size := getattr(self._config, key, None), int)}
            replace_layers(model, self._packer, linears, found.linears, experts)
            model.float()
            for part in (model, base):  # models ask for their own dtype and device, of which parameters have none left
                part.register_parameter("place", nn.Parameter(torch.empty(0, device=device), requires_grad=False))
            if not self._packer.is_exact:
                tolerance = max(tolerance, _ROUNDED_TOLERANCE)
        is_read = [part is not table or self._is_tied for part in model.parameters()]
        sizes = (part.nbytes for part in model.parameters())
        self._kept_bytes = sum(size for size, is_kept in zip(sizes, is_read, strict=True) if is_kept)
        try:
            self._check(tolerance)
        except _RUN_ERRORS as error:
            raise UnfitModelError(f"it does not run over flat tokens: {_text(error)}") from error

    def _probe(self, linears: dict[nn.Module, str]) -> Probe:
        """Run the model once, to find how its layers attend. Raises UnfitModelError."""
        self._model.set_attn_implementation(PROBED)
        try:
            return probe(self._base, linears, self.spec.vocab_size, self.max_model_len)
        except _RUN_ERRORS as error:
            raise UnfitModelError(f"it does not run over flat tokens: {_text(error)}") from error

    def _check(self, tolerance: float) -> None:
        """Compute logits with the model's own attention, then prepare for steps and compare. Raises UnfitModelError."""
        model, ids_BT = self._model, compared_ids(self.spec.vocab_size)
        outputs: list[type] = []
        hook = self._base.register_forward_hook(lambda module, args, output: outputs.append(type(output)))
        model.set_attn_implementation("eager")
        try:
            expected_BTV = model(input_ids=ids_BT.to(model.device), use_cache=False).logits
        finally:
            hook.remove()
        model.set_attn_implementation(SERVED)
        self._states = _HiddenStates(outputs[0])
        parent, _, name = next(name for name, module in model.named_modules() if module is self._base).rpartition(".")
        setattr(model.get_submodule(parent), name, self._states)
        steps = (self.forward, self.logits)
        expected_TV = expected_BTV[0].float()
        check_steps(expected_TV, steps, self.attention, self.spec.vocab_size, tolerance)
        if self._packer is None:
            return
        try:
            self._program = record(self._base, self.spec.vocab_size)
            for make_attention in (ReferenceAttention, _kernel_attention):
                check_steps(expected_TV, steps, self.attention, self.spec.vocab_size, tolerance, make_attention)
        except (NoProgramError, UnfitModelError, *_RUN_ERRORS) as error:
            self._program, self.no_program = None, str(error)


def _kernel_attention(pool: KVPool, layers: Sequence[LayerAttention]) -> AttentionBackend:
    """Return attention by the kernels where they can read the pool."""
    return (KernelAttention if has_kernel(pool, layers) else ReferenceAttention)(pool, layers)


class _HiddenStates(nn.Module):
    """Stands for the base model while the head runs: returns hidden states that were computed before."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self._output_type = output_type
        self.hidden_BNE = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the states as the base model's output."""
        return self._output_type(last_hidden_state=self.hidden_BNE)


def _library(spec: ModelSpec) -> Any:
    """Import transformers and register attention. Raises ConfigError with the remedy."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        reason = spec.path_reason or "decoder is 'transformers'"
        raise ConfigError(
            f"{reason}; the model would run through transformers, which cannot be imported ({error}); "
            "pip install 'octavo[transformers]'"
        ) from None
    library.utils.logging.disable_progress_bar()  # loading shows Octavo's own
    library.utils.logging.set_verbosity_error()  # its warnings are about its own interface
    register(library)
    return library


def _load(library: Any, files: ModelFiles, spec: ModelSpec, dtype: torch.dtype | None) -> Any:
    """Load the model's weights in `dtype` (None: the files'). Raises ModelFileError."""
    path = files.root / "config.json"
    weights = open_weights(files, spec)  # checks every file's header
    num_stored = sum(prod(weights.shape(name)) for name in weights.names)
    if spec.num_layers > len(weights.names):
        raise ModelFileError(path, f"has {spec.num_layers} layers, but the files have {len(weights.names)} tensors")
    try:
        config = library.AutoConfig.from_pretrained(files.root, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
        with torch.device("meta"):  # no memory for a model that is larger than its files
            empty = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        num_described = sum(parameter.numel() for parameter in empty.parameters())
        if num_described > num_stored:
            raise ModelFileError(path, f"describes {num_described} weights, but the files have {num_stored}")
        model, report = library.AutoModelForCausalLM.from_pretrained(
            files.root,
            config=config,
            dtype=dtype or "auto",
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise ModelFileError(path, _refusal(spec, _text(error))) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, report[kind])):
            reason = {"missing_keys": "is missing", "unexpected_keys": "is not a part of this architecture"}
            raise ModelFileError(
                files.root, reason.get(kind, "has another shape than the configuration needs"), names[0]
            )
    return model.eval().requires_grad_(False)


def _text(error: Exception) -> str:
    """Return an error of the library as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR_LEN]}"


def _refusal(spec: ModelSpec, why: str) -> str:
    reason = spec.path_reason or "decoder is transformers"
    return f"{reason}; the model cannot run through transformers: {why}{OTHER_MODEL}"


def _limit(config: Any, max_model_len: int) -> tuple[int, tuple[str, ...]]:
    """Lower the length for rope kinds whose rotation of all positions depends on the longest one; return notes."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        kind = rope.get("rope_type", "default")
        if kind != "longrope" and "dynamic" not in str(kind):
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or limit
        if limit < max_model_len:
            note = f"max_model_len is {limit}, because {kind} rope rotates all positions of longer texts in another way"
            return limit, (note,)
    return max_model_len, ()


def _expert_weights(base: nn.Module, config: Any) -> int:
    """Return how many weights of stacked experts a token uses."""
    stacked = sum(parameter.numel() for parameter in base.parameters() if parameter.dim() == 3)
    counts = [
        next((n for key in keys if isinstance(n := getattr(config, key, None), int)), 1)
        for keys in (_EXPERT_COUNTS, _EXPERTS_PER_TOKEN)
    ]
    return stacked * counts[1] // max(counts)

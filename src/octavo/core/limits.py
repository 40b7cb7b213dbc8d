"""Limits: the sizes, budgets, switches and policy of one scheduler, and the cache groups of its model.

A cache group is the layers with one kind of attention; they share a block table.
Owns: the settings and their ranges; which blocks a group's attention needs; the checks at submission that this engine
can run a request alone, with numbers and a remedy. A request that passes can run to its end.
Does not: derive the settings (engine.limits and executors do), count what a step uses (step does), or consider other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from octavo.core.request import Request, Want
from octavo.errors import AdmissionError, ConfigError, InvalidRequestError, PromptTooLongError, too_long_message


class GroupKind(IntEnum):
    """How the layers of a group attend."""

    FULL = 0
    SLIDING = 1


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One cache group: its kind, window (tokens, 0 = none), bytes of one block over all its layers, and its layers.

    A token at position p of a sliding group attends to positions p - window + 1 to p.
    """

    kind: GroupKind = GroupKind.FULL
    window: int = 0
    block_bytes: int = 0
    layers: tuple[int, ...] = ()

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position` reads or writes."""
        if self.kind == GroupKind.FULL:
            return 0
        return max(0, position - self.window + 1) // block_size

    def peak_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks that `num_tokens` positions hold at once, if a step computes at most `chunk`."""
        total = -(-num_tokens // block_size)
        if self.kind == GroupKind.FULL:
            return total
        span = self.window - 1 + chunk  # positions that one chunk reads or writes; it may begin anywhere in a block
        return min(total, (span + block_size - 2) // block_size + 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings, in tokens, sequences and blocks as named; `headroom` is a share of the pool.

    `num_blocks` and `host_blocks` have one entry per group; an empty `host_blocks` means no host tier.
    `max_partial_prefills`, `long_prefill_threshold` and `max_kv_read` (tokens of context read per step) have no bound
    if they are 0. `encoder_budget` (media tokens encoded per step), `encoder_cache` (media tokens cached) and
    `adapter_slots` are 0 if the engine has no encoder or no adapters. If `whole_span_tokens` is not 0, media items of
    up to so many tokens are each computed in one step, because their positions see each other. `headroom=None` means
    the policy's default. `preemption` is auto, recompute or swap. `composition` is mixed or separate; if separate, a
    step has only prefills or only decodes, and at most `max_prefill_run` prefill steps run in a row while a request
    decodes. `tenant_weights` are shares under the fair policy; a tenant not named has weight 1. `find_shared_prefixes`
    fills the plan's shared_prefixes. A row gets at most `max_draft_tokens` drafts (0 = no speculation), and no drafts
    in a plan of more than `max_draft_rows` rows. With `has_draft_model`, and with `has_paced_lookup` (measured times
    decide which lookups become drafts), drafts are inputs, which a replay takes from the recording. With `num_stages`
    pipeline stages, a decoding sequence has no row while its last id is in flight, and a plan has at most that share of
    the running requests, so that as many plans can be in flight.
    """

    block_size: int
    num_blocks: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    max_batch_tokens: int = 512
    max_sequences: int = 32
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    policy: str = "fcfs"
    headroom: float | None = None
    chunked_prefill: bool = True
    max_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    prefix_caching: bool = True
    block_sharing: bool = True
    max_blocks_per_sequence: int = 0
    max_kv_read: int = 0
    max_bypass: int = 64
    preemption: str = "auto"
    host_blocks: tuple[int, ...] = ()
    host_load_min_tokens: int = 64
    encoder_budget: int = 0
    encoder_cache: int = 0
    whole_span_tokens: int = 0
    adapter_slots: int = 0
    separate_modalities: bool = False
    composition: str = "mixed"
    max_prefill_run: int = 4
    tenant_weights: tuple[tuple[str, float], ...] = ()
    find_shared_prefixes: bool = False
    max_draft_tokens: int = 0
    max_draft_rows: int = 8
    has_draft_model: bool = False
    has_paced_lookup: bool = False
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "give at least 1")
        for name in _AT_LEAST_ZERO:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        for name, choices in _CHOICES.items():
            _require(getattr(self, name) in choices, name, getattr(self, name), f"give one of {', '.join(choices)}")
        ok = len(self.num_blocks) == len(self.groups) and min(self.num_blocks) >= 1
        _require(ok, "num_blocks", self.num_blocks, f"give at least 1 block for each of {len(self.groups)} groups")
        ok = not self.host_blocks or (len(self.host_blocks) == len(self.groups) and min(self.host_blocks) >= 0)
        _require(ok, "host_blocks", self.host_blocks, f"give a number of blocks for each of {len(self.groups)} groups")
        if self.headroom is not None and not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom is {self.headroom}; give a share of the pool from 0 up to, but not, 1")
        for tenant, weight in self.tenant_weights:
            _require(0 < weight < 1e6, f"tenant_weights[{tenant!r}]", weight, "give a number above 0")


_AT_LEAST_ONE = (
    "block_size", "max_model_len", "vocab_size", "max_batch_tokens", "max_sequences", "max_bypass", "max_prefill_run",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "max_partial_prefills", "long_prefill_threshold", "max_blocks_per_sequence", "max_kv_read",
    "host_load_min_tokens", "encoder_budget", "encoder_cache", "whole_span_tokens", "adapter_slots", "max_draft_tokens",
    "max_draft_rows",
)  # fmt: skip
_CHOICES = {"preemption": ("auto", "recompute", "swap"), "composition": ("mixed", "separate")}


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; {remedy}")


_SAMPLE = Want.SAMPLE.value  # 1. A plain number, because testing an enum flag costs ten times as much


@dataclass(frozen=True, slots=True)
class Admission:
    """An accepted request's max_tokens. `capped`: the request set none, so it is the most that fits."""

    max_tokens: int
    capped: bool


def check_feasible(request: Request, limits: Limits) -> Admission:
    """Return the admission of a request that can run alone. Raises InvalidRequestError or AdmissionError."""
    check_token_ids(request, limits.vocab_size)
    if request.block_keys is not None:
        _check_keys(request, request.block_keys, limits.block_size)
    _check_lengths(request, limits)
    _check_sequences(request, limits)
    if request.spans:
        _check_spans(request, limits)
    return _check_room(request, limits)


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Check that the prompt is not empty and all ids are in the vocabulary. Raises InvalidRequestError."""
    if request.num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    params = request.params
    for name, ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("emitted_token_ids", request.emitted_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("dry_breaker_ids", params.dry_breaker_ids),
    ):
        if ids:
            _check_range(name, ids, vocab_size)
    if params.bad_words_ids:
        _check_range("bad_words_ids", tuple(chain.from_iterable(params.bad_words_ids)), vocab_size)
    if params.logit_bias:
        _check_range("logit_bias", tuple(dict(params.logit_bias)), vocab_size)


def _check_range(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary."""
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name} holds the id {token}, outside the vocabulary of {vocab_size}; use ids 0 to {vocab_size - 1}",
                name,
            )


def _check_keys(request: Request, keys: tuple[bytes, ...], block_size: int) -> None:
    """Refuse more keys than full blocks. A request without token ids may also have keys for its outputs."""
    tokens, what = request.num_prompt_tokens, "prompt tokens"
    if request.prompt_token_ids is None:
        tokens, what = tokens + (request.params.max_tokens or 0), "tokens of prompt and max_tokens"
    most = tokens // block_size
    if len(keys) > most:
        raise InvalidRequestError(
            f"block_keys has {len(keys)} entries, but {tokens} {what} fill only {most} blocks of {block_size}",
            "block_keys",
        )


def _check_lengths(request: Request, limits: Limits) -> None:
    known = request.num_prompt_tokens + len(request.emitted_token_ids or ())
    needed = known + (int(request.wants) & _SAMPLE)
    if needed > limits.max_model_len:
        given = f"the prompt has {known}" + (f" and the answer needs {needed - known}" if needed > known else "")
        raise PromptTooLongError(too_long_message(limits.max_model_len, given), "prompt")
    if not limits.chunked_prefill and request.num_prompt_tokens > limits.max_batch_tokens:
        raise AdmissionError(
            f"prompt has {request.num_prompt_tokens} tokens, a step computes at most "
            f"{limits.max_batch_tokens} and chunked prefill is off; shorten the prompt, raise "
            "--max-num-batched-tokens or turn --enable-chunked-prefill on",
            "prompt",
        )


def _check_sequences(request: Request, limits: Limits) -> None:
    params = request.params
    count = params.num_sequences
    if count > limits.max_sequences:
        field = _count_field(request)
        raise AdmissionError(
            f"{field} is {count}, this engine runs {limits.max_sequences} sequences; lower it or raise --max-num-seqs",
            field,
        )
    if count > 1 and not request.wants & Want.SAMPLE:
        raise InvalidRequestError(f"n is {count}, but nothing is sampled; give n = 1", "n")
    if (count > 1 or params.beam_width) and request.emitted_token_ids:
        raise InvalidRequestError(
            "emitted_token_ids continue one choice; submit a request with several choices or beams without them",
            "emitted_token_ids",
        )
    adapter = request.adapter_id
    if adapter and not limits.adapter_slots:
        raise AdmissionError(f"adapter_id is {adapter}; this engine has no adapters, use 0", "adapter_id")


def _count_field(request: Request) -> str:
    """Return the field that sets how many sequences run."""
    params = request.params
    return "beam_width" if params.beam_width else "best_of" if params.best_of else "n"


def _check_spans(request: Request, limits: Limits) -> None:
    if not limits.encoder_budget:
        raise AdmissionError(f"{len(request.spans)} media items; this engine has no encoder budget", "spans")
    most = min(limits.encoder_budget, limits.encoder_cache)
    total, end = sum(span.length for span in request.spans), 0
    for index, span in enumerate(request.spans):
        if span.start < end or span.length < 1 or span.start + span.length > request.num_prompt_tokens:
            raise InvalidRequestError(
                f"media item {index} must be between positions {end} and {request.num_prompt_tokens}, got "
                f"{span.start} to {span.start + span.length}; give items in order, inside the prompt",
                "spans",
            )
        end = span.start + span.length
        if limits.whole_span_tokens and span.length > min(limits.whole_span_tokens, limits.max_batch_tokens):
            raise AdmissionError(
                f"media item {index} has {span.length} tokens, which one step must compute; it computes at most "
                f"{limits.max_batch_tokens}; raise --max-num-batched-tokens",
                "spans",
            )
        if span.length > most:
            raise AdmissionError(
                f"media item {index} has {span.length} tokens, the encoder takes {limits.encoder_budget} in a step "
                f"and keeps {limits.encoder_cache}; use a smaller item",
                "spans",
            )
        if not limits.chunked_prefill and total > most:
            raise AdmissionError(
                f"the media items have {total} tokens, more than {most}, and chunked prefill is off; use fewer items",
                "spans",
            )


def _check_room(request: Request, limits: Limits) -> Admission:
    """Refuse a request that does not fit the pools at full length; choose max_tokens if the request has none."""
    prompt, emitted = request.num_prompt_tokens, len(request.emitted_token_ids or ())
    max_tokens = request.params.max_tokens
    if not int(request.wants) & _SAMPLE:
        positions, max_tokens = prompt, 0
    elif max_tokens is None:
        positions = prompt + emitted
    elif emitted >= max_tokens:
        raise InvalidRequestError(
            f"{emitted} tokens are emitted already, max_tokens is {max_tokens}; raise it to continue", "max_tokens"
        )
    else:  # the last token sampled is never computed, so it takes no position in the pool
        positions = min(prompt + max_tokens, limits.max_model_len) - 1
    for group, (need, have) in enumerate(zip(worst_blocks(request, positions, limits), limits.num_blocks, strict=True)):
        if need > have:
            raise _pool_error(request, positions, group, need, limits)
    if max_tokens is not None:
        return Admission(max_tokens, capped=False)
    return Admission(_most_tokens(request, limits), capped=True)


def _most_tokens(request: Request, limits: Limits) -> int:
    """Return the greatest max_tokens whose worst case fits the pools."""
    low, high = 1, limits.max_model_len - request.num_prompt_tokens
    while low < high:
        middle = (low + high + 1) // 2
        blocks = worst_blocks(request, request.num_prompt_tokens + middle - 1, limits)
        if all(need <= have for need, have in zip(blocks, limits.num_blocks, strict=True)):
            low = middle
        else:
            high = middle - 1
    return low


def worst_blocks(request: Request, positions: int, limits: Limits) -> list[int]:
    """Return the most blocks per group that a request holds when each of its sequences has `positions` positions.

    Prompt blocks that the sequences share count once, if a preempted request is sure to find them again.
    """
    count, size = request.params.num_sequences, limits.block_size
    shared = (request.num_prompt_tokens - 1) // size if limits.block_sharing and count > 1 else 0
    if request.prompt_token_ids is None and len(request.block_keys or ()) < shared:
        shared = 0
    blocks = []
    for spec in limits.groups:
        each = spec.peak_blocks(positions, limits.max_batch_tokens, size)
        common = shared if spec.kind == GroupKind.FULL else 0
        blocks.append(common + count * (each - common))
    return blocks


def _pool_error(request: Request, positions: int, group: int, need: int, limits: Limits) -> AdmissionError:
    """Return the error for a request that needs more blocks of a group than exist; it names the field to change."""
    params, prompt, have = request.params, request.num_prompt_tokens, limits.num_blocks[group]
    held, most = have * limits.block_size, "enlarge the KV pool (--kv-cache-tokens)"
    if limits.groups[group].peak_blocks(prompt, limits.max_batch_tokens, limits.block_size) > have:
        given = f"the prompt has {prompt}: the KV pool holds no more"
        return PromptTooLongError(too_long_message(held, given, f"shorten it, or {most}"), "prompt")
    field = _count_field(request)
    cause = f"its prompt of {prompt}"
    if params.max_tokens is not None:
        cause += f" and max_tokens {params.max_tokens}"
        field = "max_tokens"
    several = f" in each of {params.num_sequences} sequences" if params.num_sequences > 1 else ""
    where = f" of group {group}" if len(limits.groups) > 1 else ""
    return AdmissionError(
        f"the request needs up to {positions} KV positions for {cause}{several}: {need} blocks, the pool{where} holds "
        f"{held} positions ({have} blocks of {limits.block_size}); lower {field}, or {most}",
        field,
    )

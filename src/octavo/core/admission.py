"""Proves that a request can run alone on this engine, or refuses it with the numbers.

Owns: every check at submit. Does not: look at what else is running: whatever passes here will finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.limits import Limits
from octavo.core.request import Request, Want
from octavo.errors import AdmissionError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Admission:
    """The request was taken. `max_tokens` is in force; `capped` says that it was unset and cut to what fits."""

    max_tokens: int
    capped: bool


def prove(request: Request, limits: Limits) -> Admission:
    """Return the admission of a request that can run alone. Raises InvalidRequestError or AdmissionError."""
    _check_ids(request, limits)
    _check_lengths(request, limits)
    _check_sequences(request, limits)
    return _fit(request, limits)


def _check_ids(request: Request, limits: Limits) -> None:
    prompt = request.prompt_token_ids
    if request.num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    for name, ids in (("prompt_token_ids", prompt), ("emitted_token_ids", request.emitted_token_ids)):
        if ids:
            _check_range(name, (min(ids), max(ids)), limits.vocab_size)
    params = request.params
    _check_range("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_range("logit_bias", (token for token, _ in params.logit_bias), limits.vocab_size)
    if request.block_keys is not None and len(request.block_keys) > request.num_prompt_tokens // limits.block_size:
        raise InvalidRequestError(
            f"block_keys has {len(request.block_keys)} entries, but {request.num_prompt_tokens} prompt tokens fill "
            f"only {request.num_prompt_tokens // limits.block_size} blocks of {limits.block_size}",
            "block_keys",
        )


def _check_range(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name} holds the id {token}, outside the vocabulary of {vocab_size}; use ids 0 to {vocab_size - 1}",
                name,
            )


def _check_lengths(request: Request, limits: Limits) -> None:
    known = request.num_prompt_tokens + len(request.emitted_token_ids or ())
    needed = known + (1 if request.wants & Want.SAMPLE else 0)
    if needed > limits.max_model_len:
        raise AdmissionError(
            f"prompt has {known} tokens and needs {needed} positions, this engine holds {limits.max_model_len}; "
            "shorten the prompt or raise --max-model-len",
            "prompt",
        )
    if not limits.chunked_prefill and request.num_prompt_tokens > limits.max_batch_tokens:
        raise AdmissionError(
            f"prompt has {request.num_prompt_tokens} tokens, a step computes at most "
            f"{limits.max_batch_tokens} and chunked prefill is off; shorten the prompt, raise "
            "--max-num-batched-tokens or turn --enable-chunked-prefill on",
            "prompt",
        )


def _check_sequences(request: Request, limits: Limits) -> None:
    count = request.params.n
    if count > limits.max_sequences:
        raise AdmissionError(
            f"n is {count}, this engine runs {limits.max_sequences} sequences; raise --max-num-seqs", "n"
        )
    if count > 1:
        raise AdmissionError(
            f"n is {count}; several choices of one request are not supported yet, send it {count} times", "n"
        )
    if request.adapter_id:
        raise AdmissionError(f"adapter_id is {request.adapter_id}; this engine has no adapters, use 0", "adapter_id")
    if request.spans:
        raise AdmissionError(f"{len(request.spans)} media items; this engine has no encoder budget", "spans")


def _fit(request: Request, limits: Limits) -> Admission:
    if not request.wants & Want.SAMPLE:
        _check_pool(request.num_prompt_tokens, "its prompt", limits)
        return Admission(0, capped=False)
    prompt, asked = request.num_prompt_tokens, request.params.max_tokens
    pool_tokens = min(limits.num_blocks) * limits.block_size
    # The last token sampled is never computed, so it takes no position in the pool.
    fitting = min(limits.max_model_len - prompt, pool_tokens - prompt + 1)
    emitted = len(request.emitted_token_ids or ())
    if asked is None:
        _check_pool(prompt + emitted, "its prompt", limits)
        return Admission(fitting, capped=True)
    if emitted >= asked:
        raise InvalidRequestError(
            f"{emitted} tokens are emitted already, max_tokens is {asked}; nothing is left to do", "max_tokens"
        )
    worst = min(prompt + asked, limits.max_model_len) - 1
    _check_pool(worst, f"its prompt of {prompt} and max_tokens {asked}", limits)
    return Admission(asked, capped=False)


def _check_pool(positions: int, cause: str, limits: Limits) -> None:
    blocks = min(limits.num_blocks)
    if positions > blocks * limits.block_size:
        raise AdmissionError(
            f"the request needs up to {positions} KV positions for {cause}, the pool holds "
            f"{blocks * limits.block_size} ({blocks} blocks of {limits.block_size}); lower max_tokens or "
            "enlarge the pool (--kv-cache-tokens)",
            "max_tokens",
        )

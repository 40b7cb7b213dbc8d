"""Cutting an output into shorter ones.

Owns: the cut. Does not: keep or wait. Invariant: the slices of an output are that output; what comes at a choice's end
comes with its last slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.engine.client import TokenOutput

_ID_BYTES = 4
_ENTRY_BYTES = 240  # of one token's log-probabilities
_TOP_BYTES = 72  # and of each of the best ones beside it
MAX_SLICE = 256  # tokens: what a reader is given at once, so that what is made of it stays small


def slices(output: TokenOutput, most: int) -> Iterator[TokenOutput]:
    """An output, in slices of at most so many tokens."""
    count = len(output.token_ids)
    if count <= most:
        yield output
        return
    for start in range(0, count, most):
        end = start + most
        part = replace(
            output,
            position=output.position + start,
            token_ids=output.token_ids[start:end],
            logprobs=None if output.logprobs is None else output.logprobs[start:end],
            prompt_logprobs=output.prompt_logprobs if start == 0 else None,
        )
        if end < count:
            part = replace(part, finish_reason=None, stop_token_id=None, error=None, is_final=False)
        yield part


def slice_tokens(num_logprobs: int | None) -> int:
    """How many tokens a slice has where each has so many log-probabilities beside it."""
    return MAX_SLICE if num_logprobs is None else max(1, MAX_SLICE // (1 + num_logprobs))


def token_bytes(num_logprobs: int | None) -> int:
    """Roughly what one token takes in memory, with so many log-probabilities beside its own."""
    return _ID_BYTES if num_logprobs is None else _ID_BYTES + _ENTRY_BYTES + _TOP_BYTES * num_logprobs

"""What of a request is written down when its text is not: stand-ins for ids, keyed digests for keys.

Owns: the stand-ins. Does not: encode.
Invariant: whatever decisions depend on stays: which ids end a sequence, how many there are, which blocks are equal;
but nobody can try a guess of the text, for the digests' secret is drawn for each segment and kept nowhere.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from octavo.core.plan import NewSequence
from octavo.core.request import Request, SamplingParams, Span

ORDINARY = -1  # stands for every id that ends nothing
MASKED_KEY_BYTES = 8
_OF_A_KEY = re.compile("[0-9a-f]{64}")
_GRAMMAR = "-"  # that there is one


class KeyMask:
    """Turns block and media keys into digests that mean nothing outside one segment."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def __call__(self, key: bytes) -> bytes:
        """The same digest for the same key, of MASKED_KEY_BYTES."""
        return blake2b(key, key=self._secret, digest_size=MASKED_KEY_BYTES).digest()


def mask_tenant(name: str, key_mask: KeyMask) -> str:
    """A tenant's name; one that was made of an API key, its SHA-256, gives way to a digest that means nothing."""
    return f"key-{key_mask(name.encode()).hex()[:8]}" if _OF_A_KEY.fullmatch(name) else name


def stand_ins(request: Request | NewSequence) -> dict[int, int]:
    """The ids that may end a request's sequences, and what stands for each: 0, 1 and so on."""
    every = dict.fromkeys((*request.eos_token_ids, *request.params.stop_token_ids))
    return {token: number for number, token in enumerate(every)}


def mask_ids(ids: Iterable[int], stands: dict[int, int]) -> list[int]:
    """Ids as they are written without text."""
    return [stands.get(token, ORDINARY) for token in ids]


def mask_request(request: Request, key_mask: KeyMask) -> Request:
    """The request by its length, with every number that a scheduler looks at. Its block keys are not in it."""
    stands = stand_ins(request)
    params = request.params
    emitted = request.emitted_token_ids
    return replace(
        request,
        prompt_token_ids=None,
        num_prompt_tokens=request.num_prompt_tokens,
        params=_mask_params(params, stands),
        block_keys=None,
        emitted_token_ids=None if emitted is None else array("i", bytes(4 * len(emitted))),
        eos_token_ids=tuple(mask_ids(request.eos_token_ids, stands)),
        cache_salt=b"",
        spans=tuple(Span(span.start, span.length, key_mask(span.key)) for span in request.spans),
    )


def _mask_params(params: SamplingParams, stands: dict[int, int]) -> SamplingParams:
    return replace(
        params,
        seed=None,
        stop=(),
        stop_token_ids=tuple(mask_ids(params.stop_token_ids, stands)),
        logit_bias=(),
        bad_words_ids=(),
        allowed_token_ids=(),
        dry_breaker_ids=(),
        shown_special_ids=(),
        grammar=_GRAMMAR if params.grammar else "",
    )

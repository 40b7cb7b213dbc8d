"""A model whose KV is a chain of hashes, and a ten-line oracle of what it says.

Owns: the chain of cells (`chain`), what is sampled behind one (`draw`), `oracle`. Does not: know blocks or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
UNKNOWN_TOKEN = -1  # the id of a request known by length only


def chain(read: Callable[[int], int], token_id: int, position: int, adapter_id: int = 0) -> int:
    """The KV of one position: a hash of the cell before it, of one farther back, and of the token's id."""
    if token_id == UNKNOWN_TOKEN:
        return hash((UNKNOWN_TOKEN, position, 5)) | 1
    if position == 0:
        return hash((token_id, adapter_id, 11)) | 1
    return hash((read(position - 1), read(position * 7919 % position), token_id, position)) | 1


def draw(cell: int, params: SamplingParams, num_outputs: int, vocab_size: int, eos: Sequence[int]) -> int:
    """The token sampled behind a cell; end ids are not drawn before `min_tokens`."""
    banned: tuple[int, ...] = ()
    if num_outputs < params.min_tokens:
        banned = params.stop_token_ids if params.ignore_eos else (*eos, *params.stop_token_ids)
    attempt = 0
    while (token_id := (hash((cell, params.seed or 0, attempt)) >> 7) % vocab_size) in banned:
        attempt += 1
    return token_id


def oracle(
    prompt_ids: Sequence[int],
    num_outputs: int,
    vocab_size: int,
    eos: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    adapter_id: int = 0,
) -> list[int]:
    """The ids that a request must give: at most `num_outputs`, up to its first end-of-sequence or stop id."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    ids, cells = list(prompt_ids), list[int]()
    for produced in range(num_outputs):
        while len(cells) < len(ids):
            cells.append(chain(cells.__getitem__, ids[len(cells)], len(cells), adapter_id))
        ids.append(draw(cells[-1], params, produced, vocab_size, eos))
        if ids[-1] in ends:
            break
    return ids[len(prompt_ids) :]

"""Keys of full KV blocks: a chain of digests over token ids, salted by everything else that changes KV.

Owns: the key function, and where a sequence's keys come from. Does not: store blocks.
Invariant: equal keys mean equal parent, ids, adapter, media and salt, up to a 128-bit collision of
BLAKE2b (RFC 7693), which the pool's comparison of ids catches where ids are known.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from octavo.core.request import Request, Sequence, Span

KEY_BYTES = 16


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


def root_key(request: Request) -> bytes:
    """Return the parent key of a request's first block: its adapter and salts."""
    return _digest(repr((request.adapter_id, request.cache_salt, request.tenant)).encode())


def private_key(key: bytes, order: int) -> bytes:
    """Return a key that only the request of this number has: its sequences share blocks with each other alone."""
    return _digest(b"private", key, order.to_bytes(8, "little"))


def child_key(parent: bytes, ids: bytes, spans: tuple[Span, ...] = (), start: int = 0, end: int = 0) -> bytes:
    """Return the key of the block of `ids` (packed int32) after `parent`; media in [start, end) adds its content."""
    state = blake2b(parent, digest_size=KEY_BYTES)
    state.update(ids)
    for span in spans:
        if span.start < end and start < span.start + span.length:
            state.update(b"media" + span.key + (span.start - start).to_bytes(8, "little", signed=True))
    return state.digest()


def extend_keys(
    keys: list[bytes], token_ids: array[int], num_tokens: int, block_size: int, request: Request, root: bytes = b""
) -> None:
    """Append the keys of the full blocks among the first `num_tokens` ids that `keys` does not hold yet.

    `root` is the first block's parent; by default the request's own.
    """
    parent = keys[-1] if keys else (root or root_key(request))
    for start in range(len(keys) * block_size, num_tokens - block_size + 1, block_size):
        end = start + block_size
        parent = child_key(parent, token_ids[start:end].tobytes(), request.spans, start, end)
        keys.append(parent)


def prompt_keys(request: Request, block_size: int) -> tuple[bytes, ...]:
    """Return the keys of a request's full prompt blocks; a frontend computes them off the step loop."""
    keys: list[bytes] = []
    if request.prompt_token_ids is not None:
        extend_keys(keys, request.prompt_token_ids, request.num_prompt_tokens, block_size, request)
    return tuple(keys)


class KeyMaker:
    """Gives sequences the keys of their full blocks: those that were submitted with the request, then digests of ids.

    For a request known by length only, keys after the prompt's full blocks are those of its first choice's outputs.
    Without caching across requests every key is private to its request.
    """

    __slots__ = ("block_size", "caching")

    def __init__(self, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence the keys of its first `num_blocks` blocks (of committed ids), or as many as are known."""
        keys, ids, state = sequence.keys, sequence.token_ids, sequence.request
        request, size = state.request, self.block_size
        if request.block_keys is not None and (self.caching or ids is None):
            known = num_blocks
            if ids is None and (sequence.choice or state.beams is not None):
                known = min(num_blocks, sequence.num_prompt // size)
            given = request.block_keys[len(keys) : known]
            keys.extend(given if self.caching else (private_key(key, state.order) for key in given))
        if ids is not None and len(keys) < num_blocks:
            root = b"" if self.caching else private_key(root_key(request), state.order)
            extend_keys(keys, ids, num_blocks * size, size, request, root)

"""Texts that a compiled grammar allows, made by choosing bytes at random: what a hot model would write."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

END = 256


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(END)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


READER = LLTokenizer(TokenizerWrapper(_Bytes()))


def walk(grammar: str, seed: int, most: int = 4000) -> bytes | None:
    """A text of the grammar, or None if it had not ended after `most` bytes. ASCII and the end are preferred."""
    rng = random.Random(seed)
    matcher = LLMatcher(READER, grammar, log_level=0)
    said = bytearray()
    while len(said) < most and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(END + 1) if mask >> token & 1]
        assert allowed and not matcher.is_error(), (grammar, bytes(said), matcher.get_error())
        closing = [token for token in allowed if token in (END, ord('"'), ord("}"), ord("]"))]
        plain = [token for token in allowed if token < 128 or token == END]
        token = rng.choice(closing if closing and rng.random() < 0.2 else plain or allowed)
        if token == END:
            return bytes(said)
        assert matcher.consume_token(token)
        said.append(token)
    assert not matcher.is_error(), matcher.get_error()
    return bytes(said) if matcher.is_stopped() else None


def allows(grammar: str, text: str) -> bool:
    """Whether the text is one that the grammar allows, whole."""
    matcher = LLMatcher(READER, grammar, log_level=0)
    raw = list(text.encode())
    return matcher.validate_tokens(raw) == len(raw) and matcher.consume_tokens(raw) and matcher.is_accepting()

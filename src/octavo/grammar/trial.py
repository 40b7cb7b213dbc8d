"""A first look at a compiled grammar, over bytes: whether it can be followed at all, before the engine has to.

Owns: a vocabulary of the 256 bytes and an end, and what is asked of a grammar with it.
Does not: know a model's vocabulary; what only special tokens decide is found by the engine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.grammar.limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END = 256


def fault_of(text: str) -> str:
    """What is wrong with a compiled grammar, "" for nothing. Takes the limits that hold where it is followed."""
    from llguidance import LLMatcher  # a tenth of a second, and seven megabytes, only where grammars are made

    has_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if has_error:
        return str(messages[0])
    matcher = LLMatcher(_bytes(), text, log_level=0, limits=parser_limits())
    is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
    if matcher.is_error():
        reason = matcher.get_error().strip()
        return reason if "NoExtension" not in reason else "it allows no text"
    return "it allows no text" if is_empty else ""


class _Bytes:
    """What llguidance asks of a tokenizer."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))

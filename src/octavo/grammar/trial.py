"""Try a compiled grammar over bytes, before the engine uses it.

Owns: a vocabulary of the 256 bytes and the model's special tokens, the checks of a grammar with it, and a few short
walks through the grammar, which reach most limits that the engine would reach later.
Does not: know what the other ids of a model are.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.grammar.limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_BYTES = 256
_NUM_WALKS = 4
_WALK_BYTES = 24
_WALKS_S = 0.1  # of processor time; most walks need a hundredth of it
_PANIC = "PanicException"  # raised by a library in Rust; no Exception, and its class cannot be imported


@dataclass(frozen=True, slots=True)
class Specials:
    """The special tokens of a model that has `size` ids, as (id, name); a Lark text may refer to one by name."""

    size: int
    tokens: tuple[tuple[int, str], ...]


NO_SPECIALS = Specials(_NUM_BYTES + 1, ((_NUM_BYTES, "<end>"),))


def fault_of(text: str, specials: Specials | None = None, num_walks: int = _NUM_WALKS) -> str:
    """Return what is wrong with a compiled grammar, "" for nothing. The limits are those of the engine.

    Without `specials` every special token that the grammar names is assumed to exist.
    """
    try:
        return _fault_of(text, specials, num_walks)
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        return "the compiler cannot read it"


def _fault_of(text: str, specials: Specials | None, num_walks: int) -> str:
    from llguidance import LLMatcher  # a tenth of a second, and seven megabytes, only where grammars are made

    has_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if has_error:
        return str(messages[0])
    matcher = LLMatcher(_reader(specials or NO_SPECIALS), text, log_level=0, limits=parser_limits())
    is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
    if not matcher.is_error():
        return "it allows no text" if is_empty else _fault_on_walks(matcher, num_walks)
    reason = matcher.get_error().strip()
    if specials is None and ("special token" in reason or "Token range" in reason):
        return ""
    return reason if "NoExtension" not in reason else "it allows no text"


def _fault_on_walks(begin: LLMatcher, num_walks: int) -> str:
    """Follow a few random outputs for a few bytes each; return the error that occurs, "" for none."""
    until = time.process_time() + _WALKS_S
    for seed in range(num_walks):
        rng = random.Random(seed)
        matcher = begin.deep_copy()
        for _ in range(_WALK_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                return str(matcher.get_error())
            if not mask or matcher.is_stopped() or time.process_time() > until:
                break
            allowed = [token for token in range(mask.bit_length()) if mask >> token & 1]
            if not matcher.consume_token(rng.choice(allowed)):
                return str(matcher.get_error())
    return ""


class _Tokens:
    """The interface of a tokenizer for llguidance: attributes of these names, and a call."""

    bos_token_id = None

    def __init__(self, specials: Specials) -> None:
        size = max(specials.size, _NUM_BYTES + len(specials.tokens))
        self.tokens = [b""] * size
        self.special_token_ids = sorted(token for token, _ in specials.tokens)
        self.eos_token_id = self.special_token_ids[0]
        for token, name in specials.tokens:
            self.tokens[token] = name.encode()
        free = (token for token in range(size) if not self.tokens[token])
        for byte in range(_NUM_BYTES):
            self.tokens[next(free)] = bytes((byte,))

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes((byte,))) for byte in text]


@lru_cache(maxsize=4)
def _reader(specials: Specials) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokens(specials)))

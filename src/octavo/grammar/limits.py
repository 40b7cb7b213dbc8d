"""Limits on the cost of one grammar in llguidance, and the check of a compiled grammar before the engine uses it.

Owns: the limits, which the check and the engine share; the error of a grammar that exceeds one; a vocabulary of the 256
bytes and the model's special tokens; a few short random walks through the grammar, which exceed most limits that
the engine would exceed later.
Does not: bound the size of a client's input (server/api does) or its time (the sandbox process does), or know the
model's other ids.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequestError, TooComplexError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_REASON_CHARACTERS = 600
MAX_LEXER_STATES = 50_000  # per output, at 1 to 2 kB each
MAX_STEP_FUEL = 200_000  # per mask: 14 ms
MAX_STEP_ITEMS = 50_000  # per mask: 3 ms
MAX_ROW_ITEMS = 5_000  # per position of an output; 1,200 optional properties reach it, at up to 25 ms per mask
MAX_GRAMMAR_SYMBOLS = 500_000
MAX_OPTIONAL_PROPERTIES = 1_200  # per object, at four items of a row each
_NO_DETAILS = "<non-verbose/>"
_TOO_MANY_EXPRESSIONS = "too many expressions hold for one text together; write one pattern for several"
# Part of llguidance's message at an exceeded limit -> the limit as the client's error states it.
_BOUNDS = (
    (
        "Current row has",
        f"one position of an output has too many possible continuations; at most {MAX_ROW_ITEMS} parser items "
        "are allowed (about four for an optional property, one for an alternative)",
    ),
    (
        "Too many items",
        f"one token of an output needs too much of it; at most {MAX_STEP_ITEMS} parser items are allowed "
        "(a forced text counts as a whole: shorten what is repeated)",
    ),
    ("too many states", f"its expressions need too many states; at most {MAX_LEXER_STATES} are allowed"),
    ("fuel", f"one token of an output needs too much of its expressions; at most {MAX_STEP_FUEL} steps are allowed"),
    ("Unable to determine if regex is empty", _TOO_MANY_EXPRESSIONS),
    ("too many expressions constructed", _TOO_MANY_EXPRESSIONS),
    ("lexer configuration (grammar) too big", "its expressions are too large when compiled"),
    ("grammar size", f"it has too many symbols when compiled; at most {MAX_GRAMMAR_SYMBOLS} are allowed"),
)

_NUM_BYTES = 256
_NUM_WALKS = 4
_WALK_BYTES = 24
_WALKS_S = 0.1  # of processor time; most walks need a hundredth of this
_PANIC = "PanicException"  # raised by a library in Rust; it is not an Exception, and cannot be imported


def parser_limits() -> LLParserLimits:
    """Return the limits. Errors omit the parser's state, which does not help a client."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=MAX_STEP_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        max_items_in_row=MAX_ROW_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def grammar_error(what: str, reason: str, param: str | None = None) -> InvalidRequestError:
    """Return the error for a grammar that llguidance refuses: TooComplexError with the limit if one is exceeded."""
    for part, bound in _BOUNDS:
        if part in reason:
            return TooComplexError(f"{what}: {bound}", param)
    reason = reason.replace(_NO_DETAILS, "").strip()
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[:MAX_REASON_CHARACTERS] + "..."
    return InvalidRequestError(f"{what}: {reason}", param)


@dataclass(frozen=True, slots=True)
class Specials:
    """The special tokens, as (id, name), of a model with `size` ids. A Lark text may refer to a token by its name."""

    size: int
    tokens: tuple[tuple[int, str], ...]


NO_SPECIALS = Specials(_NUM_BYTES + 1, ((_NUM_BYTES, "<end>"),))


def find_error(text: str, specials: Specials | None = None, num_walks: int = _NUM_WALKS) -> str:
    """Return the error of a compiled grammar, or "". The limits are those of the engine.

    Without `specials`, every special token that the grammar names is assumed to exist.
    """
    try:
        return _find_error(text, specials, num_walks)
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        return "the compiler cannot read it"


def _find_error(text: str, specials: Specials | None, num_walks: int) -> str:
    from llguidance import LLMatcher  # costs 0.1 s and 7 MB, so it is imported only by processes that compile

    has_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if has_error:
        return str(messages[0])
    matcher = LLMatcher(_reader(specials or NO_SPECIALS), text, log_level=0, limits=parser_limits())
    is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
    if not matcher.is_error():
        return "it allows no text" if is_empty else _error_on_walks(matcher, num_walks)
    reason = matcher.get_error().strip()
    if specials is None and ("special token" in reason or "Token range" in reason):
        return ""
    return reason if "NoExtension" not in reason else "it allows no text"


def _error_on_walks(begin: LLMatcher, num_walks: int) -> str:
    """Follow a few random outputs for a few bytes each; return the first error, or ""."""
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


class _ByteTokens:
    """The interface of a tokenizer for llguidance: these attributes, and a call that encodes a text."""

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

    return LLTokenizer(TokenizerWrapper(_ByteTokens(specials)))

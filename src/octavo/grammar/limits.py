"""Limits on the cost of one grammar in llguidance, and the errors of a grammar that exceeds them.

Owns: the numbers, which are the same in the check of a grammar and in the engine; the error of a grammar that exceeds
one of them. Does not: bound the size of a client's input (server/bodies does) or its time (the sandbox process does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import InvalidRequestError, TooComplexError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_REASON_CHARACTERS = 600
MAX_LEXER_STATES = 50_000  # of one output, at 1 to 2 kB each
MAX_STEP_FUEL = 200_000  # of one mask: 14 ms
MAX_STEP_ITEMS = 50_000  # of one mask: 3 ms
MAX_ROW_ITEMS = 5_000  # of one place in an output; 1,200 optional properties fill it, and take up to 25 ms for a mask
MAX_GRAMMAR_SYMBOLS = 500_000
MAX_OPTIONAL_PROPERTIES = 1_200  # of one object, four items of a row each
_NO_DETAILS = "<non-verbose/>"
_TOO_MANY_EXPRESSIONS = "too many expressions hold for one text together; write one pattern for several"
# A part of llguidance's message when a limit is exceeded -> the bound, as written in the client's error.
_BOUNDS = (
    (
        "Current row has",
        f"at one place of an output it has too many ways to go on; at most {MAX_ROW_ITEMS} parser items are taken "
        "(about four for an optional property, one for an alternative)",
    ),
    (
        "Too many items",
        f"one token of an output needs too much of it; at most {MAX_STEP_ITEMS} parser items are taken "
        "(a text that must follow is taken whole: shorten what is repeated)",
    ),
    ("too many states", f"its expressions need too many states; at most {MAX_LEXER_STATES} are taken"),
    ("fuel", f"one token of an output needs too much of its expressions; at most {MAX_STEP_FUEL} steps are taken"),
    ("Unable to determine if regex is empty", _TOO_MANY_EXPRESSIONS),
    ("too many expressions constructed", _TOO_MANY_EXPRESSIONS),
    ("lexer configuration (grammar) too big", "its expressions are too large when compiled"),
    ("grammar size", f"it has too many symbols when compiled; at most {MAX_GRAMMAR_SYMBOLS} are taken"),
)


def parser_limits() -> LLParserLimits:
    """Return the limits; errors leave out the parser's state, which is of no use to a client."""
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
    """Return the error of a grammar that llguidance refuses: at a limit, a TooComplexError with the bound."""
    for part, bound in _BOUNDS:
        if part in reason:
            return TooComplexError(f"{what}: {bound}", param)
    reason = reason.replace(_NO_DETAILS, "").strip()
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[:MAX_REASON_CHARACTERS] + "..."
    return InvalidRequestError(f"{what}: {reason}", param)

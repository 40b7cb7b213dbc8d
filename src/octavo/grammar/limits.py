"""What one grammar may cost llguidance.

Owns: the numbers, the same where a grammar is checked and where it is followed.
Does not: bound the size of what a client sends (server/bodies does) or its time (the tool process does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 50_000  # of one output, at 1 to 2 kB each
MAX_STEP_FUEL = 200_000  # of one mask: 14 ms
MAX_STEP_ITEMS = 50_000  # of one mask: 3 ms


def parser_limits() -> LLParserLimits:
    """Give the limits, and have errors leave out the parser's state, which nobody who asked can read."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=MAX_STEP_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        verbose_errors=False,
    )

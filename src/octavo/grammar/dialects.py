"""Translate common notations in expressions and grammars to those that llguidance reads.

Owns: `\\d` in expressions, and texts over several lines in GBNF. Does not: check or compile.
"""

from __future__ import annotations

import re

_LARK_START = re.compile(r"^[ \t]*[?!]?start[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_PIECE = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
_GBNF_PIECE = re.compile(r'#[^\n]*|\[(?:[^\]\\]|\\.)*\]|"(?:[^"\\]|\\.)*"', re.DOTALL)


def ascii_digits(pattern: str) -> str:
    r"""Replace `\d` by [0-9], which its authors mean; llguidance's `\d` matches the digits of all scripts.

    Within a negated class `\d` is kept, so the new expression matches no text that the old one does not.
    """
    made: list[str] = []
    negations: list[bool] = []  # of the enclosing classes
    for piece in _PIECE.findall(pattern):
        if piece.startswith("["):
            negations.append(piece == "[^")
        elif piece == "]" and negations and made[-1] not in ("[", "[^"):  # the first one in a class is a character
            negations.pop()
        elif piece == r"\d" and not any(negations):
            piece = "0-9" if negations else "[0-9]"
        made.append(piece)
    return "".join(made)


def is_lark(source: str) -> bool:
    """Return True if a grammar has a start rule in Lark's syntax."""
    return _LARK_START.search(source) is not None


def with_escaped_lines(gbnf: str) -> str:
    r"""Return the grammar with line breaks within quoted texts written as \n."""

    def escaped(found: re.Match[str]) -> str:
        piece = found[0]
        return piece.replace("\r", r"\r").replace("\n", r"\n") if piece.startswith('"') else piece

    return _GBNF_PIECE.sub(escaped, gbnf)

"""What people write in expressions and grammars, as llguidance reads it.

Owns: `\\d` in expressions, and texts over several lines in GBNF. Does not: check or compile.
"""

from __future__ import annotations

import re

_LARK_START = re.compile(r"^[ \t]*[?!]?start[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_PIECE = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
_GBNF_PIECE = re.compile(r'#[^\n]*|\[(?:[^\]\\]|\\.)*\]|"(?:[^"\\]|\\.)*"', re.DOTALL)


def ascii_digits(pattern: str) -> str:
    r"""Have `\d` mean 0 to 9, as those who write it do, and not the digits of all scripts.

    Within a class that says what is not meant, `\d` stays: so whatever matches now matched before.
    """
    made: list[str] = []
    negations: list[bool] = []  # of the classes around
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
    """Whether a grammar has a rule that begins as Lark's do."""
    return _LARK_START.search(source) is not None


def with_escaped_lines(gbnf: str) -> str:
    """Have line breaks within texts written as such."""

    def escaped(found: re.Match[str]) -> str:
        piece = found[0]
        return piece.replace("\r", r"\r").replace("\n", r"\n") if piece.startswith('"') else piece

    return _GBNF_PIECE.sub(escaped, gbnf)

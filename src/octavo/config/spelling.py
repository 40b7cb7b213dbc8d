"""Finds the known name that a misspelled word probably means, and writes the message about an unknown word.

Owns: the edit distance, its limit, the text of the message. Does not: know any names (callers pass them).
"""

from __future__ import annotations

from collections.abc import Iterable

_EDIT_SHARE = 3  # one edit is allowed per this many characters
_MAX_EDITS = 3
_MIN_PREFIX = 4
_LISTED = 12  # if no name is near, a message lists all names, up to this many


def near_names(word: str, names: Iterable[str]) -> list[str]:
    """Return up to two names that `word` probably means.

    A name with the same words in another order wins over names with the fewest typing errors, and these over an
    abbreviation. Case, leading dashes, and `_` for `-` do not count. An abbreviation of more than two names matches
    none of them.
    """
    folded = _fold(word)
    same_words, typos, abbreviations = [], [], []
    for name in dict.fromkeys(names):
        known = _fold(name)
        if sorted(known.split("-")) == sorted(folded.split("-")):
            same_words.append(name)
        elif (distance := _distance(folded, known)) <= min(_MAX_EDITS, len(folded) // _EDIT_SHARE):
            typos.append((distance, name))
        elif min(len(folded), len(known)) >= _MIN_PREFIX and (known.startswith(folded) or folded.startswith(known)):
            abbreviations.append(name)
    fewest = min((distance for distance, _ in typos), default=0)
    near = same_words or [name for distance, name in typos if distance == fewest]
    return (near or (abbreviations if len(abbreviations) <= 2 else []))[:2]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "did you mean 'x'?", or "" if no name is near."""
    near = near_names(word, names)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def unknown(kind: str, word: str, names: Iterable[str], remedy: str = "") -> str:
    """Return the message about an unknown word. It ends with near names, else `remedy`, else the list of names."""
    names = list(dict.fromkeys(names))
    listed = f"give one of {', '.join(names)}" if 0 < len(names) <= _LISTED else ""
    end = did_you_mean(word, names) or remedy or listed
    return f"unknown {kind} {word!r}" + (f"; {end}" if end else "")


def _fold(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()


def _distance(first: str, second: str) -> int:
    """Return the edit distance of two words: insertions, deletions, substitutions and swaps of neighbours."""
    before: list[int] = []
    last = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and b == first[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]

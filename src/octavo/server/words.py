"""From words, as clients write them, to the ids that sampling knows.

Owns: which ids a banned word and a sequence breaker stand for. Does not: sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from octavo.server.faults import bad_field

DRY_BREAKERS = ("\n", ":", '"', "*")  # where DRY is on and none are given; those that its author proposed


class Encoder(Protocol):
    """What is asked of a tokenizer here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ...


def bad_word_ids(tokenizer: Encoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as it stands at the start of a text and behind a space. Raises ApiError."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        spellings = [tuple(tokenizer.encode(text, False)) for text in (word, " " + word.lstrip())]
        if not spellings[0]:
            raise bad_field(f"bad_words[{index}]", f"bad_words[{index}] is {word[:40]!r}, which makes no tokens")
        found.update(dict.fromkeys(ids for ids in spellings if ids))
    return tuple(found)


def breaker_ids(tokenizer: Encoder, texts: Iterable[str]) -> tuple[int, ...]:
    """The last id of each text: a repetition is counted from behind it."""
    encoded = (tokenizer.encode(text, False) for text in texts)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))

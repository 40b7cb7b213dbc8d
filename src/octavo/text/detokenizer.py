"""Turn token ids into text as they arrive: the bytes of each id, an incremental decoder, and stop strings.

Owns: the table of bytes per id; at most three bytes of an unfinished character; whether the text has begun; text that
may still become a stop string.
Does not: keep ids or text, so the 32,000th id costs the same as the first.
Invariants: the returned texts, with flush(), concatenate to Tokenizer.decode of all ids, however the ids are split. No
returned text has half a character. Bytes that are not UTF-8 become U+FFFD by Unicode's rule (one per maximal subpart).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import ModelFileError

if TYPE_CHECKING:  # the front end loads the tokenizers library only with a model
    from tokenizers import Tokenizer as Backend

_SPACE_MARK = "\u2581"  # SentencePiece's mark for a space
_SUPPORTED = "ByteLevel, Metaspace, WordPiece, and Replace + ByteFallback + Fuse + Strip as Llama has them"


# What the clean-up of the WordPiece decoder replaces in each piece with the space before it, in order.
_CLOSED_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _closed_up(piece: str) -> str:
    for spaced, closed in _CLOSED_UP:
        piece = piece.replace(spaced, closed)
    return piece


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (Radford et al., GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """The bytes of each id inside a text, computed on first use; empty for an unknown id.

    Up to `strip_start` spaces are cut from the start of a text.
    """

    def __init__(self, backend: Backend, path: Path) -> None:
        """Read the decoder. Raises ModelFileError if its text is not the concatenation of each id's bytes."""
        self.backend = backend
        self.strip_start = 0
        self._byte_level = self._byte_fallback = self._space_mark = self._drop_first_marks = self._joined = False
        self._is_cleaned = False
        self._word_prefix: str | None = None  # of WordPiece's pieces inside a word
        self._alphabet = byte_alphabet()
        self._read_decoder(path)

    def __missing__(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._bytes(token)
        return piece

    def at_start(self, token_id: int) -> bytes:
        """Return the bytes of the first id of a text. The caller applies `strip_start`."""
        if self._drop_first_marks:
            token = self.backend.id_to_token(token_id)
            return b"" if token is None else _utf8(token.replace(_SPACE_MARK, ""))
        if self._word_prefix is not None:  # the first piece keeps its prefix, and no space precedes it
            token = self.backend.id_to_token(token_id)
            return b"" if token is None else _utf8(_closed_up(token) if self._is_cleaned else token)
        return self[token_id].removeprefix(b" ") if self._joined else self[token_id]

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            values = [self._alphabet.get(character) for character in token]
            return _utf8(token) if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass  # a token such as <0xZZ>, which only looks like a byte, is text
        if self._space_mark:
            token = token.replace(_SPACE_MARK, " ")
        if self._word_prefix is not None and token.startswith(self._word_prefix):
            token = token.removeprefix(self._word_prefix)
            return _utf8(_closed_up(token) if self._is_cleaned else token)
        if self._is_cleaned:
            return _utf8(_closed_up(f" {token}"))
        return b" " + _utf8(token) if self._joined else _utf8(token)

    def _read_decoder(self, path: Path) -> None:
        decoder = self.backend.decoder
        steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [step["type"] for step in steps]
        if not kinds:
            self._joined = True
        elif kinds == ["ByteLevel"]:
            self._byte_level = True
        elif kinds == ["WordPiece"]:
            self._joined, self._is_cleaned = True, bool(steps[0].get("cleanup"))
            self._word_prefix = steps[0].get("prefix") or None
        elif kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE_MARK:
            self._space_mark = True
            self._drop_first_marks = steps[0].get("prepend_scheme", "always") != "never"
        elif not self._read_sentencepiece(steps):
            raise ModelFileError(path, f"decoder {kinds} is not supported; {_SUPPORTED} are")

    def _read_sentencepiece(self, steps: list[dict[str, Any]]) -> bool:
        """Read the steps of a Llama-like decoder, in order; return False if there is any other step."""
        rest = list(steps)
        if rest and rest[0].get("pattern") == {"String": _SPACE_MARK} and rest[0].get("content") == " ":
            self._space_mark = True
            rest.pop(0)
        if rest and rest[0]["type"] == "ByteFallback":
            self._byte_fallback = True
            rest.pop(0)
        if rest and rest[0]["type"] == "Fuse":
            rest.pop(0)
            if rest and rest[0]["type"] == "Strip" and rest[0]["content"] == " " and rest[0]["stop"] == 0:
                self.strip_start = rest.pop(0)["start"]
        return not rest


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Decodable(Protocol):
    """The attributes of a tokenizer that a Detokenizer reads."""

    @property
    def pieces(self) -> TokenBytes:
        """The bytes of each id."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""


class Detokenizer:
    """The text of one growing sequence of ids."""

    __slots__ = ("_has_text", "_pieces", "_skipped_ids", "_strip", "_utf8")

    def __init__(
        self, tokenizer: Decodable, skip_special_tokens: bool = True, shown_special_ids: tuple[int, ...] = ()
    ) -> None:
        """Decode the ids of one sequence. Ids in `shown_special_ids` are never skipped."""
        self._pieces = tokenizer.pieces
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_special_ids:
            self._skipped_ids = self._skipped_ids.difference(shown_special_ids)
        self._strip = self._pieces.strip_start
        self._has_text = False
        self._utf8 = _Utf8Decoder("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return the characters that these ids complete."""
        if not self._skipped_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._skipped_ids]
        if not ids:
            return ""
        pieces = self._pieces
        if self._has_text:
            data = b"".join(map(pieces.__getitem__, ids))
        else:
            self._has_text = True
            data = pieces.at_start(ids[0]) + b"".join(map(pieces.__getitem__, ids[1:]))
        text = self._utf8.decode(data)
        return self._cut_start(text) if self._strip else text

    def flush(self) -> str:
        """Return the last characters at the end of the ids: U+FFFD for an unfinished character, else nothing."""
        text = self._utf8.decode(b"", True)
        return self._cut_start(text) if self._strip else text

    def _cut_start(self, text: str) -> str:
        while self._strip and text:
            self._strip = self._strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ") if text[0] == " " else text
        return text


class StopStrings:
    """A stream of text that ends at the first stop string. With `include` the stop string is returned too.

    Without `include` the returned text contains no stop string and no part of the matched one, however the text is
    split. The match that ends first counts; of several that end together, the longest. Knuth-Morris-Pratt (1977), with
    one state per stop string: a constant cost per character and stop string, whatever the lengths.
    """

    __slots__ = ("_fallbacks", "_held", "_include", "_initials", "_matched", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._fallbacks = tuple(map(_fallback_table, self._stops))
        self._initials = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to send, and the stop string that ended the stream (None if none did).

        After a match no more text is returned.
        """
        if self._matched is not None:
            return "", self._matched
        if not any(self._states) and self._initials.isdisjoint(text):
            return text, None
        before = len(self._held)
        pending = self._held + text
        for end, character in enumerate(text, before + 1):
            matched = self._advance(character)
            if matched is not None:
                self._matched, self._held = matched, ""
                return pending[: end if self._include else end - len(matched)], matched
        # With `include` no text is cut off later, so nothing needs to be held back.
        num_held = 0 if self._include else max(self._states, default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """Return the text held back, at the end of a stream without a stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Process one character; return the longest stop string that it completes."""
        states = self._states
        matched: str | None = None
        for index, stop in enumerate(self._stops):
            state = states[index]
            while state and stop[state] != character:
                state = self._fallbacks[index][state]
            states[index] = state = state + 1 if stop[state] == character else 0
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _fallback_table(stop: str) -> tuple[int, ...]:
    """Return, per length of a matched prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length]
        length = length + 1 if stop[length] == character else 0
        table.append(length)
    return tuple(table)

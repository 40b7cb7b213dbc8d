"""From texts to token ids, for texts that are not continued: embeddings and scores.

Owns: cutting to a length, refusing texts that cannot fit, and using a thread for long texts.
Does not: know templates (prompts does), or send anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.server.http.body import off_loop
from octavo.server.http.errors import bad_field, from_exception, too_long
from octavo.text.length import num_tokens_if_over

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

HERE_CHARS = 4096  # texts of this length together are tokenized in 2 ms
Input = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Texts or lists of ids. `params` are their fields as the client spelled them, one for each.

    `keep`: tokens kept of each, from the end or (`keeps_start`) the beginning; None: all, and a long text is refused.
    """

    texts: Sequence[Input]
    params: Sequence[str]
    add_special_tokens: bool = True
    keep: int | None = None
    keeps_start: bool = False

    @property
    def num_characters(self) -> int:
        """Characters of all texts."""
        return sum(len(text) for text in self.texts if isinstance(text, str))

    @property
    def num_ids(self) -> int:
        """The number of ids in all lists of ids."""
        return sum(len(text) for text in self.texts if not isinstance(text, str))


async def read_inputs(tokenizer: Tokenizer, inputs: Inputs, max_len: int) -> list[Sequence[int]]:
    """Return the token ids of each, at most `max_len`. Raises ApiError naming the field."""

    def read() -> list[Sequence[int]]:
        pairs = zip(inputs.texts, inputs.params, strict=True)
        return [_read(tokenizer, text, param, inputs, max_len) for text, param in pairs]

    return read() if inputs.num_characters <= HERE_CHARS else await off_loop(read, inputs.num_characters)


def _read(tokenizer: Tokenizer, text: Input, param: str, inputs: Inputs, max_len: int) -> Sequence[int]:
    keep = inputs.keep
    ids = _encode(tokenizer, text, param, inputs, max_len) if isinstance(text, str) else text
    if keep is not None and len(ids) > keep:
        ids = ids[:keep] if inputs.keeps_start else ids[-keep:]
    if not ids:
        raise bad_field(param, f"{param} is empty; give at least one token")
    if len(ids) > max_len:
        raise too_long(param, max_len, f"{param} has {len(ids)}")
    return ids


def _encode(tokenizer: Tokenizer, text: str, param: str, inputs: Inputs, max_len: int) -> list[int]:
    if inputs.keep is not None:  # no token has more characters than the longest piece
        most = inputs.keep * tokenizer.longest_piece
        text = text[:most] if inputs.keeps_start else text[-most:]
    elif len(text) > HERE_CHARS and (least := num_tokens_if_over(tokenizer, text, max_len)) is not None:
        raise too_long(param, max_len, f"{param} has {len(text)} characters, so at least {least} tokens")
    try:
        return tokenizer.encode(text, inputs.add_special_tokens)
    except RequestError as error:
        raise from_exception(error, {"prompt": param}) from None

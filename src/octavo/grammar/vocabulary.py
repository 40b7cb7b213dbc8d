"""A model's vocabulary for llguidance.

Owns: the bytes of every id; which ids are special and which end an output; the split of a text into ids where a
grammar forces one text.
Does not: follow a grammar. Built on first use, in about a second; one thread builds at a time.
Invariants: a special token never encodes the text that spells it. Ids that the model or the tokenizer lacks are
never allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend

from octavo.errors import InvalidRequestError
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_LINE_BREAK = "\n"  # put before a text if the tokenizer adds a space to the start of a text
MAX_SPLIT_CACHE = 1024  # forced texts that are cached with their ids


class Vocabulary:
    """The ids of a model with logits `vocab_size` wide. `load` loads the model's tokenizer on first use."""

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._load = load
        self._lock = threading.Lock()
        self._readers: dict[tuple[int, ...], LLTokenizer] = {}
        self._tokens: _Tokens | None = None

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.vocab_size // 32)

    def reader(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        """Return the vocabulary for outputs that end with any of these ids. Raises InvalidRequestError without one."""
        ends = tuple(sorted(token for token in set(eos_token_ids) if token < self.vocab_size))
        if not ends:
            reason = "this model has no id that ends an output, so none can end where its grammar does; leave it out"
            raise InvalidRequestError(reason, "grammar")
        with self._lock:
            reader = self._readers.get(ends)
            if reader is None:
                reader = self._readers[ends] = self._build(ends)
        return reader

    def _build(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._tokens is None:
            self._tokens = _Tokens(self._load(), self.vocab_size)
        self._tokens.eos_token_id = ends[0]
        return LLTokenizer(TokenizerWrapper(self._tokens), eos_token=list(ends))


class _Tokens:
    """The interface of a tokenizer for llguidance: these attributes, and a call that encodes a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._specials = frozenset(token for token in tokenizer.special_ids if token < vocab_size)
        self.special_token_ids = sorted(self._specials)
        self.bos_token_id = None
        self.eos_token_id = 0
        self._backend = Backend.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True  # "<|im_end|>" within a string is text
        self._split = lru_cache(MAX_SPLIT_CACHE)(self._ids)
        self._of_byte = {piece[0]: token for token, piece in reversed(list(enumerate(self.tokens))) if len(piece) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return self._split(text)

    def _ids(self, raw: bytes) -> list[int]:
        text = raw.decode("utf-8", "replace")
        ids = self._encode(text)
        if self._encodes(ids, raw):
            return ids
        ids = self._encode(_LINE_BREAK + text)
        for count in range(1, len(ids) + 1):
            start = b"".join(self.tokens[token] for token in ids[:count]).lstrip(b" ")
            if start == _LINE_BREAK.encode() and self._encodes(ids[count:], raw):
                return ids[count:]
        return [self._of_byte[byte] for byte in raw if byte in self._of_byte]

    def _encodes(self, ids: list[int], raw: bytes) -> bool:
        return self._specials.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == raw

    def _encode(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return [token for token in encoding.ids if token < len(self.tokens)]

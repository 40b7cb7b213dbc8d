"""Convert text to ids and back, for one model.

Owns: the tokenizers backend, its special ids, and the beginning and end ids that the model's files name.
Does not: render chats, or stream (detokenizer.py does, with the same result).
Invariants: no truncation and no padding, even if the file asks for them. A text's ids do not depend on earlier calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.artifacts import script
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.json_file import read_json
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import InvalidRequestError, ModelFileError
from octavo.text.detokenizer import Detokenizer, TokenBytes, byte_alphabet
from octavo.text.gguf_tokenizer import GGUFVocabulary, build_gguf_backend

_NAMED = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_GGUF_END_NAMES = ("eos", "eot", "eom")
_MAX_ID = 1 << 31
# A text with too many tokens is found out by parts, cut before single spaces, where most tokenizers cut themselves.
# With others a cut adds a few tokens, which SPARE_PER_CUT allows for.
PART_CHARS = 16_384
SPARE_PER_CUT = 16
_LIKELY_CHARS = 5  # characters per token; a text with fewer per allowed token is not counted in parts
_SEARCH_CHARS = 1024  # characters at the end of a part in which to look for a place to cut
_UNBOUNDED_MODELS = ("WordPiece", "WordLevel", "Unigram")


class Tokenizer:
    """A model's tokenizer. Safe to share between threads."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], eos_ids: Iterable[int], path: Path) -> None:
        """Wrap a backend. `special_tokens` are the named ones ("bos_token": "<s>"); errors name `path`."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_token_id: int | None = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.pieces = TokenBytes(backend, path)

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """Read the model's tokenizer. Raises ModelFileError."""
        return cls.from_gguf(GGUFFile.open(files.weights[0])) if files.kind == "gguf" else cls.from_folder(files.root)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Build the tokenizer from an opened GGUF file's metadata."""
        vocabulary = GGUFVocabulary(file.metadata, file.path)
        backend = build_gguf_backend(vocabulary)
        named = {name: vocabulary.token_id(_GGUF_NAMES[name]) for name in _NAMED}
        special = {f"{name}_token": vocabulary.tokens[i] for name, i in named.items() if i is not None}
        ends = (vocabulary.token_id(name) for name in _GGUF_END_NAMES)
        return cls(backend, special, (i for i in ends if i is not None), file.path)

    @classmethod
    def scripted(cls, path: Path) -> Tokenizer:
        """Return the tokenizer of a scripted model, with one id per byte after the special ids. Errors name `path`."""
        pieces = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
        backend = Backend(models.BPE({piece: i for i, piece in enumerate((*script.SPECIAL, *pieces))}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(script.SPECIAL))
        return cls(backend, {"eos_token": script.SPECIAL[script.END_ID]}, [script.END_ID], path)

    @classmethod
    def from_folder(cls, root: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the end-of-sequence ids of a model folder.

        tokenizer.json alone decides which ids surround a text. As in transformers, add_bos_token is ignored.
        """
        path = root / "tokenizer.json"
        backend = _read_backend(path)
        config = _read_optional(root / "tokenizer_config.json")
        _add_missing_tokens(backend, config)
        special = {
            key: text for name in _NAMED if (text := _token_text(config.get(key := f"{name}_token"))) is not None
        }
        ends = _end_ids(_read_optional(root / "generation_config.json"))
        ends = ends or _end_ids(_read_optional(root / "config.json"))
        eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return cls(backend, special, [*ends, *([] if eos is None else [eos])], path)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens that it spells out become their ids.

        Other threads run during the call: the library's `encode` keeps the interpreter's lock (for a second per
        megabyte), while its batch calls release it; the fast batch call omits offsets.
        Raises InvalidRequestError for a text with lone surrogates, which UTF-8 cannot encode.
        """
        if not text.isascii():
            check_text(text)
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_start(
        self, text: str, second: str | None = None, max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a text, or of a pair, cut at the end to `max_tokens` with the tokens around them.

        Of a pair the longer text is cut, until both are equally long; as transformers' "longest_first" does.
        """
        texts = [text] if second is None else [text, second]
        for each in texts:
            check_text(each)
        parts = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        if max_tokens is not None:
            around = self.backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            for part, size in zip(parts, cut_longest(max(0, max_tokens - around), *map(len, parts)), strict=True):
                part.truncate(size)
        pair = parts[1] if second is not None else None
        ids: list[int] = self.backend.post_process(parts[0], pair, add_special_tokens).ids
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a part of a text, without the special tokens around a text."""
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)

    def num_tokens_if_over(self, text: str, max_tokens: int) -> int | None:
        """Return a lower bound of the text's number of tokens if it is more than `max_tokens`, else None.

        Not all of the text is tokenized, and a text that fits is never reported as too long.
        """
        lower_bound = len(text) // self.longest_piece
        if lower_bound > max_tokens:
            return lower_bound
        if len(text) <= max(PART_CHARS, max_tokens * _LIKELY_CHARS):
            return None
        num = 0
        for part in _parts(text):
            num += self.count(part) - SPARE_PER_CUT
            if num > max_tokens:
                return num
        return None

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest token; without bound if a token may stand for any unknown text."""
        if type(self.backend.model).__name__ in _UNBOUNDED_MODELS:
            return sys.maxsize
        return max(1, *map(len, self.backend.get_vocab(with_added_tokens=True)))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; unknown ids add nothing. Raises InvalidRequestError for an impossible id."""
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < _MAX_ID:
            raise InvalidRequestError("token ids must be whole numbers from 0 to 2147483647", "tokens")
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def describe_difference(self, other: Tokenizer) -> str | None:
        """Return an id that stands for different tokens in both, or None. One vocabulary may go on after the other."""
        ours, theirs = self.backend.get_vocab(with_added_tokens=True), other.backend.get_vocab(with_added_tokens=True)
        names = {token_id: token for token, token_id in theirs.items()}
        for token, token_id in sorted(ours.items(), key=lambda entry: entry[1]):
            if names.get(token_id, token) != token:
                return f"id {token_id} is {token!r} in one and {names[token_id]!r} in the other"
        return None

    def id_to_piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id ("Ġthe"), or "" if the id has none."""
        piece: str | None = self.backend.id_to_token(token_id)
        return piece or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds inside a text; the bytes may be part of a character."""
        return self.pieces[token_id]


def cut_longest(room: int, first: int, second: int | None = None) -> list[int]:
    """Return the lengths of one or two texts, of `first` and `second` tokens, cut to `room` tokens together."""
    if second is None:
        return [min(first, room)]
    if first + second <= room:
        return [first, second]
    shorter = min(first, second)
    sizes = [shorter, room - shorter] if shorter <= room // 2 else [room // 2, room - room // 2]
    return sizes if first <= second else sizes[::-1]


def check_text(text: str) -> None:
    """Raise InvalidRequestError if the text has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"the text has a lone surrogate at character {error.start}; send valid Unicode"
        raise InvalidRequestError(reason, "prompt") from None


def _read_backend(path: Path) -> Backend:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelFileError(path, f"is no tokenizer that can be used ({error})") from error


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: object) -> str | None:
    """Return the text of a token in a configuration (a string, or an object with `content`), or None."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json has, in the order of their ids."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key in sorted((key for key in entries if key.isdecimal()), key=int):
        entry = entries[key]
        text = _token_text(entry)
        if text and backend.token_to_id(text) is None:
            flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(text, special=entry.get("special") is True, **flags)])


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start + PART_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, end: int) -> int:
    """Return the last position in the _SEARCH_CHARS before `end` with a single space between two words, else `end`."""
    if end >= len(text):
        return len(text)
    at, first = end, end - _SEARCH_CHARS
    while (at := text.rfind(" ", first, at)) > first:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return end

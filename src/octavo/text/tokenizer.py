"""Text to ids and back, for one model, whole or as the ids arrive.

Owns: the tokenizers backend, its special ids, what the model's files say about beginning and end, and the bytes of
each id. Does not: template chats. A Detokenizer keeps at most three bytes, so the 32,000th id costs what the first did.
Invariants: no truncation and no padding, whatever the file asks for; ids of a text do not depend on earlier calls.
The deltas of a Detokenizer, with flush(), concatenate to Tokenizer.decode of all ids, however the ids are split; no
delta holds half a character. Bytes that are not UTF-8 become U+FFFD by Unicode's rule (one for each maximal subpart).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.json_file import read_json
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import InvalidRequestError, ModelFileError
from octavo.text.gguf_tokenizer import GGUFVocabulary, build_gguf_backend, byte_alphabet

_NAMED = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_GGUF_END_NAMES = ("eos", "eot", "eom")
_MAX_ID = 1 << 31


_SPACE_MARK = "\u2581"  # of SentencePiece
_SUPPORTED = "ByteLevel, Metaspace, and Replace + ByteFallback + Fuse + Strip as Llama has them"


class TokenBytes(dict[int, bytes]):
    """The bytes of each id inside a text, computed on first use: none for an id that the tokenizer does not know.

    `strip_start` spaces are cut from the start of a text.
    """

    def __init__(self, backend: Backend, path: Path) -> None:
        """Read the decoder. Raises ModelFileError when it is of a kind whose text depends on more than each id."""
        self.backend = backend
        self.strip_start = 0
        self._byte_level = self._byte_fallback = self._space_mark = self._drop_first_marks = self._joined = False
        self._alphabet = byte_alphabet()
        self._read_decoder(path)

    def __missing__(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._bytes(token)
        return piece

    def at_start(self, token_id: int) -> bytes:
        """The bytes of the first id of a text (`strip_start` is still to be applied)."""
        if self._drop_first_marks:
            token = self.backend.id_to_token(token_id)
            return b"" if token is None else _utf8(token.replace(_SPACE_MARK, ""))
        return self[token_id].removeprefix(b" ") if self._joined else self[token_id]

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            values = [self._alphabet.get(character) for character in token]
            return _utf8(token) if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass  # a token that only looks like one, such as <0xZZ>, is text
        if self._space_mark:
            token = token.replace(_SPACE_MARK, " ")
        return b" " + _utf8(token) if self._joined else _utf8(token)

    def _read_decoder(self, path: Path) -> None:
        decoder = self.backend.decoder
        steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [step["type"] for step in steps]
        if not kinds:
            self._joined = True
        elif kinds == ["ByteLevel"]:
            self._byte_level = True
        elif kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE_MARK:
            self._space_mark = True
            self._drop_first_marks = steps[0].get("prepend_scheme", "always") != "never"
        elif not self._read_sentencepiece(steps):
            raise ModelFileError(path, f"decoder {kinds} is not supported; {_SUPPORTED} are")

    def _read_sentencepiece(self, steps: list[dict[str, Any]]) -> bool:
        """Take the steps of a Llama-like decoder, in their order; False when they are something else."""
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


class Detokenizer:
    """The text of one growing sequence of ids."""

    __slots__ = ("_begun", "_pieces", "_skipped_ids", "_strip", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_special_ids: tuple[int, ...] = ()
    ) -> None:
        """`shown_special_ids` are not skipped."""
        self._pieces = tokenizer.pieces
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_special_ids:
            self._skipped_ids = self._skipped_ids.difference(shown_special_ids)
        self._strip = self._pieces.strip_start
        self._begun = False
        self._utf8 = _Utf8Decoder("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return the characters that these ids complete."""
        if not self._skipped_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._skipped_ids]
        if not ids:
            return ""
        pieces = self._pieces
        if self._begun:
            data = b"".join(map(pieces.__getitem__, ids))
        else:
            self._begun = True
            data = pieces.at_start(ids[0]) + b"".join(map(pieces.__getitem__, ids[1:]))
        text = self._utf8.decode(data)
        return self._cut_start(text) if self._strip else text

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for an unfinished character, else nothing."""
        text = self._utf8.decode(b"", True)
        return self._cut_start(text) if self._strip else text

    @property
    def num_held_bytes(self) -> int:
        """Bytes of the unfinished character, at most 3: all that this object remembers of the ids."""
        return len(self._utf8.getstate()[0])

    def _cut_start(self, text: str) -> str:
        while self._strip and text:
            self._strip = self._strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ") if text[0] == " " else text
        return text


class Tokenizer:
    """Encodes and decodes. Safe to share between threads."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], eos_ids: Iterable[int], path: Path) -> None:
        """`special_tokens` are the named ones ("bos_token": "<s>"); `path` is named in errors."""
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
    def from_folder(cls, root: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the end-of-sequence ids of a model folder.

        What is put before and after a text is tokenizer.json's; as in transformers, add_bos_token has no say beside it.
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
        """Return the ids of a text. Special tokens spelled out in it become their ids.

        Other threads run meanwhile: the library's `encode` would keep the interpreter's lock (a second for a megabyte),
        its batch calls let it go, and the fast one leaves out offsets.
        Raises InvalidRequestError for a text with lone surrogates, which no UTF-8 can hold.
        """
        if not text.isascii():
            check_text(text)
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def count(self, text: str) -> int:
        """The number of tokens of a part of a text, without those put before and after."""
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest token; no token stands for more of a text."""
        return max(1, *map(len, self.backend.get_vocab(with_added_tokens=True)))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids without a token add nothing. Raises InvalidRequestError for no possible id."""
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < _MAX_ID:
            raise InvalidRequestError("token ids must be whole numbers from 0 to 2147483647", "tokens")
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def id_to_piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id ("Ġthe"), empty for an id that has none."""
        piece: str | None = self.backend.id_to_token(token_id)
        return piece or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds inside a text; they may be part of a character."""
        return self.pieces[token_id]


def check_text(text: str) -> None:
    """Refuse lone surrogates. Raises InvalidRequestError."""
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
    """A token as configurations spell it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json knows, in the order of their ids."""
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

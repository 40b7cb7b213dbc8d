"""A tokenizers.Tokenizer from GGUF metadata.

Owns: the two vocabulary kinds of the supported families: "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE).
Does not: know templates or end-of-sequence ids.
Invariants: equal to what transformers builds from the same metadata, with two exceptions. As in their own
tokenizer.json, Llama 3's and Tekken's vocabularies keep a word of the vocabulary whole, and add BOS unless
add_bos_token is false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.errors import ModelFileError
from octavo.text.detokenizer import byte_alphabet

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_MAX_PIECE_CHARS = 1024
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is split before merging. `pattern=None` means GPT-2's pattern, which tokenizers has built in."""

    pattern: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    single_digits: bool = False  # each digit is split off before the pattern is applied


_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_TEKKEN = _Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns are those of the families' published tokenizer.json. (transformers' conversion of "smollm" lets the
# pattern split digits, so its ids differ where several spaces or line ends precede a digit.)
_SPLITS = {
    "default": _Split(),
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class GGUFVocabulary:
    """The tokenizer's part of the metadata, checked. Raises ModelFileError, which names the key."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.model = self.get("model", str, "")
        self.tokens: list[str] = self.get("tokens", list, [])
        if not self.tokens:
            raise ModelFileError(path, "has no tokenizer.ggml.tokens")
        self.types = self._per_token("token_type")

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Return the value of `tokenizer.ggml.<key>`, which must be of type `kind`."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileError(self.path, f"tokenizer.ggml.{key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def token_id(self, name: str) -> int | None:
        """Return the id of `tokenizer.ggml.<name>_token_id`, or None if there is none."""
        token_id = self.get(f"{name}_token_id", int, -1)
        if token_id >= len(self.tokens):
            raise ModelFileError(
                self.path, f"tokenizer.ggml.{name}_token_id is {token_id} of {len(self.tokens)} tokens"
            )
        return token_id if token_id >= 0 else None

    def scores(self) -> list[float]:
        """Return one score per token; SentencePiece vocabularies need them."""
        scores = self._per_token("scores")
        if not scores:
            raise ModelFileError(self.path, "has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
        return scores

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges in order, or None if the file has none."""
        lines: list[str] = self.get("merges", list, [])
        pairs = [tuple(line.split(" ")) for line in lines]
        if not all(len(pair) == 2 for pair in pairs):
            bad = next(index for index, pair in enumerate(pairs) if len(pair) != 2)
            raise ModelFileError(self.path, f"merge {bad} is {lines[bad]!r}; two pieces and one space are needed")
        return pairs or None  # type: ignore[return-value]

    def _per_token(self, key: str) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, np.ndarray):
            raise ModelFileError(
                self.path, f"tokenizer.ggml.{key} is a {type(value).__name__}, not an array of numbers"
            )
        values: list[Any] = [] if value is None else value.tolist()
        if values and len(values) != len(self.tokens):
            raise ModelFileError(
                self.path, f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens"
            )
        return values


def build_gguf_backend(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Build the tokenizer. Raises ModelFileError when the metadata is damaged or of an unsupported kind."""
    if vocabulary.model == "gpt2":
        backend, add_bos, spellable = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        backend, add_bos, spellable = _sentencepiece(vocabulary), True, None
    else:
        reason = f"tokenizer.ggml.model {vocabulary.model!r} is not supported; gpt2 and llama are"
        raise ModelFileError(vocabulary.path, reason)
    _add_tokens(backend, vocabulary, spellable)
    bos = vocabulary.token_id("bos") if vocabulary.get("add_bos_token", bool, add_bos) else None
    eos = vocabulary.token_id("eos") if vocabulary.get("add_eos_token", bool, False) else None
    _set_template(backend, [i for i in (bos,) if i is not None], [i for i in (eos,) if i is not None])
    return backend


def _set_template(backend: Tokenizer, before: Sequence[int], after: Sequence[int]) -> None:
    """Make encoding put these ids before and after each text."""
    names = {token_id: f"special{token_id}" for token_id in (*before, *after)}  # any name except the token's own works
    single = [*(names[i] for i in before), "$A", *(names[i] for i in after)]
    special = [{"id": name, "ids": [i], "tokens": [backend.id_to_token(i)]} for i, name in names.items()]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=special)


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[Tokenizer, bool, set[str]]:
    pre = vocabulary.get("pre", str, "default")
    if pre not in _SPLITS:
        reason = f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(_SPLITS)} are"
        raise ModelFileError(vocabulary.path, reason)
    split = _SPLITS[pre]
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    alphabet = set(letters.values())
    ids = {
        token if alphabet.issuperset(token) else "".join(letters[byte] for byte in token.encode()): token_id
        for token_id, token in enumerate(vocabulary.tokens)
    }
    merges = _checked_merges(vocabulary.merges() or [], ids, vocabulary.path)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split.ignore_merges))
    cuts: list[PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos, alphabet


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = vocabulary.merges()
    if merges is None:
        merges = _merges_from_scores(
            ids, dict(zip(vocabulary.tokens, vocabulary.scores(), strict=True)), vocabulary.path
        )
    merges = _checked_merges(merges, ids, vocabulary.path)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=True, byte_fallback=True))
    add_space = vocabulary.get("add_space_prefix", bool, True)
    scheme = "first" if add_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if add_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(ids: Mapping[str, int], scores: Mapping[str, float], path: Path) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, best score first: the merges that a SentencePiece file implies."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        if len(token) > _MAX_PIECE_CHARS:
            raise ModelFileError(
                path, f"token {ids[token]} has {len(token)} characters; {_MAX_PIECE_CHARS} are supported"
            )
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        ranked += [(score, len(left), len(right), left, right) for _, _, left, right in pairs]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _checked_merges(merges: list[tuple[str, str]], ids: Mapping[str, int], path: Path) -> list[tuple[str, str]]:
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelFileError(path, f"merge {left!r} + {right!r} names a piece that is not in the vocabulary")
    return merges


def _add_tokens(backend: Tokenizer, vocabulary: GGUFVocabulary, spellable: set[str] | None) -> None:
    """Make the backend keep control tokens (special) and user-defined tokens (plain) whole.

    In a byte-level vocabulary a control token outside the byte alphabet is a mislabelled word, so it is not added.
    """
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=False))
    control = [t for t, kind in typed if kind == _CONTROL and (spellable is None or spellable.issuperset(t))]
    plain = [t for t, kind in typed if kind == _USER_DEFINED and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])

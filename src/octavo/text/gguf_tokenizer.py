"""A tokenizers.Tokenizer from GGUF metadata.

Owns: the kinds of vocabularies: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE) and "bert" (WordPiece).
Does not: know templates or end-of-sequence ids, or how text is split (pre_tokenizers.py does).
Invariants: equal to what transformers builds from the same metadata, except where it ignores how the family's own
tokenizer.json splits text, keeps words of the vocabulary whole, or adds BOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import ModelFileError
from octavo.text.detokenizer import byte_alphabet
from octavo.text.pre_tokenizers import SPLITS, TextSplit

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_MAX_PIECE_CHARS = 1024
_SPACE_MARK = "\u2581"
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


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
    add_bos, add_sep, spellable = True, False, None
    if vocabulary.model == "gpt2":
        split = _split(vocabulary)
        add_bos, add_sep, spellable = split.add_bos, split.add_sep, set(byte_alphabet())
        backend = _byte_level(vocabulary, split)
    elif vocabulary.model == "llama":
        backend = _sentencepiece(vocabulary)
    elif vocabulary.model == "bert":
        backend, add_sep = _wordpiece(vocabulary), True
    else:
        reason = f"tokenizer.ggml.model {vocabulary.model!r} is not supported; gpt2, llama and bert are"
        raise ModelFileError(vocabulary.path, reason)
    _add_tokens(backend, vocabulary, spellable)
    before, after = [], []
    if vocabulary.get("add_bos_token", bool, add_bos):
        before.append(_first_id(vocabulary, "bos", "cls"))
    if vocabulary.get("add_sep_token", bool, add_sep):
        after.append(_first_id(vocabulary, "seperator", "eos"))  # the specification's spelling
    elif vocabulary.get("add_eos_token", bool, False):
        after.append(vocabulary.token_id("eos"))
    _set_template(backend, [i for i in before if i is not None], [i for i in after if i is not None])
    return backend


def _first_id(vocabulary: GGUFVocabulary, *names: str) -> int | None:
    return next((token_id for name in names if (token_id := vocabulary.token_id(name)) is not None), None)


def _set_template(backend: Tokenizer, before: Sequence[int], after: Sequence[int]) -> None:
    """Make encoding put these ids before and after each text."""
    names = {token_id: f"special{token_id}" for token_id in (*before, *after)}  # any name except the token's own works
    single = [*(names[i] for i in before), "$A", *(names[i] for i in after)]
    special = [{"id": name, "ids": [i], "tokens": [backend.id_to_token(i)]} for i, name in names.items()]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=special)


def _split(vocabulary: GGUFVocabulary) -> TextSplit:
    pre = vocabulary.get("pre", str, "default")
    if pre not in SPLITS:
        reason = f"tokenizer.ggml.pre {pre!r} is not supported, and ids of another split of text would be wrong"
        raise ModelFileError(vocabulary.path, f"{reason}; {', '.join(SPLITS)} are supported")
    return SPLITS[pre]


def _byte_level(vocabulary: GGUFVocabulary, split: TextSplit) -> Tokenizer:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    alphabet = set(letters.values())
    ids = {
        token if alphabet.issuperset(token) else "".join(letters[byte] for byte in token.encode()): token_id
        for token_id, token in enumerate(vocabulary.tokens)
    }
    merges = _checked_merges(vocabulary.merges() or [], ids, vocabulary.path)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split.ignore_merges))
    backend.pre_tokenizer = split.build()
    backend.decoder = decoders.ByteLevel()
    return backend


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


def _wordpiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Build BERT's tokenizer. In the file, a mark is before pieces that begin a word, and none before those inside it.

    A vocabulary without upper-case letters has text in lower case and without accents, as uncased models do.
    """
    special = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=False) if kind == _CONTROL}
    ids: dict[str, int] = {}
    for token_id, token in enumerate(vocabulary.tokens):
        is_whole = token in special or _is_bracketed(token)
        piece = token[1:] if token.startswith(_SPACE_MARK) else token if is_whole else f"##{token}"
        ids.setdefault(piece, token_id)
    is_uncased = not any(piece != piece.lower() for piece in ids if not _is_bracketed(piece))
    lowercase = vocabulary.get("normalizer.lowercase", bool, is_uncased)
    unknown = vocabulary.token_id("unknown")
    unk_token = "[UNK]" if unknown is None else vocabulary.tokens[unknown]
    backend = Tokenizer(models.WordPiece(vocab=ids, unk_token=unk_token))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]") and len(token) > 2


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

    In a byte-level vocabulary a control token outside the byte alphabet is a mislabelled word, so it is not added. Most
    of Phi-3's tokens take the space after them, which the metadata does not tell.
    """
    strips = vocabulary.model == "llama" and vocabulary.metadata.get("general.architecture") == "phi3"
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=False))
    control = [t for t, kind in typed if kind == _CONTROL and (spellable is None or spellable.issuperset(t))]
    plain = [t for t, kind in typed if kind == _USER_DEFINED and backend.token_to_id(t) is not None]

    def added(token: str, special: bool) -> AddedToken:
        rstrip = strips and token not in _PHI3_KEEPS_SPACE
        return AddedToken(token, normalized=False, special=special, rstrip=rstrip)

    backend.add_special_tokens([added(token, True) for token in control])
    backend.add_tokens([added(token, False) for token in plain])

"""Tiny tokenizers of each kind, built with the tokenizers library, and strings that are hard for them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.text.tokenizer import Tokenizer as OctavoTokenizer

KINDS = ("byte_level", "sentencepiece", "sentencepiece_plain", "unigram", "words", "wordpiece")
SPECIAL = ("<unk>", "<s>", "</s>")
_CORPUS = [
    "the cat sat on the mat, während 猫 sat on  the hat.\n  def f(x): return x1 + 22\n",
    "naïve café 🙂 résumé",
] * 4
_SAMPLES = [
    *"aZ 0.\n\t!é猫🙂ñœ\u0301\u200d\u2581<>|{}\\\"'\u00a0\u3000\ufffd\U0001f468한ไทยمر",
    "the cat", "  ", "<s>", "</s>", "<0x41>", "\r\n", "1234", "👩‍👩‍👧", "def f(x):\n    return", "Ġ", "Ċ", "<|im_end|>",
]  # fmt: skip


def random_text(rng: random.Random, most: int = 12) -> str:
    """A string of hard pieces and of any Unicode characters but surrogates."""
    parts = []
    for _ in range(rng.randrange(most + 1)):
        if rng.random() < 0.8:
            parts.append(rng.choice(_SAMPLES))
        else:
            code = rng.randrange(1, 0x110000)
            parts.append(chr(code) if not 0xD800 <= code < 0xE000 else "?")
    return "".join(parts)


@cache
def tiny_backend_json(kind: str) -> str:
    """tokenizer.json of a tiny tokenizer: ids 0 to 2 are SPECIAL."""
    return {
        "byte_level": _byte_level,
        "sentencepiece": _sentencepiece,
        "sentencepiece_plain": lambda: _sentencepiece(strip=False),
        "unigram": _unigram,
        "words": _words,
        "wordpiece": _wordpiece,
    }[kind]().to_str()


def tiny_tokenizer(kind: str) -> OctavoTokenizer:
    """An Octavo tokenizer over a tiny backend."""
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return OctavoTokenizer(Tokenizer.from_str(tiny_backend_json(kind)), named, [2], Path("tiny") / kind)


def _special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _special(tokenizer)


def sentencepiece_parts() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens (special, bytes, pieces) and merges of a SentencePiece-like BPE vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    merged = [left + right for left, right in merges]
    letters = [token for token in model["vocab"] if token not in set(merged)]
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters], merges


def _sentencepiece(strip: bool = True) -> Tokenizer:
    tokens, merges = sentencepiece_parts()
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    scheme = "first" if strip else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _special(tokenizer)


def _unigram() -> Tokenizer:
    pieces = ["▁the", "▁cat", "▁sat", "▁on", "▁", "at", "猫", "🙂", "é", *"abcdefghijklmnopqrstuvwxyz0123456789.,!\n"]
    vocab = [*((token, 0.0) for token in SPECIAL), *((piece, -float(rank)) for rank, piece in enumerate(pieces, 1))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _special(tokenizer)


def _words() -> Tokenizer:
    words = [*SPECIAL, "the", "cat", "sat", "on", "猫", "🙂", "1", "."]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _special(tokenizer)


def _wordpiece() -> Tokenizer:
    marks = [".", ",", "!", "?", "'", "n't", "'s", "do not"]
    pieces = [*SPECIAL, "the", "cat", "sat", "on", "猫", "a", "b", *marks, "##t", "##s", "##猫", *"xyz0123"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _special(tokenizer)

"""A model's ids as grammars see them, for every kind of tokenizer."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tests.text.tiny_tokenizers import random_text, tiny_tokenizer

from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary, _Tokens

END = 2
SPELLING = ("byte_level", "sentencepiece", "sentencepiece_plain")  # kinds that can spell any text


def say(grammar: str, vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """A random output of a grammar, to its end."""
    matcher = Matcher.of(grammar, vocabulary, (END,))
    ids: list[int] = []
    while not ids or ids[-1] != END:
        bits = np.full((1, vocabulary.num_words), -1, dtype=np.int32)
        matcher.fill(bits)
        assert matcher.failure is None and len(ids) < 400
        ids.append(rng.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()))
        matcher.commit(len(ids) - 1, ids[-1])
    return ids[:-1]


@pytest.mark.parametrize("kind", SPELLING)
def test_P06_texts_that_a_grammar_forces_are_spelled_as_the_tokenizer_spells_them(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    vocabulary = Vocabulary(lambda: tokenizer, tokenizer.vocab_size)
    rng = random.Random(kind)
    for _ in range(12):
        said = "x" + random_text(rng).replace("\ufffd", "")
        ids = say(compile_grammar("choice", json.dumps([said])), vocabulary, rng)
        assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == said
        assert not set(ids) & tokenizer.special_ids


@pytest.mark.parametrize("kind", SPELLING)
def test_P06_json_is_json_in_every_kind(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    vocabulary = Vocabulary(lambda: tokenizer, tokenizer.vocab_size)
    schema = {"type": "array", "items": {"enum": ["the cat", "猫", 5, None, "</s>"]}, "minItems": 2, "maxItems": 3}
    rng = random.Random(kind)
    for _ in range(5):
        said = json.loads(tokenizer.decode(say(compile_grammar("json_schema", json.dumps(schema)), vocabulary, rng)))
        assert 2 <= len(said) <= 3 and all(item in schema["items"]["enum"] for item in said)


@pytest.mark.parametrize("kind", [*SPELLING, "unigram", "words"])
def test_the_ids_of_a_text_spell_it_or_what_of_it_they_can(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    tokens = _Tokens(tokenizer, tokenizer.vocab_size)
    rng = random.Random(kind)
    for _ in range(100):
        text = random_text(rng).encode()
        ids = tokens(text)
        spelled = b"".join(tokens.tokens[token] for token in ids)
        assert spelled == text if kind in SPELLING else len(spelled) <= len(text)
        assert not set(ids) & tokenizer.special_ids


def test_a_vocabulary_is_built_once_for_the_same_ends() -> None:
    loads = []

    def load():
        loads.append(1)
        return tiny_tokenizer("byte_level")

    vocabulary = Vocabulary(load, 400)
    assert loads == []
    assert vocabulary.reader((2,)) is vocabulary.reader((2, 2, 999)) is not vocabulary.reader((0, 2))
    assert loads == [1] and vocabulary.num_words == 13

"""Where an output stands in its grammar is a function of grammar and ids, however one got there."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_models import BOS_ID, EOS_ID, USER_ID, VOCAB_SIZE, make_tiny_model

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "cattle", "<|im_end|> hat"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": compile_grammar("json_schema", json.dumps(SCHEMA)),
    "object": compile_grammar("json_object", ""),
    "regex": compile_grammar("regex", r"(the|then|th+e)[0-9]{2,3}( and (x|yy))*"),
    "choice": compile_grammar("choice", '["yes", "no", "yesterday"]'),
    "lark": compile_grammar("lark", 'start: e\ne: t ("+" t)*\nt: NUM | "(" e ")"\nNUM: /[0-9]+/'),
}


def mask_of(matcher: Matcher, vocabulary: Vocabulary, drafts: tuple[int, ...] = ()) -> np.ndarray:
    lines = np.full((1 + len(drafts), vocabulary.num_words), -1, dtype=np.int32)
    matcher.fill(lines, drafts)
    return lines


def allowed(line: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()


def walk(grammar: str, vocabulary: Vocabulary, rng: random.Random, most: int) -> tuple[list[int], list[np.ndarray]]:
    """Random ids that the grammar allows, and the mask before each."""
    matcher = Matcher.of(grammar, vocabulary, (EOS_ID,))
    ids: list[int] = []
    masks = []
    while len(ids) < most and (not ids or ids[-1] != EOS_ID):
        masks.append(mask_of(matcher, vocabulary)[0])
        assert matcher.failure is None
        ids.append(rng.choice(allowed(masks[-1])))
        matcher.commit(len(ids) - 1, ids[-1])
    return ids, masks


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_P06_masks_are_the_same_replayed_forked_or_ahead_of_drafts(name: str, vocabulary: Vocabulary) -> None:
    rng = random.Random(name)
    for _ in range(6):
        ids, masks = walk(GRAMMARS[name], vocabulary, rng, 30)
        at = rng.randrange(len(ids))
        replayed = Matcher.of(GRAMMARS[name], vocabulary, (EOS_ID,))
        replayed.replay(ids[:at])
        forked = replayed.fork()
        assert np.array_equal(mask_of(replayed, vocabulary)[0], masks[at])
        drafts = tuple(ids[at : at + 5])
        lines = mask_of(forked, vocabulary, drafts)
        expected = masks[at : at + len(drafts) + 1]
        assert np.array_equal(lines[: len(expected)], expected)
        assert np.array_equal(mask_of(forked, vocabulary)[0], masks[at]), "drafts move nobody"
        assert np.array_equal(mask_of(replayed, vocabulary)[0], masks[at])


def test_P06_what_follows_a_draft_that_may_not_come_is_left_alone(vocabulary: Vocabulary) -> None:
    matcher = Matcher.of(GRAMMARS["choice"], vocabulary, (EOS_ID,))
    good = allowed(mask_of(matcher, vocabulary)[0])
    bad = next(token for token in range(3, VOCAB_SIZE) if token not in good)
    lines = mask_of(matcher, vocabulary, (bad, good[0]))
    assert allowed(lines[0]) == good
    assert (lines[1:] == -1).all()
    assert matcher.failure is None


def test_P06_a_complete_output_may_only_end(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    for ends in ((EOS_ID,), (BOS_ID, EOS_ID)):
        matcher = Matcher.of(compile_grammar("choice", '["no"]'), vocabulary, ends)
        ids = tokenizer.encode("no", add_special_tokens=False)
        matcher.replay(ids)
        lines = mask_of(matcher, vocabulary, (EOS_ID,))
        assert allowed(lines[0]) == list(ends)


def test_P06_special_tokens_never_stand_for_the_text_that_spells_them(
    tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    rng = random.Random(5)
    ids, _ = walk(compile_grammar("json_schema", '{"const": "a <|im_end|> b"}'), vocabulary, rng, 60)
    assert ids[-1] == EOS_ID and EOS_ID not in ids[:-1]
    assert json.loads(tokenizer.decode(ids[:-1])) == "a <|im_end|> b"
    ids, _ = walk(compile_grammar("lark", 'start: "a" <|im_start|> "b"'), vocabulary, rng, 60)
    assert USER_ID in ids


def test_P06_ids_that_the_tokenizer_lacks_are_never_allowed(vocabulary: Vocabulary) -> None:
    rng = random.Random(6)
    for grammar in GRAMMARS.values():
        _, masks = walk(grammar, vocabulary, rng, 12)
        assert all(token < VOCAB_SIZE for line in masks for token in allowed(line))


def test_P06_an_output_that_left_its_grammar_says_so_once_and_for_all(vocabulary: Vocabulary) -> None:
    matcher = Matcher.of(GRAMMARS["choice"], vocabulary, (EOS_ID,))
    matcher.replay([EOS_ID])
    assert matcher.failure is not None and "does not obey its grammar" in str(matcher.failure)
    lines = mask_of(matcher, vocabulary)
    assert (lines == -1).all() and matcher.fork().failure == matcher.failure


def test_ids_are_noted_once(vocabulary: Vocabulary) -> None:
    ids, masks = walk(GRAMMARS["schema"], vocabulary, random.Random(2), 8)
    matcher = Matcher.of(GRAMMARS["schema"], vocabulary, (EOS_ID,))
    for position, token in enumerate(ids[:5]):
        matcher.commit(position, token)
        matcher.commit(position, token)
    matcher.replay(ids[:5])
    assert np.array_equal(mask_of(matcher, vocabulary)[0], masks[5])


@pytest.mark.parametrize(
    ("grammar", "ends", "reason"),
    [
        (compile_grammar("lark", "start: <|nope|>"), (EOS_ID,), "unknown special token"),
        ("{}", (EOS_ID,), "cannot be followed"),
        ("start: b", (EOS_ID,), "cannot be followed"),
        (GRAMMARS["choice"], (), "no id that ends an output"),
        (GRAMMARS["choice"], (VOCAB_SIZE + 1000,), "no id that ends an output"),
    ],
)
def test_P06_a_grammar_that_cannot_be_built_is_refused(
    vocabulary: Vocabulary, grammar: str, ends: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        Matcher.of(grammar, vocabulary, ends)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("family", ["llama2", "gemma3", "qwen2"])
def test_P06_every_kind_of_tokenizer_spells_what_the_grammar_says(family: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_tiny_model(family, tmp_path / family))
    vocabulary = Vocabulary(lambda: tokenizer, VOCAB_SIZE)
    rng = random.Random(family)
    for _ in range(4):
        ids, _ = walk(GRAMMARS["schema"], vocabulary, rng, 250)
        assert ids[-1] == EOS_ID
        said = json.loads(tokenizer.decode(ids[:-1]))
        assert set(said) == {"name", "kind", "ages"} and said["kind"] in SCHEMA["properties"]["kind"]["enum"]

"""Sources compile to one text each; what cannot be followed is refused with the reason."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher
from tests.tiny_models import EOS_ID

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.grammar.compile import KINDS, compile_grammar
from octavo.grammar.limits import MAX_REASON_CHARACTERS
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary

SOURCES = {
    "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    "json_object": "",
    "regex": r"\d{4}-\d\d",
    "choice": '["yes", "no", "\\u00e4 \\" \\\\ /"]',
    "answer": '{"structure": ["regex", "a+", null]}',
    "lark": 'start: "a" NUMBER\nNUMBER: /[0-9]+/',
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_source_compiles_to_the_engines_own_text(kind: str) -> None:
    text = compile_grammar(kind, SOURCES[kind])
    assert "grammars" in json.loads(text)
    assert LLMatcher.validate_grammar(text) == ""
    assert text == compile_grammar(kind, SOURCES[kind])


def test_gbnf_is_taken_as_lark_is() -> None:
    assert LLMatcher.validate_grammar(compile_grammar("lark", 'root ::= "a" | "b" [0-9]+')) == ""


def test_true_is_a_schema() -> None:
    assert LLMatcher.validate_grammar(compile_grammar("json_schema", "true")) == ""


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", '{"type": "object"', "not JSON"),
        ("json_schema", "[1]", "a schema is an object"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"$ref": "#/x"}', "/x"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        ("json_schema", "false", "allows no value"),
        ("json_object", "{}", "has no source"),
        ("regex", "[", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", '["a", 1]', "list"),
        ("choice", "a", "not JSON"),
        ("lark", 'start: "a" b', '"b"'),
        ("lark", "", "cannot be followed"),
        ("lark", "}{", "cannot be followed"),
        ("yaml", "", "json_schema"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(kind: str, source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(kind, source)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < MAX_REASON_CHARACTERS + 100


@pytest.mark.parametrize(
    ("kind", "source", "number"),
    [
        ("lark", 'root ::= "a"{100000}', "50000"),
        ("lark", 'start: ("x" | "y") "a"~100000', "50000"),
        ("lark", "start: " + " | ".join(f'"{i:x}"' for i in range(5001)), "5000"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(1300)}, "type": "object"}), "5000"),
    ],
    ids=["forced", "forced after a choice", "alternatives", "optional properties"],
)
def test_P06_a_limit_that_outputs_would_meet_is_named_before_any_begins(kind: str, source: str, number: str) -> None:
    with pytest.raises(TooComplexError, match=f"at most {number}"):
        compile_grammar(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(1200)}, "type": "object"})),
        ("lark", "root ::= " + " | ".join(f'"w{i}"' for i in range(3000))),
        ("choice", json.dumps([f"w{i}" for i in range(3000)])),
        ("lark", 'root ::= "a"{20000}'),
    ],
    ids=["optional properties", "alternatives", "choices", "repetitions"],
)
def test_P06_what_is_large_and_within_the_limits_is_followed(vocabulary: Vocabulary, kind: str, source: str) -> None:
    root = Matcher.of(compile_grammar(kind, source), vocabulary, (EOS_ID,))
    for seed in range(3):
        rng, matcher = random.Random(seed), root.fork()
        for _ in range(30):
            line = np.zeros((1, vocabulary.num_words), dtype=np.int32)
            matcher.fill(line)
            assert matcher.failure is None
            allowed = np.flatnonzero(np.unpackbits(line[0].view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if token == EOS_ID:
                break
            matcher.commit(matcher.num_ids, token)

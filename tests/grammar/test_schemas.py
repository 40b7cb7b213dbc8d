"""The fifty schemas of the proof: bounded, and random texts of their grammars are valid."""

import json
import random
from collections import Counter

import pytest
from tests.grammar.random_schemas import random_schema
from tests.grammar.random_walk import walk
from tests.grammar.schemas import SCHEMAS
from tests.grammar.validity import Validity

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar
from octavo.sandbox.checks import compile_checked
from octavo.sandbox.wire import CompileGrammar


def test_there_are_fifty() -> None:
    assert len(SCHEMAS) == 50 == len({title for title, _ in SCHEMAS})


@pytest.mark.parametrize(("title", "schema"), SCHEMAS, ids=[title for title, _ in SCHEMAS])
def test_P06_random_texts_of_a_schema_end_and_are_valid(title: str, schema: dict[str, object]) -> None:
    grammar = compile_grammar("json_schema", json.dumps(schema))
    validity = Validity(schema)
    num_ended = 0
    for seed in range(10):
        said = walk(grammar, seed, most=3000)
        if said is not None:
            num_ended += 1
            assert validity.fault(said.decode()) == "", said
    assert num_ended >= 9


def test_the_validators_find_faults() -> None:
    validity = Validity(dict(SCHEMAS)["a bill"])
    assert validity.fault('{"number": "R-1"}') and validity.fault("{") and validity.fault("3")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the first validator, for references to nowhere
def test_P06_random_schemas_are_refused_or_kept() -> None:
    """Whatever compiles allows only what two validators take; whatever does not is refused as the client's mistake."""
    rng = random.Random(6)
    counts: Counter[str] = Counter()
    for _ in range(300):
        schema = random_schema(rng)
        try:
            grammar = compile_checked(CompileGrammar("json_schema", json.dumps(schema)))
        except InvalidRequestError as error:
            counts["refused"] += 1
            assert error.param == "schema", (schema, error)
            continue
        for seed in range(2):
            said = walk(grammar, seed, most=300)
            if said is not None:
                counts["said"] += 1
                assert Validity(schema).fault(said.decode()) == "", (schema, said)
    assert counts["said"] > 100 and counts["refused"] > 30, counts

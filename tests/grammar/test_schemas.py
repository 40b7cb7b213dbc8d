"""The fifty schemas of the proof: bounded, and random texts of their grammars are valid."""

import json

import pytest
from tests.grammar.random_walk import walk
from tests.grammar.schemas import SCHEMAS
from tests.grammar.validity import Validity

from octavo.grammar.compile import compile_grammar


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

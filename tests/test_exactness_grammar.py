"""Outputs held to grammars: the same ids however they are scheduled and whoever is beside them, and always of the
grammar. A tiny model, whose random weights take it to every corner of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.core.plan import StepPlan
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import Capacity, Executor
from octavo.grammar.compile import compile_grammar
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer
from tests.exactness import Run, limits_of, requests_of, serve
from tests.executors.driver import SPEC, make_prompt
from tests.executors.test_torch_executor import make
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["cat", "cattle", "hat"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
SCHEMA = compile_grammar("json_schema", json.dumps(PERSON))
REPEATED = r"(the cat sat on the mat ){6,20}(yes|no)"
GRAMMARS = [SCHEMA, compile_grammar("regex", REPEATED), compile_grammar("choice", '["yes", "no", "yesterday"]'), ""]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.5, "min_p": 0.02, "typical_p": 0.9},
]


@dataclass
class Model:
    executor: Executor
    capacity: Capacity
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    def serve(self, requests: Sequence[Request], depth: int = 1, **changes: Any) -> Run:
        limits = limits_of(self.capacity, **changes)
        return serve(self.executor, limits, requests, depth=depth, vocabulary=self.vocabulary)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = make_tiny_model("llama3", tmp_path_factory.mktemp("grammar") / "llama3")
    executor, tokenizer = make(folder, "auto"), Tokenizer.from_folder(folder)
    yield Model(executor, executor.open(SPEC), tokenizer, Vocabulary(lambda: tokenizer, VOCAB_SIZE))
    executor.close()


def all_kinds(max_tokens: int = 200, **more: Any) -> list[Request]:
    """A request for every grammar (and none) with each of the options."""
    asked = [
        SamplingParams(max_tokens=max_tokens, seed=index, grammar=grammar, **{**options, **more})
        for index, (grammar, options) in enumerate((g, o) for g in GRAMMARS for o in OPTIONS)
    ]
    prompts = [make_prompt(5 + 7 * index % 40, seed=index) for index in range(len(asked))]
    return requests_of(prompts, asked, [{"eos_token_ids": (EOS_ID,)}])


def check(model: Model, request: Request, ids: Sequence[int]) -> bool:
    """Whether an output ended by itself; then it is of its grammar."""
    if not request.params.grammar or ids[-1] != EOS_ID:
        return False
    said = model.tokenizer.decode(ids[:-1], skip_special_tokens=False)
    kind = GRAMMARS.index(request.params.grammar)
    if kind == 0:
        value = json.loads(said)
        assert set(value) == {"name", "kind", "ages"} and len(value["name"]) <= 9 and len(value["ages"]) <= 3
        assert value["kind"] in ("cat", "cattle", "hat")
    elif kind == 1:
        assert re.fullmatch(REPEATED, said)
    else:
        assert said in ("yes", "no", "yesterday")
    return True


def test_P06_outputs_are_of_their_grammar_and_the_same_in_any_company(model: Model) -> None:
    requests = all_kinds()
    alone = [model.serve([request]).choices[0] for request in requests]
    ended = [check(model, request, ids[0]) for request, ids in zip(requests, alone, strict=True)]
    assert sum(ended) >= 14, "length cuts few of the fifteen"
    together = model.serve(requests)
    assert together.choices == alone
    assert together.max_rows == len(requests)


@pytest.mark.parametrize(
    ("depth", "changes"),
    [
        (2, {}),
        (3, {"max_batch_tokens": 24}),
        (1, {"num_blocks": (60,), "max_model_len": 220}),
        (2, {"num_blocks": (60,), "max_model_len": 220, "max_batch_tokens": 24}),
        (1, {"max_draft_tokens": 7, "max_draft_rows": 40}),
        (2, {"max_draft_tokens": 5, "max_draft_rows": 40, "num_blocks": (80,), "max_model_len": 220}),
    ],
)
def test_P06_P07_neither_schedule_nor_drafts_change_an_id(model: Model, depth: int, changes: dict[str, Any]) -> None:
    requests = all_kinds(max_tokens=100)
    expected = model.serve(requests)
    got = model.serve(requests, depth, **changes)
    assert got.choices == expected.choices
    if "num_blocks" in changes and "max_draft_tokens" not in changes:
        assert got.num_preemptions > 0


def test_P06_P07_drafts_are_accepted_where_the_grammar_repeats_itself(model: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, grammar=GRAMMARS[1])
    requests = requests_of([make_prompt(9)], [params], [{"eos_token_ids": (EOS_ID,)}])
    schedulers: list[Scheduler] = []

    def note(scheduler: Scheduler, plan: StepPlan) -> None:
        schedulers.append(scheduler)

    limits = limits_of(model.capacity, max_draft_tokens=7, max_draft_rows=4)
    drafted = serve(model.executor, limits, requests, watch=note, vocabulary=model.vocabulary)
    plain = model.serve(requests)
    assert drafted.choices == plain.choices
    assert schedulers[-1].statistics().num_accepted_tokens > 20
    assert drafted.num_steps < 0.7 * plain.num_steps


def test_P06_choices_each_go_their_own_way_through_the_grammar(model: Model) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=200, grammar=SCHEMA)
    requests = requests_of([make_prompt(11)], [params], [{"eos_token_ids": (EOS_ID,)}])
    expected = model.serve(requests)
    assert sum(check(model, requests[0], ids) for ids in expected.choices[0]) == 4
    assert len({tuple(ids) for ids in expected.choices[0]}) > 1
    for depth, changes in ((2, {}), (1, {"max_draft_tokens": 4, "max_draft_rows": 9})):
        assert model.serve(requests, depth, **changes).choices == expected.choices
    alone = [replace(requests[0], params=replace(params, n=1))]
    assert model.serve(alone).choices[0][0] == expected.choices[0][0]


def test_P06_several_ids_may_end_an_output(model: Model) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=GRAMMARS[2])
    for ends in ((EOS_ID,), (0, EOS_ID), (0,)):
        requests = requests_of([make_prompt(4)], [params], [{"eos_token_ids": ends}])
        [[ids]] = model.serve(requests).choices
        assert ids[-1] in ends and model.tokenizer.decode(ids[:-1]) in ("yes", "no", "yesterday")

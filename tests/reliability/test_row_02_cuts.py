"""Row 2: the engine dies at any point of a request, and the answer is the one that it would have been.

Prompts in several chunks, seeded draws with penalties, several choices, best_of, beams, log-probabilities of prompts
and answers, stop strings and characters of several bytes across the cut, output held to a schema. A real model's
arithmetic (tiny, on the CPU's kernels) where draws depend on what was emitted; scripted words where the text does.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.resolve import resolve_model
from octavo.core.request import SamplingParams
from octavo.frontend.outputs import by_choice, joined
from octavo.frontend.sessions import Session, Sessions
from octavo.grammar.compile import compile_grammar
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.text_model import TextModel
from tests.engine.fakes import ScriptedExecutor, make_limits, make_text, open_fake
from tests.exactness import limits_of
from tests.executors.driver import SPEC, make_prompt
from tests.executors.test_torch_executor import make
from tests.reliability.lives import Lives, Opened
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

Answer = Any  # what a client sees of one request, but for times
HEAVY = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
SEEDED = {"temperature": 0.8, "ignore_eos": True}
# Requests of one run each: (tokens of the prompt, parameters).
RUNS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "prompts in chunks": [(90, {"max_tokens": 4, "temperature": 0.0}), (61, {"max_tokens": 6, **SEEDED, "seed": 3})],
    "seeded, penalties": [
        (11, {**SEEDED, **HEAVY, "seed": 5, "max_tokens": 24, "min_tokens": 20, "ignore_eos": False}),
        (7, {**SEEDED, "seed": 6, "max_tokens": 24, "dry_multiplier": 2.0, "dry_allowed_length": 1, "top_k": 12}),
        (9, {**SEEDED, "seed": 7, "max_tokens": 20, "bad_words_ids": ((40, 41), (50,)), "logit_bias": ((60, 3.0),)}),
        (30, {**SEEDED, "seed": 8, "max_tokens": 20, "logprobs": 3, "prompt_logprobs": 2, "top_p": 0.9}),
    ],
    "several choices": [
        (21, {**SEEDED, **HEAVY, "seed": 9, "n": 4, "max_tokens": 18}),
        (
            13,
            {
                **SEEDED,
                "seed": 10,
                "n": 4,
                "max_tokens": 16,
                "ignore_eos": False,
                "stop_token_ids": tuple(range(40, 70)),
            },
        ),
        (33, {**SEEDED, "seed": 11, "n": 1, "best_of": 3, "max_tokens": 12, "prompt_logprobs": 1}),
        (17, {"temperature": 0.0, "n": 2, "beam_width": 3, "max_tokens": 10, "ignore_eos": True}),
    ],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TextModel, Opened]]:
    folder: Path = make_tiny_model("llama3", tmp_path_factory.mktemp("cuts") / "llama3")
    executor = make(folder, "auto")
    limits = limits_of(executor.open(SPEC), max_batch_tokens=24, max_sequences=24)
    yield TextModel.load(resolve_model(str(folder))), (executor, limits)
    executor.close()


async def read(session: Session) -> Answer:
    """Everything that a client is told, but for times."""
    deltas = [delta async for delta in session]
    usage = deltas[-1].usage
    assert usage is not None and 0 <= usage.cached_tokens <= usage.prompt_tokens
    assert 0 <= usage.queue_s <= usage.e2e_s
    whole = [joined(each) for each in by_choice(deltas)]
    choices = [
        (d.choice, list(d.token_ids), d.text, d.finish_reason, d.stop_reason, d.logprobs, d.cumulative_logprob)
        for d in whole
    ]
    return choices, session.prompt_logprobs, usage.prompt_tokens, usage.completion_tokens


async def answers(
    lives: Lives, text: Any, requests: list[tuple[list[int], SamplingParams]], *cuts: int
) -> tuple[list[Answer], int]:
    """Send everything at once, and let engines die after these turns; the answers, and how many turns it took."""
    sessions = Sessions(lives, text, capacity=None)
    begun = [
        asyncio.create_task(sessions.submit(prompt, params, request_id=f"r{index}"))
        for index, (prompt, params) in enumerate(requests)
    ]

    async def follow(task: asyncio.Task[Session]) -> Answer:
        return await read(await task)

    following = [asyncio.create_task(follow(task)) for task in begun]
    turns = await lives.run(lambda turn: turn in cuts)
    async with asyncio.timeout(60):
        return await asyncio.gather(*following), turns


async def compare(
    score: Score,
    name: str,
    text: Any,
    open_engine: Any,
    requests: Any,
    count: int,
    vocabulary: Vocabulary | None = None,
) -> list[Answer]:
    """As many runs with two deaths each: the first after each turn in turn, the second at random behind it."""
    whole, turns = await answers(Lives(open_engine, vocabulary=vocabulary), text, requests)
    rng, equal, num_cuts, num_resumed = random.Random(name), 0, 0, 0
    for index in range(count):
        first = 1 + (index * max(1, (turns - 1) // count) if count < turns else index) % (turns - 1)
        lives = Lives(open_engine, depth=1 + index % 2, vocabulary=vocabulary)
        got, _ = await answers(lives, text, requests, first, first + rng.randrange(1, turns))
        num_cuts += lives.epoch - 1
        num_resumed += lives.requests.num_resumed
        equal += got == whole
        assert not len(lives.requests) and lives.requests.rejections.gaps == 0
    score.tell(f"{name}: deaths, and requests that they met", f"{num_cuts}, {num_resumed}")
    score.share(f"{name}: runs with equal answers", equal, count)
    assert num_cuts > count and num_resumed > count
    return whole


@pytest.mark.parametrize("name", list(RUNS))
async def test_row_02_answers_are_the_same_wherever_the_engine_dies(
    score: Score, tiny: tuple[TextModel, Opened], name: str
) -> None:
    text, opened = tiny
    requests = [(make_prompt(length, seed=length), SamplingParams(**options)) for length, options in RUNS[name]]
    await compare(score, name, text, lambda: opened, requests, score.dose(6, 50))


async def test_row_02_stop_strings_and_characters_across_the_cut(score: Score) -> None:
    """A stop string of several ids, one in the middle of a multi-byte character, one that only nearly comes."""
    text = make_text()
    said = {
        "r0": "héllo wörld".replace("ö", "o") + " and 中中é then STOP here and on",
        "r1": "a STO, no; a STOP.",
        "r2/0": "中" * 9 + "END",
        "r2/1": "it goes on",
        "r2/2": "éé" * 12 + "END" + "x" * 30,
    }
    script = {name: text.tokenizer.encode(words) for name, words in said.items()}
    limits = make_limits(max_batch_tokens=16)

    def open_engine() -> Opened:
        executor = ScriptedExecutor(script)
        open_fake(executor, limits)
        return executor, limits

    requests = [
        (text.tokenizer.encode("Say it:"), SamplingParams(max_tokens=80, stop=("STOP",), seed=1)),
        (
            text.tokenizer.encode("Say that:"),
            SamplingParams(max_tokens=80, stop=("STOP", "no;x"), min_tokens=6, seed=1),
        ),
        (text.tokenizer.encode("Say more:"), SamplingParams(max_tokens=90, stop=("END", "中é"), n=3, seed=1)),
    ]
    whole, _ = await answers(Lives(open_engine), text, requests)
    texts = [[choice[2] for choice in answer[0]] for answer in whole]
    assert (
        texts[0][0].endswith("then ")
        and texts[1] == ["a STO, no; a "]
        and texts[2] == ["中" * 9, "it goes on", "éé" * 12]
    )
    await compare(score, "stop strings and characters", text, open_engine, requests, score.dose(8, 50))


async def test_row_02_output_held_to_a_schema_is_the_same_wherever_the_engine_dies(
    score: Score, tiny: tuple[TextModel, Opened]
) -> None:
    """Each life of the engine builds the grammar anew, and follows what was emitted before it goes on."""
    text, opened = tiny
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["cat", "cattle", "<|im_end|>"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    held = {
        "temperature": 1.2,
        "max_tokens": 90,
        "skip_special_tokens": False,
        "grammar": compile_grammar("json_schema", json.dumps(schema)),
    }
    requests = [
        (make_prompt(12, seed=1), SamplingParams(**held, seed=1)),
        (make_prompt(40, seed=2), SamplingParams(**held, **HEAVY, seed=2)),
        (make_prompt(9, seed=3), SamplingParams(**held, seed=3, n=3)),
        (make_prompt(21, seed=4), SamplingParams(**SEEDED, seed=4, max_tokens=30)),
    ]
    vocabulary = Vocabulary(lambda: text.tokenizer, opened[1].vocab_size)
    name = "output held to a schema"
    whole = await compare(score, name, text, lambda: opened, requests, score.dose(6, 50), vocabulary)
    said = [json.loads(choice[2].removesuffix("<|im_end|>")) for choices, *_ in whole[:3] for choice in choices]
    assert len(said) == 5 and all(set(one) == {"name", "kind"} for one in said)

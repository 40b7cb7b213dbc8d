"""Drafts beside every other feature of a request: answers equal those of an engine without drafts.

With rejection sampling answers may differ from those, and are still what their parameters allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo import assembly
from octavo.assembly import LLM
from octavo.core.proposals import DraftRow
from octavo.core.request import SamplingParams
from octavo.engine.draft_pace import DraftPace
from octavo.grammar.compile import compile_grammar
from octavo.observe.recording import open_recording
from octavo.observe.recording import replay as replay_recording
from tests.adapters import RandomAdapter
from tests.models.vision import FAMILIES, TinyVision
from tests.models.vision import VOCAB_SIZE as VISION_IDS
from tests.quick import one_in
from tests.test_images import OTHER, PICTURE, TEXT, message, write_tokenizer
from tests.tiny_models import make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "cattle"]}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
BASE: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "seed": 4}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"top_p": 0.9, "top_k": 50},
    "json schema": {"grammar": compile_grammar("json_schema", json.dumps(SCHEMA)), "ignore_eos": False},
    "regex": {"grammar": compile_grammar("regex", "(the cat sat on the mat ){3,9}(yes|no)"), "ignore_eos": False},
    "greedy regex": {"grammar": compile_grammar("regex", "(ab){9,20}c"), "temperature": 0.0, "ignore_eos": False},
    "stop strings": {"stop": ("th", "e")},
    "stop ids": {"stop_token_ids": tuple(range(40, 90))},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit bias": {"logit_bias": ((60, 4.0), (61, 4.0), (70, -9.0))},
    "logprobs": {"logprobs": 3, "temperature": 1.2},
    "greedy logprobs": {"logprobs": 2, "temperature": 0.0},
    "prompt logprobs": {"prompt_logprobs": 1},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": tuple(range(40, 90))},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "dry": {"dry_multiplier": 0.8, "temperature": 0.0},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2, "temperature": 0.3},
    "bad words": {"bad_words_ids": ((60,), (61, 62), (63,)), "temperature": 1.5},
    "allowed ids": {"allowed_token_ids": (50, 51, 52, 53), "temperature": 1.0},
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "n": {"n": 3},
    "best_of": {"n": 1, "best_of": 3},
    "beam": {"beam_width": 2, "n": 2, "temperature": 0.0},
    "nothing": {"max_tokens": 1},
}
PROMPTS = ["the cat sat on the mat, " * 6 + "the cat sat on the", "seven sheep"]
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {"num_gpu_blocks_override": 400},
    "preempting": {"num_gpu_blocks_override": 24, "max_num_seqs": 16},
    "two plans in flight": {"num_gpu_blocks_override": 400, "pipeline_depth": 2},
}


class Eager(DraftPace):
    """Always wants drafts: whether they pay depends on the machine."""

    def length(self, rows: Sequence[DraftRow], count_behind: Callable[[], int]) -> int:
        return 3

    def choose(self, rows: Sequence[DraftRow], num_rows: int) -> list[int]:
        return [len(row.lookup.ids) for row in rows]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "DraftPace", Eager)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_tiny_model("smollm2", made / "target", seed=1)
    make_tiny_model("smollm2", made / "draft", seed=2)
    RandomAdapter.of(made / "target", 5).write(made / "adapter")
    return made


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": "min_tokens" not in FEATURES[name], **BASE, **FEATURES[name]})


def answers(folder: Path, adapter: bool = False, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what each feature's requests got, twice on the same prefix cache, and the engine's statistics."""
    common = {"dtype": "float32", "threads": 1, "max_model_len": 128, "speculate_max_rows": 64}
    with LLM(str(folder / "target"), **{**common, **SIZES["roomy"], **settings}) as llm:
        asked = [(prompt, params_of(name)) for name in FEATURES for prompt in PROMPTS]
        prompts, params = [prompt for prompt, _ in asked], [one for _, one in asked]
        more: dict[str, Any] = {"lora_request": ["a", None] * len(FEATURES)} if adapter else {}
        found = [llm.generate(prompts, params, **more) for _ in range(2)]
        shown = [[(one.outputs, one.prompt_logprobs) for one in both] for both in zip(*found, strict=True)]
        return dict(zip(((name, prompt) for name in FEATURES for prompt in PROMPTS), shown, strict=True)), dict(
            llm.statistics()
        )


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return answers(folder, speculate="none")[0]


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [key for key in expected if found[key] != expected[key]] == []


@pytest.mark.parametrize("source", ["auto", "ngram", "{}/target", "{}/draft", "ngram+{}/draft"])
def test_P07_drafts_change_no_answer_of_any_feature(folder: Path, plain: dict[str, Any], source: str) -> None:
    found, statistics = answers(folder, speculate=source.format(folder))
    check_equal(found, plain)
    assert statistics["scheduler"]["num_drafted_tokens"] > 0 and statistics["scheduler"]["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("sizes", ["preempting", "two plans in flight"])
@pytest.mark.parametrize("source", ["ngram", "ngram+{}/target"])
def test_P07_nor_where_requests_are_preempted_or_plans_overlap(
    folder: Path, plain: dict[str, Any], source: str, sizes: str
) -> None:
    found, statistics = answers(folder, speculate=source.format(folder), **SIZES[sizes])
    check_equal(found, plain)
    assert statistics["scheduler"]["num_drafted_tokens"] > 0
    assert statistics["scheduler"]["num_preemptions"] > 0 or sizes != "preempting"


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_of_paced_lookups_replays(folder: Path, tmp_path: Path, has_text: bool, depth: int) -> None:
    recording = {"record": str(tmp_path / "rec"), "record_text": has_text}
    _, statistics = answers(folder, speculate="ngram", pipeline_depth=depth, **recording)
    report = replay_recording(open_recording(tmp_path / "rec"))
    assert statistics["scheduler"]["num_drafted_tokens"] > 0
    assert report.is_equal and report.num_plans == report.num_equal > 0, report.difference


@pytest.mark.parametrize("source", ["ngram", "{}/target", "ngram+{}/draft"])
def test_P07_rows_with_an_adapter_have_the_same_drafted_answers(folder: Path, source: str) -> None:
    lora = {"adapter": True, "enable_lora": True, "lora_modules": {"a": folder / "adapter"}}
    expected = answers(folder, **lora, speculate="none")[0]
    found, statistics = answers(folder, speculate=source.format(folder), **lora)
    check_equal(found, expected)
    assert statistics["scheduler"]["num_drafted_tokens"] > 0
    greedy = [expected["greedy", prompt][0][0][0].token_ids for prompt in PROMPTS]
    assert greedy[0] != answers(folder)[0]["greedy", PROMPTS[0]][0][0][0].token_ids, "the adapter changes the answer"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images, and a smaller one of text with the same tokenizer."""
    folder = tmp_path_factory.mktemp("vision")
    model = TinyVision(FAMILIES["llava"], folder / "llava")
    write_tokenizer(model.folder)
    make_tiny_model("smollm2", folder / "draft", seed=2, vocab_size=VISION_IDS)
    write_tokenizer(folder / "draft")
    return folder


@pytest.mark.parametrize("source", ["ngram", "{}/draft", "ngram+{}/draft"])
def test_P07_rows_with_images_have_the_same_drafted_answers(vision: Path, source: str) -> None:
    found = []
    for more in ({"speculate": "none"}, {"speculate": source.format(vision)}):
        sizes = {"dtype": "float32", "threads": 1, "kv_cache_tokens": 2048}
        with LLM(str(vision / "llava"), **sizes, **more) as llm:
            one, two = {"type": "image", "image": PICTURE}, {"type": "image", "image": OTHER}
            asked = [message(one, TEXT), message(two, TEXT, one), message(TEXT), message(one, one)]
            params = [{**BASE, "ignore_eos": True, "temperature": heat} for heat in (0.0, 1.0) for _ in asked]
            found.append([[one.outputs for one in llm.chat(asked * 2, params)] for _ in range(2)])
            drafted = dict(llm.statistics())["scheduler"]["num_drafted_tokens"]
    assert found[0] == found[1] and drafted > 0


EXACT = ("greedy", "greedy regex", "greedy logprobs", "penalties", "dry", "mirostat", "n", "best_of", "beam", "nothing")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("source", one_in(2, ["ngram", "{}/target", "ngram+{}/draft"]))
def test_P07_answers_with_rejection_sampling_obey_every_feature(
    folder: Path, plain: dict[str, Any], source: str, sizes: str
) -> None:
    settings = {"speculate": source.format(folder), "speculate_sampling": "rejection", **SIZES[sizes]}
    found, statistics = answers(folder, **settings)
    exact = {key: value for key, value in plain.items() if key[0] in EXACT}
    check_equal(found, exact)
    assert statistics["scheduler"]["num_accepted_tokens"] > 0
    for (name, _), rounds in found.items():
        for (answer,) in [outputs for outputs, _ in rounds if len(outputs) == 1]:
            check_obeys(name, answer)
    assert any(found[key] != plain[key] for key in plain), "drafts change no id"


def check_obeys(name: str, answer: Any) -> None:
    """Check that an answer is one that the feature's parameters allow."""
    params, ids = params_of(name), answer.token_ids
    assert len(ids) == (params.max_tokens if answer.finish_reason == "length" else len(ids)) > 0
    assert not {60, 63} & set(ids) if name == "bad words" else True
    assert set(ids) <= set(params.allowed_token_ids or ids)
    assert len(ids) > params.min_tokens
    if name == "no_repeat_ngram":
        pairs = list(pairwise(ids))
        assert len(pairs) == len(set(pairs))
    if name == "stop strings":
        assert not any(stop in answer.text for stop in params.stop)
    if name == "logprobs":
        assert [entry.token_id for entry in answer.logprobs] == list(ids)
    if name == "json schema" and answer.finish_reason == "stop":
        assert json.loads(answer.text)["kind"] in ("cat", "cattle")
    if name == "regex" and answer.finish_reason == "stop":
        assert re.fullmatch("(the cat sat on the mat ){3,9}(yes|no)", answer.text)

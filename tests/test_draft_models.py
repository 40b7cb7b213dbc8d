"""--speculate MODEL in a whole engine: the same ids, a recording that replays, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.resolve import resolve_model
from octavo.assembly import LLM
from octavo.config.sources import config_from_keywords
from octavo.core.request import Request, SamplingParams
from octavo.errors import ConfigError, OctavoError
from octavo.observe.metrics.prometheus import SnapshotMetrics
from octavo.observe.recording import open_recording
from octavo.observe.recording import replay as replay_recording
from octavo.text.text_model import TextModel
from tests.models.encoders import make_tiny_encoder
from tests.models.vision import FAMILIES, TinyVision
from tests.reliability.deaths import follow, keeping, until
from tests.test_images import write_tokenizer
from tests.tiny_models import make_tiny_model

PROMPTS = ["the cat sat on the mat", "seven sheep", "under the old oak tree another hat waited"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=4, max_tokens=48, ignore_eos=True)
LONG = 2048  # positions of an answer that takes long enough for its engine to be killed before its end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("target", "draft"), 1):
        make_tiny_model("smollm2", made / name, seed=seed, max_position_embeddings=LONG)
    return made


def answers(folder: Path, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    """Ids of every prompt, greedy and seeded, and the engine's statistics."""
    llm = LLM(str(folder / "target"), dtype="float32", max_model_len=128, num_gpu_blocks_override=64, **settings)
    try:
        found = [llm.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
        return [[one.outputs[0].token_ids for one in some] for some in found], dict(llm.statistics())
    finally:
        llm.close()


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    return answers(folder, speculate="none")[0]


@pytest.mark.parametrize("source", ["{}/target", "{}/draft", "ngram+{}/draft"])
def test_P07_an_engine_with_a_draft_model_gives_the_same_ids(folder: Path, plain: list[Any], source: str) -> None:
    ids, statistics = answers(folder, speculate=source.format(folder))
    assert ids == plain
    assert statistics["scheduler"]["num_drafted_tokens"] > 0
    assert statistics["draft_model"]["num_drafting_steps"] > 0 and statistics["draft_model"]["failure"] is None


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize("prefix", ["", "ngram+"])
def test_a_recording_of_drafts_replays_without_the_model(
    folder: Path, tmp_path: Path, plain: list[Any], prefix: str, has_text: bool
) -> None:
    settings = {"speculate": f"{prefix}{folder}/target", "record": str(tmp_path / "rec"), "record_text": has_text}
    ids, statistics = answers(folder, **settings)
    report = replay_recording(open_recording(tmp_path / "rec"))
    assert ids == plain and statistics["scheduler"]["num_drafted_tokens"] > 0
    assert report.is_equal and report.num_plans == report.num_equal > 0, report.difference


@pytest.mark.parametrize("source", ["ngram", "{}/draft", "ngram+{}/target"])
def test_a_recording_of_rejection_sampling_replays(folder: Path, tmp_path: Path, plain: list[Any], source: str) -> None:
    settings = {"speculate": source.format(folder), "speculate_sampling": "rejection", "record": str(tmp_path / "rec")}
    ids, statistics = answers(folder, **settings)
    report = replay_recording(open_recording(tmp_path / "rec"))
    assert ids[0] == plain[0], "greedy requests have the same ids"
    assert statistics["scheduler"]["num_drafted_tokens"] > 0
    assert report.is_equal and report.num_plans == report.num_equal > 0, report.difference


def test_drafts_are_counted_by_source(folder: Path) -> None:
    _, statistics = answers(folder, speculate=f"ngram+{folder}/target")
    totals, sources = statistics["scheduler"], statistics["draft_model"]
    assert min(sources["drafted_tokens"].values()) > 0 and sources["draft_s"] > 0
    assert sum(sources["drafted_tokens"].values()) == totals["num_drafted_tokens"]
    assert sum(sources["accepted_tokens"].values()) == totals["num_accepted_tokens"]
    assert sources["accepted_tokens"]["model"] > 0
    assert 0 < totals["num_drafted_rows"] < totals["num_drafted_tokens"]
    found = [sample for metric in SnapshotMetrics("m", {"engine": statistics}).collect() for sample in metric.samples]
    by_source = {
        one.labels["source"]: one.value for one in found if one.name == "octavo_accepted_tokens_by_source_total"
    }
    assert by_source == sources["accepted_tokens"]
    assert "vllm:spec_decode_num_drafts_total" in {one.name for one in found}


async def test_row_01_drafts_go_on_after_the_engine_is_killed(folder: Path, plain: list[Any]) -> None:
    values = {"speculate": str(folder / "target"), "dtype": "float32", "kv_cache_tokens": 2 * LONG}
    text = TextModel.load(resolve_model(str(folder / "target")))
    params = replace(GREEDY, max_tokens=LONG - 100, seed=1)
    async with keeping(config_from_keywords(str(folder / "target"), values)) as keeper:

        def make(name: str) -> Request:
            ids = array("i", text.tokenizer.encode(PROMPTS[0]))
            return Request(name, ids, params, arrival=asyncio.get_running_loop().time())

        whole = await follow(keeper, make("whole"))
        reading = asyncio.create_task(follow(keeper, make("cut")))
        await until(lambda: any(entry.has_progress for entry in keeper.requests))
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        cut = await reading
        assert keeper.num_restarts == 1 and cut.ids == whole.ids and cut.reason == whole.reason
        assert whole.ids[:48] == list(plain[0][0])
        again = await follow(keeper, make("again"))  # since the kill may have come near the end
        assert again.ids == whole.ids
        counted: Any = await keeper.control("statistics")
        assert counted["scheduler"]["num_drafted_tokens"] > 0 and counted["draft_model"]["failure"] is None


async def test_row_01_rejection_sampling_goes_on_after_the_engine_is_killed(folder: Path) -> None:
    """Ids that a reader has are kept. A request with choices begins again, and gets its own ids again."""
    values = {"speculate": str(folder / "draft"), "speculate_sampling": "rejection", "dtype": "float32"}
    values |= {"kv_cache_tokens": 8 * LONG}
    text = TextModel.load(resolve_model(str(folder / "target")))
    params = replace(SEEDED, max_tokens=LONG // 2)
    async with keeping(config_from_keywords(str(folder / "target"), values)) as keeper:

        def make(name: str, n: int) -> Request:
            ids = array("i", text.tokenizer.encode(PROMPTS[0]))
            return Request(name, ids, replace(params, n=n), arrival=asyncio.get_running_loop().time())

        async def read(request: Request) -> dict[int, list[int]]:
            choices: dict[int, list[int]] = {}
            await keeper.submit(request)
            async for output in keeper.outputs(request.request_id):
                assert output.position == len(choices.setdefault(output.choice, []))
                choices[output.choice] += output.token_ids
            return choices

        whole = await read(make("whole", 2))
        reading = [asyncio.create_task(read(make(f"cut-{n}", n))) for n in (1, 2)]
        await until(lambda: all(entry.has_progress for entry in keeper.requests))
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        single, choices = await asyncio.gather(*reading)
        assert keeper.num_restarts == 1 and len(single[0]) == LONG // 2
        assert choices == whole


def test_what_cannot_draft_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model("smollm2", tmp_path / "other", seed=3)
    tokenizer = other / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    ids = content["model"]["vocab"]
    ids["q"], ids["z"] = ids["z"], ids["q"]
    tokenizer.write_text(json.dumps(content))
    cases = {
        str(other): "its tokenizer differs from that of target: id .* is 'q' in one and 'z' in the other; give a",
        str(tmp_path / "absent"): "speculate is '.*absent': unknown model '.*absent'; there is no such file",
        "ngram+": "speculate is 'ngram.': unknown model ''; give",
    }
    for name, message in cases.items():
        with pytest.raises(OctavoError, match=message):
            answers(folder, speculate=name)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"speculate": str(folder / "draft"), "tensor_parallel_size": 2}, "beside one rank only; give ngram"),
        (
            {"speculate": "ngram", "speculate_sampling": "rejection", "tensor_parallel_size": 2},
            "has 2 ranks; give exact",
        ),
        (
            {"speculate_sampling": "rejection"},
            "speculate_sampling is 'rejection', but there are no drafts; give --spec",
        ),
        ({"speculate": "ngram", "speculate_sampling": "always"}, "'always'; give one of exact, rejection"),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            answers(folder, **settings)


def test_models_that_do_not_continue_text_are_refused_as_draft_models(folder: Path, tmp_path: Path) -> None:
    make_tiny_encoder("bert", tmp_path / "bert")
    vision = TinyVision(FAMILIES["llava"], tmp_path / "llava")
    write_tokenizer(vision.folder)
    cases = {
        "bert": "bert', but an encoder generates nothing; leave it out",
        "llava": "llava', which takes images, but drafts are of text; give a model of text alone, or ngram",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=f"speculate is '.*{message}"):
            answers(folder, speculate=str(tmp_path / name))

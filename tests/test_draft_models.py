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
from octavo.observe.recording import open_recording
from octavo.observe.recording import replay as replay_recording
from octavo.text.text_model import TextModel
from tests.reliability.deaths import follow, keeping, until
from tests.tiny_models import make_tiny_model

PROMPTS = ["the cat sat on the mat", "seven sheep", "under the old oak tree another hat waited"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=4, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_tiny_model("smollm2", made / "target", seed=1)
    make_tiny_model("smollm2", made / "draft", seed=2)
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
    return answers(folder)[0]


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


async def test_row_01_drafts_go_on_after_the_engine_is_killed(folder: Path, plain: list[Any]) -> None:
    values = {"speculate": str(folder / "target"), "dtype": "float32", "max_model_len": 128, "kv_cache_tokens": 1024}
    text = TextModel.load(resolve_model(str(folder / "target")))
    params = replace(GREEDY, max_tokens=100, seed=1)
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
        counted: Any = await keeper.control("statistics")
        assert counted["scheduler"]["num_drafted_tokens"] > 0 and counted["draft_model"]["failure"] is None


def test_what_cannot_draft_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model("smollm2", tmp_path / "other", seed=3)
    tokenizer = other / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    ids = content["model"]["vocab"]
    ids["q"], ids["z"] = ids["z"], ids["q"]
    tokenizer.write_text(json.dumps(content))
    cases = {
        str(other): "its tokenizer differs from that of target: id .* is 'q' in one and 'z' in the other; give a",
        str(tmp_path / "absent"): "absent",
    }
    for name, message in cases.items():
        with pytest.raises(OctavoError, match=message):
            answers(folder, speculate=name)
    with pytest.raises(ConfigError, match="beside one rank only; give ngram"):
        answers(folder, speculate=str(folder / "draft"), tensor_parallel_size=2)

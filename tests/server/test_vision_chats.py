"""Chats with images over HTTP, with a tiny model of each family: ids and greedy texts are those of transformers.

Rows: E01 (encoder inputs within the budget), E02 (embeddings cached by content), S12 (separate modalities).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("transformers")
from octavo import machine
from octavo.cli import main
from octavo.config.sources import config_from_keywords
from octavo.core.plan import StepPlan
from octavo.planning import plan_memory
from tests.media.items import data_url, file_of, make_image
from tests.models.vision import COUNT
from tests.models.vision_chat import CHATS, ChattingModel, Messages, clear_answer
from tests.reliability.deaths import until
from tests.server.test_images import Served, serving_model

PICTURE, OTHER, THIRD = make_image(70, 100), make_image(90, 60), make_image(33, 33)
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1}
FIELDS = {"max_tokens": 48, "ignore_eos": True, "return_token_ids": True}
GREEDY = {**FIELDS, "temperature": 0.0}
SEEDED = {**FIELDS, "temperature": 0.8, "seed": 11, "n": 2}


def sent(messages: Messages) -> Messages:
    """The messages as the API gets them."""

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        return {"type": "image_url", "image_url": {"url": data_url(file_of(part["image"]))}}

    return [{**message, "content": [part_of(part) for part in message["content"]]} for message in messages]


async def chat(server: Served, messages: Messages, **fields: Any) -> Any:
    answer = await server.post("/v1/chat/completions", messages=sent(messages), **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module", params=CHATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChattingModel:
    return ChattingModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(model: ChattingModel) -> list[Any]:
    """The ids of every conversation, served one after the other."""

    async def serve() -> list[Any]:
        async with serving_model(str(model.folder), **SETTINGS) as server:
            return await each(server)

    return asyncio.run(serve())


@pytest.fixture
async def server(model: ChattingModel) -> AsyncIterator[Served]:
    async with serving_model(str(model.folder), **SETTINGS, kv_cache_tokens=2048) as found:
        yield found


async def test_X06_E01_a_chat_with_two_images_is_that_of_transformers(model: ChattingModel, server: Served) -> None:
    messages, prompt, answer = clear_answer(model, [PICTURE, OTHER])
    found = await chat(server, messages, **{**GREEDY, "max_tokens": COUNT})
    assert found["prompt_token_ids"] == prompt and found["usage"]["prompt_tokens"] == len(prompt)
    assert found["choices"][0]["token_ids"] == answer
    tokenizer = model.processor.tokenizer
    assert found["choices"][0]["message"]["content"] == tokenizer.decode(answer, skip_special_tokens=True)


def conversations() -> list[Messages]:
    """Conversations with one image, two, an equal one again, and none."""
    text = {"type": "text", "text": "What now?"}
    pictures = [[PICTURE], [OTHER, PICTURE], [THIRD], []]
    parts = [[{"type": "image", "image": image} for image in images] for images in pictures]
    return [[{"role": "user", "content": [*images, text]}] for images in parts]


async def each(server: Served) -> list[Any]:
    """The ids of every conversation, greedy and seeded, one after the other."""
    bodies = [(messages, fields) for messages in conversations() for fields in (GREEDY, SEEDED)]
    return [ids_of(await chat(server, messages, **fields)) for messages, fields in bodies]


async def together(server: Served) -> list[Any]:
    """The same at once: the engine begins when it has all of them."""
    bodies = [(messages, fields) for messages in conversations() for fields in (GREEDY, SEEDED)]
    wanted = len(server.sent) + len(bodies)
    await server.engine.client.control("pause")
    tasks = [asyncio.create_task(chat(server, messages, **fields)) for messages, fields in bodies]
    await until(lambda: len(server.sent) == wanted)
    await server.engine.client.control("resume")
    return [ids_of(found) for found in await asyncio.gather(*tasks)]


def ids_of(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


class Watched:
    """The executor of a server's engine: its plans, and the errors that its next steps are to raise."""

    def __init__(self, server: Served) -> None:
        self.executor: Any = server.engine.loop._executor
        self.plans: list[StepPlan] = []
        self.num_failures = 0
        submit = self.executor.submit

        def watched(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return submit(plan)

        self.executor.submit = watched

    def fail(self, owner: Any, name: str, after: int) -> None:
        """Let one call of a method fail, after so many that do not."""
        call, left = getattr(owner, name), [after]

        def failing(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                self.num_failures += 1
                raise RuntimeError("as planted")
            return call(*arguments)

        setattr(owner, name, failing)


async def test_S07_E01_preempted_chats_with_images_resume(model: ChattingModel, alone: list[Any]) -> None:
    lengths = [len(model.inputs(messages)["input_ids"][0]) for messages in conversations()]
    pool = 2 * sum(-(-length // 8) for length in lengths)  # about the prompts, but not their texts
    settings = {"num_gpu_blocks_override": pool, "block_size": 8, "headroom": 0.0, "enable_prefix_caching": False}
    settings |= {"max_num_batched_tokens": 2048, "preemption": "recompute"}
    async with serving_model(str(model.folder), **SETTINGS, **settings) as small:
        assert await together(small) == alone
        counted: Any = await small.engine.client.statistics()
        assert counted["scheduler"]["num_preemptions"] > 0


async def test_L05_E02_a_failed_step_with_images_is_repaired(model: ChattingModel, alone: list[Any]) -> None:
    async with serving_model(str(model.folder), **SETTINGS, enable_prefix_caching=False) as other:
        watched = Watched(other)
        watched.fail(watched.executor._media._tower, "encode", after=1)  # the first image of the step is encoded
        watched.fail(watched.executor._decoder, "forward", after=3)
        assert await together(other) == alone
        assert watched.num_failures == 2


async def test_S12_E01_chats_with_and_without_images_in_separate_steps(model: ChattingModel, alone: list[Any]) -> None:
    async with serving_model(str(model.folder), **SETTINGS, separate_modalities=True) as separate:
        watched = Watched(separate)
        assert await together(separate) == alone
        has_image = {request.request_id: bool(request.spans) for request, _ in separate.sent}
        owners: dict[int, bool] = {}
        kinds = []
        for plan in watched.plans:
            owners |= {new.slot: has_image[new.request_id] for new in plan.new_sequences}
            kinds.append({owners[slot] for slot in plan.slots})
        assert {False} in kinds and {True} in kinds and {False, True} not in kinds


async def test_E02_an_image_is_encoded_once_for_all_chats(
    model: ChattingModel, alone: list[Any], server: Served
) -> None:
    watched = Watched(server)
    assert await together(server) == alone
    keys = [job.key for plan in watched.plans for job in plan.encode_jobs]
    spans = [span for request, _ in server.sent for span in request.spans]
    assert len(keys) == len(set(keys)) == len({span.key for span in spans})
    counted: Any = await server.engine.client.statistics()
    media = counted["media"]
    assert media["num_encoded"] == media["num_cached"] == len(keys) and media["encode_s"] > 0
    assert media["num_hits"] == media["num_queries"] - len(keys) and media["num_queries"] <= len(spans)
    assert media["cached_tokens"] == sum({span.key: span.length for span in spans}.values())
    assert media["cache_bytes"] == 4 * 64 * media["cached_tokens"]
    page = (await server.http.get("/metrics")).text
    for name, figure in (("octavo_media_encoded_total", "num_encoded"), ("vllm:mm_cache_hits_total", "num_hits")):
        [line] = [line for line in page.splitlines() if line.startswith(name + "{")]
        assert float(line.split()[-1]) == media[figure]


async def test_I05_the_plan_is_what_opening_gives(model: ChattingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "gpu_memory_utilization": 0.5}
    config, free = config_from_keywords(str(model.folder), settings), 24 << 20
    monkeypatch.setattr(machine, "usable_memory", lambda *_: (free, free))
    plan = plan_memory(config)
    assert plan.vision is not None and not plan.vision_note and plan.shortfall is None
    loaded = plan.weight_bytes + plan.vision.weight_bytes
    monkeypatch.setattr(machine, "usable_memory", lambda *_: (free, free - loaded))  # what the pool finds
    async with serving_model(str(model.folder), **settings) as server:
        executor: Any = server.engine.loop._executor
        has = server.engine.capacity
    assert plan.vision.weight_bytes == executor._media._tower.weight_bytes
    assert plan.vision.cache_tokens == has.encoder_cache and plan.vision.cache_bytes == 4 * 64 * has.encoder_cache
    assert plan.num_blocks == has.num_blocks and plan.groups == has.groups


async def test_the_plan_tells_what_an_image_costs(model: ChattingModel, capsys: pytest.CaptureFixture[str]) -> None:
    place, tokenizer = model.chat.place, model.processor.tokenizer

    def cost(height: int, width: int) -> int:
        """Ids of the image's place, without those that the template writes around it."""
        ids = model.processor(text=[place], images=[make_image(height, width)])["input_ids"][0]
        return len(ids) - len(tokenizer(place)["input_ids"]) + 1

    assert main(["plan", str(model.folder), "--dtype", "float32", "--num-gpu-blocks-override", "32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["vision"]
    assert told["typical_tokens"] == cost(768, 1024) and told["typical_image"] == [768, 1024]
    costs = [cost(*size) for size in ((112, 112), (56, 112), (400, 400), (30, 300), (300, 30))]
    assert max(costs) == told["max_tokens"]
    assert main(["plan", str(model.folder), "--num-gpu-blocks-override", "32"]) == 0
    lines = capsys.readouterr().out
    assert f"image     at most {told['max_tokens']:,} tokens of a prompt; {told['typical_tokens']:,} at 1024 x" in lines


async def test_why_a_model_gets_no_images_is_in_the_plan(model: ChattingModel) -> None:
    plan = plan_memory(config_from_keywords(str(model.folder), {"decoder": "transformers", "num_blocks": 32}))
    assert plan.vision is None and "its decoder is 'transformers', and images need native" in plan.vision_note

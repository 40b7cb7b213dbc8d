"""Chats with images over HTTP, with a tiny model of each family: ids and greedy texts are those of transformers.

Rows: E01 (encoder inputs within the budget), E02 (embeddings cached by content), S12 (separate modalities).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("transformers")
from octavo.core.plan import StepPlan
from tests.media.items import data_url, file_of, make_image
from tests.models.vision import COUNT
from tests.models.vision_chat import CHATS, ChattingModel, Messages, clear_answer
from tests.reliability.deaths import until
from tests.server.test_images import Served, serving_model

PICTURE, OTHER, THIRD = make_image(70, 100), make_image(90, 60), make_image(33, 33)
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1}
FIELDS = {"max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
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
    found = await chat(server, messages, **GREEDY)
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
    assert len(keys) == len(set(keys)) == len({span.key for request, _ in server.sent for span in request.spans})

"""Models with images, through real executors and the scheduler: logits and texts are those of transformers.

Rows: E01 (encoder inputs within the budget), E02 (embeddings cached by content), S12 (separate modalities).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import StepPlan
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from tests.exactness import Run, limits_of, serve
from tests.models.vision import COUNT, FAMILIES, Prompt, TinyVision

TOLERANCE = 1e-4
SPEC = ExecutorSpec(max_sequences=8, max_batch_tokens=256, block_size=8, num_blocks=160)
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, seed=0, ignore_eos=True)


class Served:
    """An opened executor of a tiny model, with prompts of text, one image, several, and an equal image again."""

    def __init__(self, tiny: TinyVision, decoder: str) -> None:
        files = resolve_model(str(tiny.folder))
        self.tiny, self.spec = tiny, read_model_spec(files)
        self.executor = TorchExecutor(
            files, self.spec, ExecutionConfig(decoder=decoder, threads=1), ModelConfig(dtype="float32")
        )
        self.capacity = self.executor.open(SPEC)
        self.prompts = tiny.prompts
        self.num_items = 2
        self.plans: list[StepPlan] = []
        self.names: list[list[str]] = []  # of each plan: the request of each row

    def generate(self, prompts: list[Prompt], rounds: int = 1, depth: int = 1, **limits: Any) -> Run:
        requests = [
            Request(str(index), array("i", prompt.ids), GREEDY, spans=prompt.spans)
            for index, prompt in enumerate(prompts)
        ]
        self.plans, self.names = [], []
        owners: dict[int, str] = {}

        def watch(_: Scheduler, plan: StepPlan) -> None:
            self.plans.append(plan)
            for new in plan.new_sequences:
                owners[new.slot] = new.request_id
                index = int(new.request_id.partition("-")[2])
                if prompts[index].items:
                    named = replace(requests[index], request_id=new.request_id)
                    self.executor.add_media(named, prompts[index].items)
            self.names.append([owners[slot] for slot in plan.slots])

        sizes = {"encoder_budget": self.capacity.encoder_budget, "encoder_cache": self.capacity.encoder_cache}
        sizes["whole_span_tokens"] = self.capacity.whole_span_tokens
        found = limits_of(self.capacity, **{**sizes, **limits})
        run = serve(self.executor, found, requests, rounds, depth, watch)
        self.executor.drop_media(f"{number}-{index}" for number in range(rounds) for index in range(len(prompts)))
        return run

    def cuts_spans(self) -> bool:
        """Return True if a row of the last run ended inside an image."""
        for plan, names in zip(self.plans, self.names, strict=True):
            for name, start, count in zip(names, plan.starts, plan.counts, strict=True):
                spans = self.prompts[int(name.partition("-")[2])].spans
                if any(span.start < start + count < span.start + span.length for span in spans):
                    return True
        return False

    @property
    def encoded(self) -> list[bytes]:
        return [job.key for plan in self.plans for job in plan.encode_jobs]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return TinyVision(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["native", "torch"])
def served(request: pytest.FixtureRequest, tiny: TinyVision) -> Iterator[Served]:
    found = Served(tiny, request.param)
    yield found
    found.executor.close()


def test_X01_X06_logits_of_every_position(served: Served) -> None:
    assert served.capacity.media == ("image",) and not served.spec.notes
    for prompt in served.prompts:
        expected = served.tiny.logits(prompt)
        seen: list[torch.Tensor] = []
        decoder: Any = served.executor._decoder

        def watched(*arguments: Any, forward: Any = decoder.forward, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(forward(*arguments).clone())
            return seen[-1]

        decoder.forward = watched
        served.generate([prompt])
        del decoder.forward
        states = torch.cat(seen)[: len(prompt.ids)]
        with torch.inference_mode():
            found = decoder.logits(states)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_E02_texts_and_images_share_steps_and_each_image_is_encoded_once(served: Served) -> None:
    run = served.generate(served.prompts)
    assert run.token_ids == served.tiny.texts
    assert run.max_rows == len(served.prompts)
    assert len(served.encoded) == len(set(served.encoded)) == served.num_items


def test_E01_chunks_cut_spans_and_later_rounds_hit_the_cache(served: Served) -> None:
    run = served.generate(served.prompts, rounds=2, long_prefill_threshold=7, depth=2)
    assert run.token_ids == served.tiny.texts
    assert run.hit_tokens > 30 and len(served.encoded) == served.num_items
    assert served.cuts_spans() == (served.capacity.whole_span_tokens == 0)


def test_E01_a_small_budget_and_cache_encode_one_image_at_a_time(served: Served) -> None:
    largest = max(span.length for prompt in served.prompts for span in prompt.spans)
    run = served.generate(served.prompts, encoder_budget=largest, encoder_cache=largest, prefix_caching=False)
    assert run.token_ids == served.tiny.texts
    assert max(len(plan.encode_jobs) for plan in served.plans) == 1
    assert any(plan.encoder_frees for plan in served.plans)


def test_preempted_requests_with_images_resume(served: Served) -> None:
    budget, lengths = 128, [len(prompt.ids) for prompt in served.prompts]  # the prompts fit, their texts do not
    blocks = tuple(
        sum(group.peak_blocks(length, budget, 8) for length in lengths) + 1 for group in served.capacity.groups
    )
    limits = {"num_blocks": blocks, "headroom": 0.0, "preemption": "recompute", "max_batch_tokens": budget}
    run = served.generate(served.prompts, **limits)
    assert run.token_ids == served.tiny.texts
    assert run.num_preemptions > 0


def test_S12_texts_and_images_in_separate_steps(served: Served) -> None:
    run = served.generate(served.prompts, separate_modalities=True)
    assert run.token_ids == served.tiny.texts
    has_items = {f"0-{index}": bool(prompt.items) for index, prompt in enumerate(served.prompts)}
    kinds = [{has_items[name] for name in names} for names in served.names]
    assert {False} in kinds and {True} in kinds and {False, True} not in kinds

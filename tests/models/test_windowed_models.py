"""Models with sliding windows, scheduled and paged, against transformers' greedy text far past the window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.executors import torch_executor
from tests.exactness import assert_equal, limits_of, run
from tests.executors.driver import GREEDY, SPEC, Dense, make_prompt
from tests.executors.test_torch_executor import make
from tests.models.test_decoder import WINDOWED
from tests.quick import one_in
from tests.tiny_models import make_tiny_model

SCENARIOS: dict[str, tuple[dict[str, object], int]] = {
    "whole": ({}, 1),
    "chunks of 7, then from the prefix cache": ({"long_prefill_threshold": 7}, 2),
    "few blocks": ({"headroom": 0.0, "preemption": "recompute", "num_blocks": 40}, 1),
}


@pytest.fixture(scope="module", params=WINDOWED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dense]:
    """A tiny model's folder, and transformers' view of it."""
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    return folder, Dense(folder)


@pytest.mark.parametrize("attention", one_in(2, ["auto", "reference", "batched"]))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_K07_X01_greedy_text_far_past_the_window(
    model: tuple[Path, Dense], attention: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" the C++ kernel computes those models whose heads it can read (gemma3), on any machine."""
    monkeypatch.setattr(torch_executor, "is_faster", lambda: True)
    changes, rounds = SCENARIOS[scenario]
    executor = make(model[0], attention)
    capacity = executor.open(replace(SPEC, num_blocks=200))
    assert capacity.max_model_len == 256
    if blocks := changes.get("num_blocks"):
        changes = {**changes, "num_blocks": (blocks,) * len(capacity.groups)}
    prefix = make_prompt(40, seed=1)
    prompts = [prefix + make_prompt(n, seed=n) for n in (5, 17, 60, 2)]
    got = run(
        executor, limits_of(capacity, **changes), prompts, replace(GREEDY, max_tokens=16, ignore_eos=True), rounds
    )
    assert_equal([model[1].greedy(prompt, 16) for prompt in prompts], got)
    assert rounds == 1 or got.hit_tokens > 0
    executor.close()


def test_bug_07_a_prompt_longer_than_the_window_keeps_its_newest_tokens(model: tuple[Path, Dense]) -> None:
    """One step computes a prompt of many windows; the next token is that of the whole context."""
    executor = make(model[0])
    capacity = executor.open(replace(SPEC, num_blocks=200))
    prompts = [make_prompt(n, seed=n) for n in (15, 16, 17, 18, 100, 101)]
    got = run(executor, limits_of(capacity, max_batch_tokens=256), prompts, replace(GREEDY, max_tokens=2))
    assert_equal([model[1].greedy(prompt, 2) for prompt in prompts], got)
    executor.close()

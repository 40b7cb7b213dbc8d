"""LLM.embed and prompt scores on tiny models: transformers' numbers, whatever shares the batch or is cached."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request, Want
from octavo.engine.client import finished
from octavo.engine.wire import Outputs
from octavo.errors import InvalidRequestError, OctavoError
from tests.frontend.ledgers import Begun
from tests.tiny_models import make_tiny_model

PROMPTS = [list(range(5, 5 + length)) for length in (1, 7, 16, 33, 60)]


@pytest.fixture(scope="module", params=["smollm2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_batch_tokens=24) as engine:  # long prompts take several steps
        yield engine


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_S24_a_vector_is_the_last_tokens_state_behind_the_final_norm(llm: LLM, theirs: Any) -> None:
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, progress=False), strict=True):
        with torch.no_grad():
            states = theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        expected = torch.nn.functional.normalize(states, dim=0)
        assert torch.allclose(torch.tensor(output.embedding), expected, atol=1e-5)
        assert output.prompt_token_ids == prompt and output.metrics is not None
        assert (output.metrics.prompt_tokens, output.metrics.completion_tokens) == (len(prompt), 0)


def test_vectors_are_the_same_bits_in_any_batch_and_from_the_cache(llm: LLM) -> None:
    alone = [llm.embed(prompt, progress=False)[0] for prompt in PROMPTS]
    together = llm.embed(PROMPTS, progress=False)
    assert [output.embedding for output in alone] == [output.embedding for output in together]
    assert together[-1].metrics is not None and together[-1].metrics.cached_tokens > 0


def test_vectors_come_beside_answers(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, progress=False)]
    llm.embed([*PROMPTS, *PROMPTS], progress=False)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, progress=False)] == before


def test_what_cannot_be_embedded_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.embed([[]], progress=False)
    with pytest.raises(OctavoError, match=r"vocabulary|token ids"):
        llm.embed([[5], [10**6]], progress=False)
    assert llm.embed([], progress=False) == []


def test_S24_prompt_scores_alone_are_transformers(llm: LLM, theirs: Any) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, progress=False), strict=True):
        (choice,) = output.outputs
        assert (choice.token_ids, choice.finish_reason) == ([], "length")
        with torch.no_grad():
            rows = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0], dim=-1)
        scores = output.prompt_logprobs or [None]
        assert scores[0] is None and len(scores) == len(prompt)
        for position, entry in list(enumerate(scores))[1:]:
            assert entry is not None and entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(rows[position - 1, prompt[position]].item(), abs=1e-3)
            assert entry.top_logprobs[0] == pytest.approx(rows[position - 1].max().item(), abs=1e-3)


def test_scores_beside_an_answer_are_those_alone(llm: LLM) -> None:
    alone = llm.generate(PROMPTS[3], SamplingParams(max_tokens=0, prompt_logprobs=1), progress=False)
    beside = llm.generate(PROMPTS[3], SamplingParams(max_tokens=2, prompt_logprobs=1, n=2), progress=False)
    assert alone[0].prompt_logprobs == beside[0].prompt_logprobs
    assert len(beside[0].outputs) == 2


def test_a_vector_crosses_the_wire_and_is_kept_for_its_reader() -> None:
    vector = array("f", [0.6, 0.8]).tobytes()
    sent = Events(1, 0.0, pooled=(("r", vector), ("gone", vector)), decisions=(finished("r", FinishReason.STOP),))
    came = Outputs.of(3, sent).events()
    assert came == sent and not Events(1, 0.0, pooled=sent.pooled).is_empty
    ledger = Begun(3)
    request = Request("r", array("i", [5]), SamplingParams(seed=0), wants=Want.POOL)
    entry = ledger.add(request)
    ledger.accept(2, came)
    assert entry.pooled is None, "of an engine that was given up"
    assert entry.resumed() == request
    ledger.accept(3, came)
    (output,) = entry.take()
    assert output.is_final and output.pooled == vector

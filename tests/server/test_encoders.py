"""Encoders over HTTP, on a real engine in this process: vectors, scores, labels, prompts, limits and refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch.nn import functional

from octavo.assembly import build_local
from octavo.config.sources import config_from_keywords
from octavo.server.app import create_app
from tests.models.encoders import make_tiny_encoder, write_sentence_transformer

pytest.importorskip("transformers")
PROMPTS = {"query": "good ", "document": "old "}


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = config_from_keywords(str(folder), {"threads": 1, "served_model_name": ["enc"], **settings})
    engine = await asyncio.to_thread(build_local, config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            yield client
    finally:
        await engine.client.close()


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    response = await client.post(path, json={"model": "enc", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, path: str, **fields: Any) -> tuple[int, str | None, str]:
    response = await client.post(path, json={"model": "enc", **fields})
    error = response.json()["error"]
    error = {"param": None, "message": error} if isinstance(error, str) else error
    return response.status_code, error["param"], error["message"]


def encode(folder: Path, *texts: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedder")
    model = make_tiny_encoder("bert", folder)
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    more = {"config_sentence_transformers": prompts, "sentence_bert_config": {"max_seq_length": 48}}
    write_sentence_transformer(folder, {"pooling_mode_cls_token": True}, **more)
    return folder, model


def vector(folder: Path, model: Any, text: str) -> torch.Tensor:
    with torch.no_grad():
        return functional.normalize(model(**encode(folder, text)).last_hidden_state[0, 0], dim=0)


async def test_vectors_are_those_of_transformers_for_the_openai_client_too(embedder: tuple[Path, Any]) -> None:
    folder, model = embedder
    texts = ["the cat sat on a mat.", "Hello World", "rain falls from dark clouds " * 8]
    async with served(folder) as client:
        openai_client = openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=client)
        found = await openai_client.embeddings.create(model="enc", input=texts)  # in base64, its default
        for text, entry in zip(texts, found.data, strict=True):
            assert torch.allclose(torch.tensor(entry.embedding), vector(folder, model, text), atol=1e-5)
        assert found.usage.prompt_tokens == sum(encode(folder, text).input_ids.shape[1] for text in texts)
        cut = await openai_client.embeddings.create(model="enc", input="Hello World", dimensions=8)
        expected = functional.normalize(vector(folder, model, "Hello World")[:8], dim=0)
        assert torch.allclose(torch.tensor(cut.data[0].embedding), expected, atol=1e-5)
        ids = encode(folder, "Hello World").input_ids[0].tolist()
        by_ids = await openai_client.embeddings.create(model="enc", input=ids, encoding_format="float")
        assert by_ids.data[0].embedding == found.data[1].embedding
        ollama = await post(client, "/api/embed", input=texts)
        assert ollama["embeddings"] == [entry.embedding for entry in found.data]


async def test_long_texts_are_refused_with_the_lengths_or_cut_as_transformers_cuts(embedder: tuple[Path, Any]) -> None:
    folder, model = embedder
    text = "the cat sat on " * 30
    async with served(folder) as client:
        status, param, message = await refusal(client, "/v1/embeddings", input=["hi", text])
        assert (status, param) == (400, "input[1]") and "48" in message and "122" in message
        status, _, message = await refusal(client, "/v1/embeddings", input="cat " * 30_000)
        assert status == 400 and "48" in message
        for keep, length in ((-1, 48), (9, 9)):
            found = await post(client, "/v1/embeddings", input=text, truncate_prompt_tokens=keep)
            from transformers import AutoTokenizer

            made = AutoTokenizer.from_pretrained(folder)
            ids = made(text, truncation=True, max_length=length, return_tensors="pt")
            with torch.no_grad():
                expected = functional.normalize(model(**ids).last_hidden_state[0, 0], dim=0)
            assert torch.allclose(torch.tensor(found["data"][0]["embedding"]), expected, atol=1e-5)
            assert found["usage"]["prompt_tokens"] == length
        ids = list(range(5, 65))  # of a list of ids the start is kept too
        kept, start = [
            await post(client, "/v1/embeddings", input=given, truncate_prompt_tokens=9) for given in (ids, ids[:9])
        ]
        assert kept["data"] == start["data"]
        bare = await post(client, "/v1/embeddings", input="the cat", add_special_tokens=False)
        inner = encode(folder, "the cat").input_ids[0].tolist()[1:-1]
        assert bare["data"] == (await post(client, "/v1/embeddings", input=inner))["data"]
        spaces = await post(client, "/v1/embeddings", input=" " * 50_000 + "cat")  # many characters, three tokens
        assert spaces["usage"]["prompt_tokens"] == 3


async def test_prompts_precede_texts_by_name_and_for_documents(embedder: tuple[Path, Any]) -> None:
    folder, model = embedder
    async with served(folder) as client:
        found = await post(client, "/v1/embeddings", input="the cat", prompt_name="query")
        expected = vector(folder, model, "good the cat")
        assert torch.allclose(torch.tensor(found["data"][0]["embedding"]), expected, atol=1e-5)
        status, param, message = await refusal(client, "/v1/embeddings", input="x", prompt_name="passage")
        assert (status, param) == (400, "prompt_name") and "query, document" in message
        documents = ["oak tree", "seven sheep slept", "the cat"]
        ranked = await post(client, "/v1/rerank", query="cat", documents=documents, top_n=2)
        vectors = torch.stack([vector(folder, model, f"old {text}") for text in documents])
        scores = vectors @ vector(folder, model, "good cat")
        best = scores.argsort(descending=True)[:2].tolist()
        assert [result["index"] for result in ranked["results"]] == best
        got = [result["relevance_score"] for result in ranked["results"]]
        assert got == pytest.approx(scores[best].tolist(), abs=1e-5)
        pair = await post(client, "/score", text_1="the cat", text_2=["oak tree", "the cat"])
        plain = float(vector(folder, model, "the cat") @ vector(folder, model, "oak tree"))
        assert [entry["score"] for entry in pair["data"]] == pytest.approx([plain, 1.0], abs=1e-5)


async def test_an_encoder_generates_and_classifies_nothing(embedder: tuple[Path, Any]) -> None:
    async with served(embedder[0]) as client:
        messages = [{"role": "user", "content": "hi"}]
        for path, fields in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/api/generate", {"prompt": "hi"}),
            ("/api/chat", {"messages": messages}),
        ):
            status, _, message = await refusal(client, path, **fields)
            assert status == 400 and "encoder, which generates no text" in message, (path, message)
        status, _, message = await refusal(client, "/classify", input="hi")
        assert status == 400 and "/v1/embeddings" in message
        cards = (await client.get("/v1/models")).json()["data"]
        assert cards[0]["purpose"].startswith("embeds texts") and cards[0]["max_model_len"] == 48
        shown = (await client.post("/api/show", json={"model": "enc"})).json()
        assert shown["capabilities"] == ["embedding"]


async def test_many_at_once_have_the_vectors_that_they_have_alone(embedder: tuple[Path, Any]) -> None:
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "while",
        "another",
        "hat",
        "was",
        "there",
        "seven",
        "sheep",
        "slept",
    ]
    texts = [" ".join(words[: 1 + index % 14]) for index in range(60)]
    async with served(embedder[0], max_num_seqs=8, max_num_batched_tokens=64) as client:
        alone = {
            text: (await post(client, "/v1/embeddings", input=text))["data"][0]["embedding"] for text in set(texts)
        }
        requests = [post(client, "/v1/embeddings", input=texts[first::4]) for first in range(4)]
        for first, found in enumerate(await asyncio.gather(*requests)):
            assert [entry["embedding"] for entry in found["data"]] == [alone[text] for text in texts[first::4]]
        metrics = (await client.get("/metrics")).text
        assert 'octavo_prompt_tokens_total{model_name="enc"}' in metrics
        assert 'vllm:num_requests_running{engine="0",model_name="enc"} 0.0' in metrics


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
async def test_a_cross_encoder_reads_both_texts(activation: str | None, tmp_path: Path) -> None:
    own = {} if activation is None else {"sbert_ce_default_activation_function": activation}
    model = make_tiny_encoder("bert", tmp_path, num_labels=1, **own)
    documents = ["the cat sat on a mat", "rain", "bread is baked"]
    with torch.no_grad():
        logits = [model(**encode(tmp_path, "another cat", text)).logits[0, 0] for text in documents]
    expected = [float(logit if activation else logit.sigmoid()) for logit in logits]
    async with served(tmp_path) as client:
        for path in ("/score", "/v1/score"):
            body = await post(client, path, text_1="another cat", text_2=documents)
            assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=1e-4)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = await post(client, path, query="another cat", documents=documents)
            order = sorted(range(3), key=lambda index: -expected[index])
            assert [result["index"] for result in body["results"]] == order
            got = [result["relevance_score"] for result in body["results"]]
            assert got == pytest.approx([expected[index] for index in order], abs=1e-4)
            assert ("document" in body["results"][0]) == (path != "/v2/rerank")
        body = await post(client, "/rerank", query="cat " * 60, documents=["mat " * 60], truncate_prompt_tokens=-1)
        assert body["usage"]["prompt_tokens"] == 96
        status, param, message = await refusal(client, "/rerank", query="a", documents=["b", "mat " * 99])
        assert (status, param) == (400, "documents[1]") and "96" in message and "103" in message
        status, _, message = await refusal(client, "/v1/embeddings", input="hi")
        assert status == 400 and "gives no vectors" in message and "/rerank" in message


async def test_a_classifier_gives_the_probability_of_each_label(tmp_path: Path) -> None:
    labels = {0: "calm", 1: "glad", 2: "sad"}
    model = make_tiny_encoder("distilbert", tmp_path, num_labels=3, id2label=labels)
    texts = ["good morning world", "rain"]
    async with served(tmp_path) as client:
        body = await post(client, "/classify", input=texts)
        for text, entry in zip(texts, body["data"], strict=True):
            ids = encode(tmp_path, text).input_ids
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0].softmax(-1)
            assert entry["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
            assert entry["label"] == labels[int(expected.argmax())] and entry["num_classes"] == 3
            assert math.fsum(entry["probs"]) == pytest.approx(1.0)
        for path, fields in (
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            status, _, message = await refusal(client, path, **fields)
            assert status == 400 and "/classify" in message

"""POST /v1/embeddings, score and rerank over a played engine: shapes, bounds, what is given back."""

import asyncio
import base64
import math
from array import array
from typing import Any

import httpx
import pytest
from openai.types import EmbeddingCreateParams

from octavo.config import Config
from octavo.core.request import FinishReason, Want
from octavo.server.api.embeddings import (
    IGNORED_HERE,
    MAX_INPUTS,
    REFUSED_EMBEDDING,
    REFUSED_RERANK,
    REFUSED_SCORE,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from tests.server.fakes import Harness, Wire, assert_ignored, keyed, vector_of


async def embed(harness: Harness, **fields: Any) -> httpx.Response:
    return await harness.request("POST", "/v1/embeddings", json={"model": "tiny", "input": "hi", **fields})


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


async def test_I02_each_input_shape_gives_vectors_in_order() -> None:
    harness = Harness()
    ids = harness.text.tokenizer.encode("hi")
    for given, count in (("hi", 1), (ids, 1), (["hi", "ho"], 2), ([ids, ids, [5, 6]], 3)):
        body = (await embed(harness, input=given)).json()
        assert [entry["index"] for entry in body["data"]] == list(range(count))
        assert {entry["object"] for entry in body["data"]} == {"embedding"}
        assert body["object"] == "list" and body["model"] == "tiny"
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 2 * count
        assert body["data"][0]["embedding"] == vector_of(ids).tolist()
    assert all(request.wants == Want.POOL for request in harness.engine.requests)


async def test_base64_is_the_same_vector() -> None:
    data = (await embed(Harness(), encoding_format="base64")).json()["data"][0]["embedding"]
    floats = (await embed(Harness())).json()["data"][0]["embedding"]
    assert array("f", base64.b64decode(data)).tolist() == floats
    assert math.hypot(*floats) == pytest.approx(1.0, abs=1e-6)


async def test_dimensions_are_the_first_ones_scaled_again() -> None:
    text = "some letters of all kinds"
    whole = (await embed(Harness(), input=text)).json()["data"][0]["embedding"]
    part = (await embed(Harness(), input=text, dimensions=3)).json()["data"][0]["embedding"]
    length = math.hypot(*whole[:3])
    assert part == pytest.approx([value / length for value in whole[:3]], abs=1e-6)
    assert refusal(await embed(Harness(), dimensions=9))[:2] == (400, "dimensions")


async def test_user_mistakes_name_their_field() -> None:
    harness = Harness()
    cases = (
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": [[1.5]]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [300_000]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"normalize": False}, "normalize"),
    )
    for fields, param in cases:
        response = await embed(harness, **fields)
        assert refusal(response)[:2] == (400, param), (fields, response.text)
    assert refusal(await embed(harness, model="other"))[0] == 404
    assert harness.context.queue.num_pending == 0 and len(harness.context.request_index) == 0


async def test_a_text_is_cut_where_that_is_asked_for() -> None:
    harness = Harness()
    for keep, text, seen in ((3, "abcdef", "def"), (-1, "x" * 4000 + "y" * 4096, "y" * 4096), (9, "abc", "abc")):
        assert (await embed(harness, input=text, truncate_prompt_tokens=keep)).status_code == 200
        assert harness.prompt == seen


async def test_null_and_ignored_fields_ask_for_nothing() -> None:
    nulls = {name: None for name in ("dimensions", "encoding_format", "user", "priority", "normalize")}
    assert (await embed(Harness(), **nulls)).status_code == 200
    assert (await embed(Harness(), user="me", normalize=True)).status_code == 200


async def test_how_it_is_served_reaches_the_engine() -> None:
    harness = Harness(config=keyed("k1", "k2"), headers={"authorization": "Bearer k1"})
    fields = {"priority": 3, "timeout": 5.0, "queue_timeout": 2.0, "cache_salt": "s", "ttft_objective": 1.5}
    assert (await embed(harness, **fields)).status_code == 200
    request = harness.engine.requests[-1]
    assert (request.priority, request.queue_timeout, request.ttft_objective) == (3, 2.0, 1.5)
    assert request.deadline is not None and request.deadline - request.arrival == pytest.approx(5.0)
    assert request.tenant and request.cache_salt not in (b"", b"s")
    assert_ignored(await embed(harness, input="x", headers={}), "headers")


async def test_an_embedding_draws_nothing_so_seeds_of_others_stay() -> None:
    seeds = []
    for count in (0, 3):
        harness = Harness()
        for _ in range(count):
            await embed(harness)
        await harness.complete()
        seeds.append(harness.engine.requests[-1].params.seed)
    assert seeds[0] == seeds[1]


async def test_a_failure_cancels_the_others_and_gives_all_back() -> None:
    harness = Harness()
    response = await embed(harness, input=[[5], [300_000]])
    assert response.status_code == 400
    assert [reason for _, reason in harness.engine.cancelled] == [FinishReason.CANCELLED]
    harness.engine.submit_error = RuntimeError("boom")
    assert (await embed(harness)).status_code == 500
    assert harness.context.queue.num_pending == 0 and len(harness.context.request_index) == 0


async def test_a_client_that_leaves_cancels_its_request() -> None:
    harness = Harness()
    harness.engine.is_held = True
    wire = Wire(harness.app, "/v1/embeddings", {"input": ["a", "b"]})
    task = wire.start()
    await wire.until(lambda: len(harness.engine.requests) == 2)
    wire.leave()
    async with asyncio.timeout(60):
        await task
    assert len(harness.engine.cancelled) == 2 and harness.context.queue.num_pending == 0


async def test_a_full_queue_refuses_vectors_like_answers() -> None:
    harness = Harness(config=Config())
    harness.context.lifecycle.refuse()
    response = await embed(harness)
    assert response.status_code == 503 and response.headers["retry-after"]


async def test_metrics_count_vectors() -> None:
    harness = Harness()
    await embed(harness, input=["hi", "hello"])
    text = (await harness.get("/metrics")).text
    assert 'octavo_prompt_tokens_total{model_name="tiny"} 7.0' in text
    assert 'octavo_time_to_first_token_seconds_count{model_name="tiny"} 0.0' in text


async def score(harness: Harness, path: str = "/v1/score", **fields: Any) -> httpx.Response:
    return await harness.request("POST", path, json={"model": "tiny", **fields})


def cosine(one: str, other: str) -> float:
    first, second = (vector_of(Harness().text.tokenizer.encode(text)) for text in (one, other))
    return sum(a * b for a, b in zip(first, second, strict=True))


async def test_scores_are_cosines_of_one_with_many_or_of_pairs() -> None:
    harness = Harness()
    many = (await score(harness, text_1="ab", text_2=["ab", "xyz", "b"])).json()
    assert [entry["score"] for entry in many["data"]] == pytest.approx(
        [1.0, cosine("ab", "xyz"), cosine("ab", "b")], abs=1e-6
    )
    assert {entry["object"] for entry in many["data"]} == {"score"} and many["usage"]["total_tokens"] == 8
    pairs = (await score(harness, "/score", text_1=["ab", "c"], text_2=["xyz", "c"])).json()
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([cosine("ab", "xyz"), 1.0], abs=1e-6)
    assert refusal(await score(harness, text_1=["a", "b"], text_2="c"))[:2] == (400, "text_1")
    assert refusal(await score(harness, text_1="a", text_2=["b", ""]))[:2] == (400, "text_2[1]")
    assert refusal(await score(harness, text_1="a", text_2=["b"] * MAX_INPUTS))[:2] == (400, "text_2")


async def test_rerank_orders_documents() -> None:
    harness = Harness()
    documents = ["xyz", {"text": "ab"}, "b"]
    ranked = (await score(harness, "/v1/rerank", query="ab", documents=documents)).json()
    assert [result["index"] for result in ranked["results"]] == sorted(
        range(3), key=lambda index: -cosine("ab", ("xyz", "ab", "b")[index])
    )
    assert ranked["results"][0] == {
        "index": 1,
        "relevance_score": pytest.approx(1.0, abs=1e-6),
        "document": {"text": "ab"},
    }
    best = (await score(harness, "/rerank", query="ab", documents=documents, top_n=1, return_documents=False)).json()
    assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}]
    cohere = (await score(harness, "/v2/rerank", query="ab", documents=["ab", "c"], top_n=0)).json()
    assert len(cohere["results"]) == 2 and "document" not in cohere["results"][0]
    assert refusal(await score(harness, "/rerank", query="", documents=["a"]))[:2] == (400, "query")
    assert refusal(await score(harness, "/rerank", query="a", documents=["a", ""]))[:2] == (400, "documents[1]")
    assert refusal(await score(harness, "/rerank", query="a", documents=[{"title": "a"}]))[:2] == (400, "documents[0]")
    assert (await score(harness, "/rerank", query="a", documents=["abc"], max_tokens_per_doc=2)).status_code == 200
    assert harness.prompt == "ab"


async def test_large_answers_leave_the_event_loop() -> None:
    harness = Harness()
    body = (await embed(harness, input=["hi"] * 600, encoding_format="base64")).json()
    assert len(body["data"]) == 600


OF_OTHERS = {  # besides OpenAI's: what vLLM's, Cohere's and Jina's documents list
    "embed": "truncate_prompt_tokens add_special_tokens priority cache_salt embed_dtype endianness normalize messages",
    "score": "model text_1 text_2 truncate_prompt_tokens priority use_activation activation user",
    "rerank": """model query documents top_n return_documents max_tokens_per_doc max_chunks_per_doc rank_fields priority
        truncate_prompt_tokens return_embeddings""",
}


@pytest.mark.parametrize(
    ("body", "refused", "known"),
    [
        (EmbeddingBody, REFUSED_EMBEDDING, {*EmbeddingCreateParams.__annotations__, *OF_OTHERS["embed"].split()}),
        (ScoreBody, REFUSED_SCORE, {*OF_OTHERS["score"].split()}),
        (RerankBody, REFUSED_RERANK, {*OF_OTHERS["rerank"].split()}),
    ],
)
def test_every_field_is_honoured_refused_or_ignored(body: Any, refused: Any, known: set[str]) -> None:
    for name in {*known, *body.model_fields, *refused}:
        kinds = [name in body.model_fields, name in refused, name in IGNORED_HERE]
        assert sum(kinds) == 1, f"{name} must be in exactly one of the body, the refused and the ignored fields"


async def test_refused_fields_are_named_and_their_neutral_values_taken() -> None:
    harness = Harness()
    bodies = {
        "/v1/embeddings": ({"input": "hi"}, REFUSED_EMBEDDING),
        "/score": ({"text_1": "a", "text_2": "b"}, REFUSED_SCORE),
        "/rerank": ({"query": "a", "documents": ["b"]}, REFUSED_RERANK),
    }
    for path, (fields, refused) in bodies.items():
        for name, neutrals in refused.items():
            response = await harness.request("POST", path, json={**fields, name: "not neutral"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert response.json()["error"]["code"] == "unsupported_field"
            for neutral in (*neutrals, None):
                assert (await harness.request("POST", path, json={**fields, name: neutral})).status_code == 200


async def test_the_description_lists_the_fields() -> None:
    paths = (await Harness().get("/openapi.json")).json()["paths"]
    for path, body in (("/v1/embeddings", EmbeddingBody), ("/v1/score", ScoreBody), ("/v2/rerank", RerankBody)):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == set(body.model_fields)
        assert "`user` (" in paths[path]["post"]["description"]

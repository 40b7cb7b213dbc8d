"""One model under several names: each is listed, each answers under itself, and others are 404."""

from __future__ import annotations

import ollama
import pytest

from octavo.config import Config, ModelConfig
from tests.server.fakes import TEMPLATE, Harness, events

NAMES = ("gpt-4o", "local/tiny", "gpt-4o", "tiny")
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def harness() -> Harness:
    return Harness(config=Config(model=ModelConfig(served_model_name=NAMES)))


async def test_props_are_llama_cpps(harness: Harness) -> None:
    answer = await harness.get("/props")
    props = answer.json()
    settings = props["default_generation_settings"]
    card = (await harness.get("/v1/models")).json()["data"][0]
    assert settings["n_ctx"] == card["max_model_len"] and props["model_alias"] == "gpt-4o"
    assert settings["params"]["temperature"] == 1.0 and settings["params"]["repeat_penalty"] == 1.0
    assert settings["params"]["mirostat"] == 0 and settings["params"]["max_tokens"] is None
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["chat_template"] == TEMPLATE and props["total_slots"] >= 0
    assert (await harness.get("/props?model=tiny")).json()["model_path"] == props["model_path"]
    assert (await harness.get("/props?model=unknown")).status_code == 404


async def test_every_interface_lists_all_names_once(harness: Harness) -> None:
    listed = (await harness.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["gpt-4o", "local/tiny", "tiny"]
    assert (await harness.get("/v1/models/local/tiny")).json() == listed[1]
    in_anthropics = (await harness.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert [card["id"] for card in in_anthropics["data"]] == ["gpt-4o", "local/tiny", "tiny"]
    assert (in_anthropics["first_id"], in_anthropics["last_id"]) == ("gpt-4o", "tiny")
    for path in ("/api/tags", "/api/ps"):
        found = ollama.ListResponse.model_validate((await harness.get(path)).json())
        assert [model.model for model in found.models] == ["gpt-4o", "local/tiny", "tiny"]
        assert len({model.digest for model in found.models}) == 1, "it is one model"
    shown = await harness.request("POST", "/api/show", json={"model": "local/tiny:latest"})
    assert shown.json()["model_info"]["general.basename"] == "local/tiny"


@pytest.mark.parametrize("name", ["gpt-4o", "local/tiny", "tiny", None])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 5}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/chat", {"messages": USER, "stream": False}),
        ("/api/generate", {"prompt": "hi", "raw": True, "stream": False}),
        ("/api/generate", {"prompt": ""}),
        ("/api/embed", {"input": "hi"}),
        ("/api/embed", {"input": []}),
    ],
)
async def test_an_answer_has_the_name_that_was_asked_for(
    harness: Harness, path: str, fields: dict[str, object], name: str | None
) -> None:
    asked = fields if name is None else {"model": name, **fields}
    response = await harness.request("POST", path, json=asked)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == (name or "gpt-4o")


async def test_streams_have_the_name_that_was_asked_for(harness: Harness) -> None:
    response = await harness.chat(model="local/tiny", stream=True)
    assert {chunk["model"] for chunk in events(response.text)[:-1]} == {"local/tiny"}


async def test_other_names_are_404_with_those_that_are_served(harness: Harness) -> None:
    response = await harness.chat(model="gpt-4")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["message"].endswith("this server has: gpt-4o, local/tiny, tiny")


async def test_metrics_have_the_first_name(harness: Harness) -> None:
    await harness.chat(model="tiny")
    text = (await harness.get("/metrics")).text
    assert 'model_name="gpt-4o"' in text and 'model_name="tiny"' not in text

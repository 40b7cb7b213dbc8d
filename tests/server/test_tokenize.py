"""POST /tokenize, /detokenize, GET /tokenizer_info, and the models' cards."""

from typing import Any

import httpx
import pytest

from octavo.server.api.tokenize import MAX_DETOKENIZED, MAX_TOKENIZED_CHARACTERS
from tests.server.fakes import MAX_LEN, Harness, assert_ignored, keyed


async def post(harness: Harness, path: str, **fields: Any) -> httpx.Response:
    return await harness.request("POST", path, json=fields)


async def test_I04_a_text_there_and_back() -> None:
    harness = Harness()
    for text in ("hi", "", "é", "x" * 10_000):
        body = (await post(harness, "/tokenize", model="tiny", prompt=text)).json()
        ids = harness.text.tokenizer.encode(text)
        assert body == {"count": len(ids), "max_model_len": MAX_LEN, "tokens": ids, "token_strs": None}
        assert (await post(harness, "/detokenize", model="tiny", tokens=ids)).json() == {"prompt": text}
    assert not harness.engine.requests


async def test_spellings_come_where_asked_for() -> None:
    body = (await post(Harness(), "/tokenize", prompt="a b", return_token_strs=True)).json()
    assert body["token_strs"] == ["a", "\u0120", "b"]


async def test_special_tokens_show_when_detokenized() -> None:
    assert (await post(Harness(), "/detokenize", tokens=[0, *Harness().text.tokenizer.encode("a"), 1])).json() == {
        "prompt": "<s>a</s>"
    }


async def test_a_conversation_has_the_ids_that_the_model_is_shown() -> None:
    harness = Harness()
    messages = [{"role": "user", "content": "hi"}]
    for extra in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"mood": "calm"}}):
        ids = (await post(harness, "/tokenize", model="tiny", messages=messages, **extra)).json()["tokens"]
        assert (await harness.chat(**extra)).status_code == 200
        assert list(harness.engine.requests[-1].prompt_token_ids or ()) == ids


async def test_user_mistakes_name_their_field() -> None:
    harness = Harness()
    chat = [{"role": "user", "content": "hi"}]
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": chat}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": chat, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "x" * (MAX_TOKENIZED_CHARACTERS + 1)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED + 1)}, "tokens"),
    )
    for path, fields, param in cases:
        response = await post(harness, path, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), (fields, response.text)
    assert (await post(harness, "/tokenize", model="other", prompt="a")).status_code == 404
    assert_ignored(await post(harness, "/tokenize", prompt="a", add_generation_prompt=True), "add_generation_prompt")
    assert_ignored(await post(harness, "/tokenize", messages=chat, nonsense=1), "nonsense")
    assert_ignored(await post(harness, "/detokenize", tokens=[5], nonsense=1), "nonsense")


async def test_the_tokenizers_facts() -> None:
    info = (await Harness().get("/tokenizer_info")).json()
    assert info["eos_token"] == "</s>" and info["eos_token_ids"] == [1]
    assert info["model_max_length"] == MAX_LEN and info["tokenizer_class"] == "BPE"
    assert info["added_tokens_decoder"]["0"] == {"content": "<s>", "special": True}
    assert "message" in info["chat_template"] or "m.role" in info["chat_template"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/tokenizer_info"])
async def test_a_key_is_needed(path: str) -> None:
    harness = Harness(config=keyed("k"))
    assert (await harness.request("POST" if path != "/tokenizer_info" else "GET", path)).status_code == 401


async def test_I02_models_are_described_in_full() -> None:
    harness = Harness()
    (card,) = (await harness.get("/v1/models")).json()["data"]
    assert card["id"] == "tiny" and card["object"] == "model" and card["owned_by"] == "octavo"
    assert card["max_model_len"] == MAX_LEN and card["root"] and card["parent"] is None
    assert (await harness.get("/v1/models/tiny")).json() == card
    missing = await harness.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"

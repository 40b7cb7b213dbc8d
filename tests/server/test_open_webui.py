"""Open WebUI's advanced settings over both of its connections, and its embeddings."""

from typing import Any

import pytest

from octavo.config import Config, ServingConfig
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from tests.server.fakes import TEMPLATE, Harness, assert_ignored, make_text

USER = [{"role": "user", "content": "hi"}]
SLIDERS: dict[str, Any] = {
    "num_ctx": 4096,
    "num_keep": 24,
    "num_batch": 512,
    "num_thread": 2,
    "num_gpu": 0,
    "use_mmap": True,
    "use_mlock": False,
    "mirostat": 2,
    "mirostat_eta": 0.2,
    "mirostat_tau": 4.0,
    "tfs_z": 0.9,
    "repeat_last_n": 64,
    "repeat_penalty": 1.2,
    "num_predict": 12,
    "seed": 5,
    "stop": ["x"],
    "top_k": 7,
    "min_p": 0.1,
}
CAN_BE_TOLD = TEMPLATE + "{% if enable_thinking is false %}[no]{% endif %}<think></think>"
CANNOT = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def with_template(template: str, **options: Any) -> Harness:
    plain = make_text()
    return Harness(
        text=TextModel(plain.name, plain.spec, plain.tokenizer, ChatTemplate(template, {}, is_trusted=True)), **options
    )


def check(harness: Harness) -> None:
    params = harness.engine.requests[-1].params
    assert (params.repetition_penalty, params.max_tokens, params.seed) == (1.2, 12, 5)
    assert (params.stop, params.top_k, params.min_p) == (("x",), 7, 0.1)
    assert (params.mirostat, params.mirostat_eta, params.mirostat_tau) == (2, 0.2, 4.0)


@pytest.mark.parametrize("keep_alive", [-1, "5m", 0])
@pytest.mark.parametrize("think", [True, False, "low", None])
async def test_the_connection_to_ollama_takes_every_slider(keep_alive: Any, think: Any) -> None:
    harness = Harness()
    body = {"messages": USER, "options": SLIDERS, "keep_alive": keep_alive, "think": think, "stream": False}
    response = await harness.request("POST", "/api/chat", json=body)
    assert_ignored(response, "options.tfs_z")
    check(harness)


@pytest.mark.parametrize("keep_alive", [-1, "5m"])
@pytest.mark.parametrize("think", [True, False, "low"])
async def test_the_connection_to_openai_takes_every_slider(keep_alive: Any, think: Any) -> None:
    harness = with_template(CANNOT)
    response = await harness.chat(**SLIDERS, keep_alive=keep_alive, think=think)
    assert response.status_code == 200, response.text
    told = set(response.headers["x-octavo-ignored"].split(", "))
    honoured = {"repeat_penalty", "num_predict", "seed", "stop", "top_k", "min_p"}
    honoured |= {"mirostat", "mirostat_eta", "mirostat_tau"}
    assert told == set(SLIDERS) - honoured | {"keep_alive", "think"}
    check(harness)


async def test_options_in_a_chat_completion_act_as_they_do_in_ollamas() -> None:
    harness = Harness()
    response = await harness.chat(options=SLIDERS)
    assert_ignored(response, "options.tfs_z", "options.repeat_last_n")
    check(harness)
    free = await harness.chat(options={"num_predict": -1})
    assert free.status_code == 200 and "x-octavo-ignored" not in free.headers
    await harness.chat()
    assert harness.engine.requests[-2].params.max_tokens == harness.engine.requests[-1].params.max_tokens
    assert (await harness.chat(options=3)).headers["x-octavo-ignored"] == "options"


async def test_openais_own_names_win() -> None:
    harness = Harness()
    for own in ({"max_tokens": 9}, {"max_completion_tokens": 9}):
        response = await harness.chat(**own, num_predict=12, repetition_penalty=1.5, repeat_penalty=1.2, seed=1,
                                      options={"seed": 2})  # fmt: skip
        assert_ignored(response, "options.seed", "num_predict", "repeat_penalty")
        params = harness.engine.requests[-1].params
        assert (params.max_tokens, params.repetition_penalty, params.seed) == (9, 1.5, 1)


async def test_think_is_told_to_a_model_that_can_be_told() -> None:
    harness = with_template(CAN_BE_TOLD)
    for think, is_off in ((False, True), (True, False), ("low", False)):
        response = await harness.chat(think=think)
        assert response.status_code == 200 and "x-octavo-ignored" not in response.headers
        assert ("[no]" in harness.prompt) is is_off
    assert_ignored(await harness.chat(think=False, reasoning_effort="low"), "think")
    assert "[no]" not in harness.prompt
    assert_ignored(await harness.chat(think=["odd"]), "think")


async def test_strict_fields_refuse_what_has_no_meaning_and_take_the_rest() -> None:
    harness = with_template(CANNOT, config=Config(serving=ServingConfig(strict_fields=True)))
    assert (await harness.chat(num_predict=3, repeat_penalty=1.1)).status_code == 200
    for fields in ({"num_ctx": 4096}, {"options": {"num_gqa": 1}}, {"think": True}):
        assert (await harness.chat(**fields)).status_code == 400
    body = {"messages": USER, "options": {"num_gqa": 8}, "stream": False}
    response = await harness.request("POST", "/api/chat", json=body)
    assert response.status_code == 400 and "options.num_gqa" in response.json()["error"]


@pytest.mark.parametrize("text", ["hi", "some text"])
async def test_its_embeddings_name_the_text_twice(text: str) -> None:
    harness = Harness()
    both = await harness.request("POST", "/api/embeddings", json={"model": "tiny", "input": [text], "prompt": text})
    assert_ignored(both, "input")
    alone = await harness.request("POST", "/api/embeddings", json={"prompt": text})
    assert both.json() == alone.json() and both.json()["embedding"]


async def test_fields_outside_of_options_are_ignored_as_ollama_ignores_them() -> None:
    harness = Harness()
    body = {"messages": USER, "stream": False, "options": {"seed": 1}}
    sent = {"tool_choice": "auto", "temperature": 0.3, "top_p": 0.4, "user": "me"}
    response = await harness.request("POST", "/api/chat", json={**body, **sent})
    assert_ignored(response, "tool_choice", "temperature", "top_p", "user")
    assert (await harness.request("POST", "/api/chat", json=body)).status_code == 200
    first, second = harness.engine.requests
    assert first.params == second.params

"""Every field of OpenAI's and of docs' list is honoured, refused by name, or ignored: documented, or told."""

from collections.abc import Callable
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from octavo.core.request import Request
from octavo.server.api.completions.bodies import REFUSED_CHAT, REFUSED_COMPLETION, ChatBody, CompletionBody
from octavo.server.api.fields import HINTS, IGNORED, UNSUPPORTED
from tests.server.fakes import FakeClient, Harness, assert_ignored

SERVING = """
    messages n best_of max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p typical_p
    presence_penalty frequency_penalty repetition_penalty logit_bias logprobs top_logprobs prompt_logprobs echo seed
    stop stop_token_ids include_stop_str_in_output ignore_eos response_format structured_outputs tools tool_choice
    parallel_tool_calls reasoning stream stream_options use_beam_search length_penalty priority cache_salt timeout user
    metadata chat_template_kwargs continue_final_message add_generation_prompt skip_special_tokens model store
    early_stopping dry_multiplier dry_base dry_allowed_length dry_sequence_breakers bad_words allowed_token_ids
    ttft_objective tpot_objective guided_json guided_regex guided_choice guided_grammar
"""
CHAT_FIELDS = """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning chat_template_kwargs
    continue_final_message add_generation_prompt
"""
CHAT_ONLY = set(CHAT_FIELDS.split())
COMPLETION_ONLY = {"best_of", "prompt"}
TAKEN = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
REFUSED = {name: each.harmless for name, each in UNSUPPORTED.items() if name not in TAKEN}
ENDPOINTS: dict[str, tuple[Any, Any, Any, set[str]]] = {
    "chat": (ChatBody, REFUSED_CHAT, chat_params, COMPLETION_ONLY),
    "complete": (CompletionBody, REFUSED_COMPLETION, completion_create_params, CHAT_ONLY),
}
Check = Callable[[Request, Any], bool]


def params(check: Callable[[Any], bool]) -> Check:
    return lambda request, _: check(request.params)


def answer(check: Callable[[Any], bool]) -> Check:
    return lambda _, response: check(response)


def obeys(text: str) -> Check:
    return params(lambda p: text in p.grammar)


def shows(text: str) -> Check:
    return lambda request, _: text in PLAYED.decode(request.prompt_token_ids)


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
LAST_CONTINUED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Well"}]
PLAYED = FakeClient().tokenizer
BAD = ("no", " no")
# Field -> (other fields, its value, proof that it acted).
HONOURED: dict[str, tuple[dict[str, Any], Any, Check]] = {
    "model": ({}, "tiny", answer(lambda r: r.json()["model"] == "tiny")),
    "messages": ({}, [{"role": "user", "content": "z"}], lambda q, _: PLAYED.encode("z")[0] in q.prompt_token_ids),
    "prompt": ({}, "z", lambda q, _: list(q.prompt_token_ids) == PLAYED.encode("z")),
    "max_tokens": ({}, 3, params(lambda p: p.max_tokens == 3)),
    "max_completion_tokens": ({}, 3, params(lambda p: p.max_tokens == 3)),
    "min_tokens": ({}, 3, params(lambda p: p.min_tokens == 3)),
    "temperature": ({}, 0.5, params(lambda p: p.temperature == 0.5)),
    "top_p": ({}, 0.5, params(lambda p: p.top_p == 0.5)),
    "top_k": ({}, 5, params(lambda p: p.top_k == 5)),
    "min_p": ({}, 0.5, params(lambda p: p.min_p == 0.5)),
    "typical_p": ({}, 0.5, params(lambda p: p.typical_p == 0.5)),
    "top_n_sigma": ({}, 1.5, params(lambda p: p.top_n_sigma == 1.5)),
    "nsigma": ({}, 1.5, params(lambda p: p.top_n_sigma == 1.5)),
    "xtc_probability": ({}, 0.5, params(lambda p: p.xtc_probability == 0.5)),
    "xtc_threshold": ({}, 0.2, params(lambda p: p.xtc_threshold == 0.2)),
    "mirostat": ({}, 2, params(lambda p: p.mirostat == 2)),
    "mirostat_mode": ({}, 2, params(lambda p: p.mirostat == 2)),
    "mirostat_tau": ({}, 3.5, params(lambda p: p.mirostat_tau == 3.5)),
    "mirostat_eta": ({}, 0.5, params(lambda p: p.mirostat_eta == 0.5)),
    "no_repeat_ngram_size": ({}, 3, params(lambda p: p.no_repeat_ngram_size == 3)),
    "dry_multiplier": ({}, 0.8, params(lambda p: p.dry_multiplier == 0.8)),
    "dry_base": ({}, 2.5, params(lambda p: p.dry_base == 2.5)),
    "dry_allowed_length": ({}, 3, params(lambda p: p.dry_allowed_length == 3)),
    "dry_range": ({}, 64, params(lambda p: p.dry_range == 64)),
    "dry_sequence_breakers": ({}, ["ab"], params(lambda p: p.dry_breaker_ids == (PLAYED.encode("b")[0],))),
    "bad_words": ({}, ["no"], params(lambda p: p.bad_words_ids == tuple(tuple(PLAYED.encode(w)) for w in BAD))),
    "allowed_token_ids": ({}, [5, 6], params(lambda p: p.allowed_token_ids == (5, 6))),
    "n": ({}, 3, lambda q, r: q.params.n == 3 and len(r.json()["choices"]) == 3),
    "best_of": ({}, 3, params(lambda p: (p.n, p.best_of) == (1, 3))),
    "use_beam_search": ({"n": 2}, True, params(lambda p: (p.n, p.beam_width) == (2, 2))),
    "length_penalty": ({"use_beam_search": True}, 0.5, params(lambda p: p.length_penalty == 0.5)),
    "early_stopping": ({"use_beam_search": True}, "never", params(lambda p: p.early_stopping == "never")),
    "ttft_objective": ({}, 0.5, lambda q, _: q.ttft_objective == 0.5),
    "tpot_objective": ({}, 0.05, lambda q, _: q.tpot_objective == 0.05),
    "presence_penalty": ({}, 0.5, params(lambda p: p.presence_penalty == 0.5)),
    "frequency_penalty": ({}, 0.5, params(lambda p: p.frequency_penalty == 0.5)),
    "repetition_penalty": ({}, 1.5, params(lambda p: p.repetition_penalty == 1.5)),
    "logit_bias": ({}, {"5": -3, "6": 1.5}, params(lambda p: p.logit_bias == ((5, -3.0), (6, 1.5)))),
    "logprobs": ({}, None, lambda q, r: q.params.logprobs is not None and r.json()["choices"][0]["logprobs"]),
    "top_logprobs": ({"logprobs": True}, 4, params(lambda p: p.logprobs == 4)),
    "seed": ({}, 11, params(lambda p: p.seed == 11)),
    "stop": ({}, "lo", params(lambda p: p.stop == ("lo",))),
    "stop_token_ids": ({}, [7], params(lambda p: p.stop_token_ids == (7,))),
    "include_stop_str_in_output": ({"stop": "lo"}, True, answer(lambda r: "Hello" in r.text)),
    "ignore_eos": ({}, True, params(lambda p: p.ignore_eos)),
    "prompt_logprobs": ({}, 2, answer(lambda r: "prompt_logprobs" in r.text and '"rank":1' in r.text)),
    "n_predict": ({}, 3, params(lambda p: p.max_tokens == 3)),
    "truncate_prompt_tokens": ({}, 2, lambda q, _: q.num_prompt_tokens == 2),
    "return_token_ids": (
        {},
        True,
        answer(lambda r: r.json()["choices"][0]["token_ids"] and "prompt_token_ids" in r.text),
    ),
    "return_tokens_as_token_ids": ({"logprobs": True}, True, answer(lambda r: '"token_id:' in r.text)),
    "thinking": ({}, {"type": "disabled"}, shows("[none]")),
    "skip_special_tokens": ({"ignore_eos": True}, False, answer(lambda r: "</s>" in r.text)),
    "stream": ({}, True, answer(lambda r: r.text.endswith("data: [DONE]\n\n"))),
    "stream_options": ({"stream": True}, {"include_usage": True}, answer(lambda r: '"choices":[],"usage"' in r.text)),
    "priority": ({}, -4, lambda q, _: q.priority == -4),
    "cache_salt": ({}, "salt", lambda q, _: q.cache_salt == b"salt"),
    "queue_timeout": ({}, 2.5, lambda q, _: q.queue_timeout == 2.5),
    "timeout": ({}, 2.5, lambda q, _: abs(q.deadline - q.arrival - 2.5) < 1e-6),
    "chat_template_kwargs": ({}, {"mood": "calm"}, lambda q, _: PLAYED.encode("[calm]")[0] in q.prompt_token_ids),
    "add_generation_prompt": ({}, False, lambda q, _: len(q.prompt_token_ids) == len("user:hi\n")),
    "continue_final_message": (
        {"messages": LAST_CONTINUED},
        True,
        lambda q, _: list(q.prompt_token_ids[-4:]) == PLAYED.encode("Well"),
    ),
    "tools": ({}, TOOLS, shows("get_weather")),
    "tool_choice": ({"tools": TOOLS}, "required", obeys("get_weather")),
    "parallel_tool_calls": ({"tools": TOOLS, "tool_choice": "required"}, True, obeys("call){0,15}")),
    "reasoning_effort": ({}, "low", shows("[low]")),
    "reasoning": ({}, {"effort": "low"}, shows("[low]")),
    "response_format": ({}, {"type": "json_object"}, obeys('"type": "object"')),
    "structured_outputs": ({}, {"regex": "ab+"}, obeys("/ab+/")),
    "guided_json": ({}, {"type": "integer"}, obeys('"type": "integer"')),
    "guided_regex": ({}, "ab+", obeys("/ab+/")),
    "guided_choice": ({}, ["yes", "no"], obeys(r"\"yes\" | \"no\"")),
    "guided_grammar": ({}, 'start: "ab"', obeys(r"start: \"ab\"")),
    "guided_whitespace_pattern": ({"guided_json": {}}, "[ ]?", obeys('"whitespace_pattern": "[ ]?"')),
    "echo": ({}, True, answer(lambda r: r.json()["choices"][0]["text"].startswith("hi"))),
}
ELSEWHERE = {"add_special_tokens": "test_vllm_fields.py", "documents": "test_vllm_fields.py"}
UNLIKE_ANY_NEUTRAL = {"echo": True}
IGNORED_VALUES = {"metadata": {"a": "b"}, "store": True}


def known_fields(endpoint: str) -> set[str]:
    body, refused, module, not_here = ENDPOINTS[endpoint]
    openai = set(module.CompletionCreateParamsBase.__annotations__)
    ours = set(SERVING.split()) | set(body.model_fields) | set(refused) | set(REFUSED) | set(HINTS) | set(IGNORED)
    return (openai | ours) - not_here


CASES = [(endpoint, field) for endpoint in ENDPOINTS for field in sorted(known_fields(endpoint))]


@pytest.mark.parametrize(("endpoint", "field"), CASES)
async def test_each_field_is_honoured_refused_or_ignored(endpoint: str, field: str) -> None:
    body, own, _, _ = ENDPOINTS[endpoint]
    refused = own | REFUSED
    kinds = [field in body.model_fields, field in refused, field in IGNORED]
    assert sum(kinds) <= 1, f"{field} must be in one of the body, the refused and the ignored fields"
    harness = Harness()
    post = getattr(harness, endpoint)
    if not any(kinds):
        assert_ignored(await post(**{field: 3}), field)
        for harmless in (*HINTS.get(field, ()), None):
            assert "x-octavo-ignored" not in (await post(**{field: harmless})).headers
        return
    if field in refused:
        response = await post(**{field: UNLIKE_ANY_NEUTRAL.get(field, "not neutral")})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert response.json()["error"]["code"] == "unsupported_field"
        for harmless in (*refused[field], None):
            assert (await post(**{field: harmless})).status_code == 200
    elif field in IGNORED:
        assert (await post(seed=1)).status_code == 200
        assert (await post(seed=1, **{field: IGNORED_VALUES.get(field, "x")})).status_code == 200
        first, second = harness.engine.requests
        assert (first.params, first.prompt_token_ids) == (second.params, second.prompt_token_ids)
    elif field not in ELSEWHERE:
        others, value, proof = HONOURED[field]
        if endpoint == "complete" and others == {"logprobs": True}:
            others = {"logprobs": 1}
        if field == "logprobs":
            value = True if endpoint == "chat" else 2
        response = await post(**{**others, field: value})
        assert response.status_code == 200, response.text
        assert proof(harness.engine.requests[-1], response)
    await harness.context.sandbox.close()


def test_ignored_fields_say_why() -> None:
    assert all(len(reason) > 10 for reason in IGNORED.values())


async def test_a_field_left_out_and_one_that_is_null_are_the_same() -> None:
    harness = Harness()
    nulls = {field: None for field in ChatBody.model_fields if field != "messages"}
    assert (await harness.chat()).status_code == 200
    assert (await harness.chat(**nulls)).status_code == 200
    first, second = (request.params for request in harness.engine.requests)
    assert first.max_tokens == second.max_tokens and first.temperature == second.temperature


async def test_the_api_description_lists_the_fields() -> None:
    paths = (await Harness().get("/openapi.json")).json()["paths"]
    for path, body in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        assert all(f"`{field}` (" in paths[path]["post"]["description"] for field in IGNORED)
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == set(body.model_fields)


async def test_the_session_of_a_request_is_a_header_or_the_key_of_its_prompt_cache() -> None:
    harness, found = Harness(), []
    await harness.chat()
    found.append(harness.engine.requests[-1].session)
    await harness.chat(headers={"x-session-id": "talk" + "!" * 300})
    found.append(harness.engine.requests[-1].session)
    for headers in ({}, {"x-session-id": "other"}):
        body = {"input": "hi", "prompt_cache_key": "talk"}
        assert (await harness.request("POST", "/v1/responses", json=body, headers=headers)).status_code == 200
        found.append(harness.engine.requests[-1].session)
    assert found == ["", "talk" + "!" * 252, "talk", "other"]

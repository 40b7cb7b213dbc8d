"""Every refusal has OpenAI's form, the right status, and names the field."""

import asyncio
from typing import Any

import pytest

from octavo.config import AdmissionConfig, Config, SchedulingConfig
from octavo.core.request import FinishError, FinishReason
from octavo.errors import EngineDeadError, ErrorKind, QueueFullError, StepFailedError
from octavo.server.admission import AdmissionRequest
from octavo.server.http.limits import HttpLimits
from tests.server.fakes import MAX_LEN, Harness, events

USER = [{"role": "user", "content": "hi"}]
HUGE = 10**6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": HUGE}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": HUGE}, "n"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": -1, "use_beam_search": True}, "n"),
        ({"n": HUGE, "use_beam_search": True}, "n"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "soon", "use_beam_search": True}, "early_stopping"),
        ({"length_penalty": 101, "use_beam_search": True}, "length_penalty"),
        ({"typical_p": 0}, "typical_p"),
        ({"mirostat": 1}, "mirostat"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"nsigma": 101}, "nsigma"),
        ({"xtc_probability": 2}, "xtc_probability"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"ttft_objective": 0}, "ttft_objective"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {str(HUGE): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"timeout": 0}, "timeout"),
        ({"queue_timeout": -1}, "queue_timeout"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"messages": []}, "messages"),
        ({"messages": USER * 2049}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": None}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "messages"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    harness = Harness()
    response = await harness.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error" and isinstance(error["code"], str)
    if error["code"] != "invalid_value" or "template" not in param:
        assert any(name in error["message"] for name in (param.split("[")[0].split(".")[0], *fields))
    assert response.headers["x-should-retry"] == "false"
    assert not harness.engine.requests and harness.context.queue.num_pending == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [2] * MAX_LEN}, "prompt"),
        ({"best_of": HUGE}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "n": 3, "use_beam_search": True}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 4, "n": 2, "stream": True}, "best_of"),
        ({"n": HUGE}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ["x"] * 100, "allowed_token_ids": [5] * 700}, "allowed_token_ids"),
        ({"prompt": ["x"] * 200, "logit_bias": {str(i): 1 for i in range(1000)}}, "logit_bias"),
        ({"messages": USER}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    response = await Harness().complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"a": NaN}',
        b'{"messages": [], "temperature": Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        b"[" * 60_000,
        b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1} x',
    ],
    ids=range(16),
)
async def test_broken_json_is_refused(body: bytes) -> None:
    response = await Harness().post(body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.headers["x-should-retry"] == "false"


async def test_an_infinite_number_in_disguise_is_refused() -> None:
    response = await Harness().post(b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")


async def test_depth_within_the_bound_and_paired_surrogates_pass_the_parser() -> None:
    nested = b"[" * 60 + b"]" * 60
    response = await Harness().post(
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "chat_template_kwargs": {"x": ' + nested + b"}}"
    )
    assert response.status_code == 200


async def test_a_prompt_that_is_too_long_is_400_with_the_numbers() -> None:
    response = await Harness().chat(messages=[{"role": "user", "content": "x" * MAX_LEN}])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert f"This model's maximum context length is {MAX_LEN} tokens" in error["message"]


async def test_bodies_over_the_bound_are_413() -> None:
    harness = Harness(limits=HttpLimits(max_body_bytes=1000))
    response = await harness.chat(user="x" * 2000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    async def parts() -> Any:
        for _ in range(10):
            yield b"x" * 200

    response = await harness.request("POST", "/v1/completions", content=parts())
    assert response.status_code == 413, "without content-length too"


async def test_a_body_that_does_not_arrive_is_408() -> None:
    async def parts() -> Any:
        yield b"{"
        await asyncio.sleep(1)

    harness = Harness(limits=HttpLimits(body_timeout_s=0.05))
    response = await harness.request("POST", "/v1/completions", content=parts())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")


async def test_headers_over_the_bound_are_431() -> None:
    harness = Harness()
    assert (await harness.get("/livez", headers={"x": "y" * 20_000})).status_code == 431
    assert (await harness.get("/livez", headers={f"x-{i}": "y" for i in range(120)})).status_code == 431


async def test_unknown_model_route_and_method() -> None:
    harness = Harness()
    response = await harness.chat(model="gpt-9")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in error["message"], "the served name is told"
    response = await harness.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await harness.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_an_id_may_be_given_and_reused_at_any_time() -> None:
    harness = Harness()
    response = await harness.chat(headers={"X-Request-Id": "mine-1"})
    assert response.json()["id"] == response.headers["x-request-id"] == "mine-1"
    harness.engine.is_held = True
    first = asyncio.create_task(harness.chat(headers={"X-Request-Id": "mine-2"}))
    second = asyncio.create_task(harness.chat(headers={"X-Request-Id": "mine-2"}))
    async with asyncio.timeout(60):
        while len(harness.engine.requests) < 3:
            await asyncio.sleep(0.001)
    names = [request.request_id for request in harness.engine.requests[1:]]
    assert len(set(names)) == 2 and all(name.startswith("mine-2~") for name in names)
    assert harness.context.request_index.find("mine-2", "") == names and not harness.context.request_index.find(
        "mine-2", "x"
    )
    for request in harness.engine.requests[1:]:
        harness.engine.answer(request)
    for response in (await first, await second):
        assert response.status_code == 200 and response.json()["id"] == response.headers["x-request-id"] == "mine-2"
    assert len(harness.context.request_index) == 0


async def test_a_refusal_does_not_repeat_a_long_value() -> None:
    for fields in ({"allowed_token_ids": [-1] * 60_000}, {"stop": ["x" * 256] * 17}, {"cache_salt": "x" * 300}):
        response = await Harness().complete(**fields)
        assert response.status_code == 400 and len(response.content) < 600


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logit_bias": {"five": 1}},
            "logit_bias.five is 'five'; give token ids as decimal strings, e.g. {\"50256\": -100}",
        ),
        ({"logit_bias": {"4": 1, "5": 101}}, "logit_bias is 101.0; give token 5 a bias from -100 to 100"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name is 'a b'; give 1 to 128 of the characters A-Z, a-z, 0-9, _ and -",
        ),
    ],
)
async def test_what_to_give_is_said_in_words(fields: dict[str, Any], message: str) -> None:
    assert (await Harness().chat(**fields)).json()["error"]["message"] == message


async def test_a_malformed_id_is_refused() -> None:
    harness = Harness()
    for bad in ("a b", "x" * 129, "é".encode(), ""):
        response = await harness.chat(headers={"X-Request-Id": bad})  # type: ignore[dict-item]
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after", "is_final"),
    [
        (QueueFullError("full"), 429, "queue_full", "1", False),
        (EngineDeadError("boom at 0x7f"), 503, "engine_unavailable", "5", False),
        (StepFailedError("row 3"), 500, "engine_crash_suspect", None, True),
        (ZeroDivisionError("secret"), 500, "internal_error", None, False),
    ],
)
async def test_the_engines_refusals(
    error: Exception, status: int, code: str, retry_after: str | None, is_final: bool
) -> None:
    harness = Harness()
    harness.engine.submit_error = error
    for response in (await harness.chat(), await harness.complete(stream=True)):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers.get("retry-after") == retry_after
        assert response.headers.get("x-should-retry") == ("false" if is_final else None)
        assert "0x7f" not in response.text and "secret" not in response.text
    assert harness.context.queue.num_pending == 0


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ((FinishReason.TIMEOUT, ErrorKind.DEADLINE), 408, "timeout"),
        ((FinishReason.TIMEOUT, ErrorKind.QUEUE_TIMEOUT), 408, "queue_timeout"),
        ((FinishReason.CANCELLED, None), 499, "cancelled"),
        ((FinishReason.CANCELLED, ErrorKind.ENGINE_DEAD), 503, "engine_unavailable"),
        ((FinishReason.ERROR, ErrorKind.TOO_COMPLEX), 400, "too_complex"),
        ((FinishReason.ERROR, ErrorKind.INVALID_REQUEST), 400, "invalid_value"),
        ((FinishReason.ERROR, ErrorKind.STEP_FAILED), 500, "engine_crash_suspect"),
        ((FinishReason.ERROR, ErrorKind.ENGINE_DEAD), 503, "engine_unavailable"),
        ((FinishReason.ERROR, ErrorKind.ENGINE), 500, "engine_error"),
    ],
)
async def test_an_end_by_error_is_an_error_whole_and_in_mid_stream(
    end: tuple[FinishReason, ErrorKind | None], status: int, code: str
) -> None:
    harness = Harness()
    reason, kind = end
    harness.engine.end = (reason, None if kind is None else FinishError(kind, "x"))
    response = await harness.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    response = await harness.chat(stream=True)
    *_, error, done = events(response.text)
    assert response.status_code == 200 and done == "[DONE]"
    assert error["error"]["code"] == code and set(error) == {"error"}
    assert 'finish_reason":"' not in response.text, "no reason is claimed for an answer that failed"


async def test_a_full_queue_is_429_before_the_body_is_read() -> None:
    config = Config(admission=AdmissionConfig(max_waiting=4), scheduling=SchedulingConfig(max_sequences=2))
    harness = Harness(config=config)
    ticket = harness.context.admission.admit(AdmissionRequest(num_prompts=6))
    response = await harness.post(b"not even JSON")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    error = response.json()["error"]
    assert error["code"] == "queue_full" and "4 sequences wait, 4 may" in error["message"]
    assert not harness.engine.requests
    ticket.leave()
    assert (await harness.chat()).status_code == 200
    assert harness.context.queue.num_pending == 0

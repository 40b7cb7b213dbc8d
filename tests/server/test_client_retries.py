"""Timeouts, broken connections and retries as OpenAI's and Anthropic's packages make them, over a real socket.

The packages repeat a request after a timeout and after 408, 409, 429 and 5xx, unless the answer has x-should-retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octavo.config import Config
from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind, QueueFullError
from octavo.server.http.limits import HttpLimits
from tests.server.fakes import EOS
from tests.server.test_run import Running, running

anthropic = pytest.importorskip("anthropic", reason="Anthropic's package is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's package is not installed")

USER: list[Any] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": USER}
KEYED = {"extra_headers": {"Idempotency-Key": "one"}}
TEXT = "Hello é!"
SHORT_S = 0.6  # a client's timeout in which an answer that is not held arrives


@contextmanager
def served(**options: Any) -> Iterator[tuple[Running, Any]]:
    """A server, and OpenAI's client of it with these options."""
    with running(Config(), limits=options.pop("limits", None)) as server:
        fields = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 20.0, **options}
        with openai.OpenAI(**fields) as client:
            yield server, client


def until(condition: Callable[[], Any]) -> None:
    """Wait until this is true, for at most 20 s."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def later(server: Running, is_time: Callable[[], Any], act: Callable[[], None]) -> None:
    """Call `act` in the server's loop as soon as `is_time` is true there."""

    def look() -> None:
        if is_time():
            act()
        else:
            server.loop.call_later(0.005, look)

    server.loop.call_soon_threadsafe(look)


def answer_all(server: Running) -> None:
    """Let the engine answer all requests that it holds, and later ones at once."""
    server.engine.is_held = False
    for request in server.engine.requests:
        server.engine.answer(request)


def say_rest(server: Running, number: int, start: int) -> None:
    """Let the engine say what follows token `start` of its request `number`, with the end."""
    request, ids = server.engine.requests[number], [*server.engine.tokenizer.encode(TEXT), EOS]
    for position in range(start, len(ids)):
        end = (FinishReason.STOP, "") if position == len(ids) - 1 else None
        server.engine._put(request, (0, position), ids[position], end)


def text_of(chunks: Iterable[Any]) -> str:
    """The text of a chat's stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_request_whose_client_gave_up_is_cancelled_and_its_retries_start_anew() -> None:
    with served(timeout=SHORT_S, max_retries=1) as (server, client):
        server.engine.is_held = True
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**CHAT)
        until(lambda: len(server.engine.cancelled) == 2)
        assert len(server.engine.requests) == 2


def test_a_retry_with_the_same_key_gets_the_answer_of_the_first_request() -> None:
    with served(timeout=SHORT_S, max_retries=3) as (server, client):
        server.engine.is_held = True
        later(server, lambda: server.context.runs.num_attached, lambda: answer_all(server))
        answer = client.chat.completions.create(**CHAT, **KEYED)
        assert answer.choices[0].message.content == TEXT
        again = client.chat.completions.create(**CHAT, **KEYED)
        assert (again.id, again.created, again.usage) == (answer.id, answer.created, answer.usage)
        assert len(server.engine.requests) == 1 and not server.engine.cancelled


def test_a_key_that_was_used_for_another_body_is_a_conflict_that_is_not_tried_again() -> None:
    with served(max_retries=2) as (server, client):
        client.chat.completions.create(**CHAT, **KEYED)
        with pytest.raises(openai.ConflictError) as caught:
            client.chat.completions.create(**CHAT, **KEYED, temperature=0)
        assert (caught.value.code, caught.value.param) == ("idempotency_key_reused", "Idempotency-Key")
        assert "a new request needs a new key" in caught.value.body["message"]
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert server.context.runs.num_conflicts == 1, "the package asked once"


def test_a_stream_that_its_client_leaves_is_cancelled_unless_it_has_a_key() -> None:
    with served() as (server, client):
        server.engine.is_held = True
        later(server, lambda: server.engine.requests, lambda: server.engine.answer(server.engine.requests[0], 2))
        with client.chat.completions.create(**CHAT, stream=True) as stream:
            while not next(stream).choices[0].delta.content:
                pass
        until(lambda: server.engine.cancelled)

        later(server, lambda: server.engine.requests[1:], lambda: server.engine.answer(server.engine.requests[1], 2))
        with client.chat.completions.create(**CHAT, stream=True, **KEYED) as stream:
            first = next(stream)
            while not next(stream).choices[0].delta.content:
                pass
        run = server.context.runs
        until(lambda: all(not each.num_readers for each in run._runs.values()))
        later(server, lambda: run.num_attached, lambda: say_rest(server, 1, 2))
        chunks = list(client.chat.completions.create(**CHAT, stream=True, **KEYED))
        assert {chunk.id for chunk in chunks} == {first.id}, "it is the same answer"
        assert text_of(chunks) == TEXT, "from its start"
        assert len(server.engine.requests) == 2 and len(server.engine.cancelled) == 1


@pytest.mark.parametrize("more", [{}, KEYED], ids=["", "keyed"])
def test_keep_alives_hold_a_stream_open_that_has_begun(more: dict[str, Any]) -> None:
    with served(limits=HttpLimits(keep_alive_s=SHORT_S / 6), timeout=SHORT_S) as (server, client):
        server.engine.is_held = True
        later(server, lambda: server.engine.requests, lambda: server.engine.answer(server.engine.requests[0], 2))
        begun = time.monotonic()
        later(server, lambda: time.monotonic() > begun + 2 * SHORT_S, lambda: say_rest(server, 0, 2))
        assert text_of(client.chat.completions.create(**CHAT, stream=True, **more)) == TEXT


def test_keep_alives_hold_a_waiting_stream_open_and_whole_answers_run_into_the_timeout() -> None:
    with served(limits=HttpLimits(keep_alive_s=SHORT_S / 6), timeout=SHORT_S) as (server, client):
        server.engine.is_held = True
        begun = time.monotonic()
        later(server, lambda: time.monotonic() > begun + 2 * SHORT_S, lambda: answer_all(server))
        assert text_of(client.chat.completions.create(**CHAT, stream=True)) == TEXT
        server.engine.is_held = True
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**CHAT)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_full_queue_is_asked_again_after_the_time_that_it_names(stream: bool) -> None:
    statuses: list[int] = []

    def seen(response: Any) -> None:
        statuses.append(response.status_code)
        server.engine.submit_error = None

    hooked = openai.DefaultHttpxClient(event_hooks={"response": [seen]})
    with served(max_retries=1, http_client=hooked) as (server, client):
        server.engine.submit_error = QueueFullError("the queue is full")
        begun = time.monotonic()
        answer = client.chat.completions.create(**CHAT, stream=stream)
        assert statuses == [429, 200] and time.monotonic() - begun > 0.9, "Retry-After is at least 1 s"
        assert (text_of(answer) if stream else answer.choices[0].message.content) == TEXT


def test_an_error_in_mid_stream_is_the_packages_exception() -> None:
    with served(max_retries=2) as (server, client):
        server.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE_DEAD, "gone"))
        with pytest.raises(openai.APIError) as caught:
            list(client.chat.completions.create(**CHAT, stream=True))
        assert (caught.value.code, caught.value.message) == ("engine_unavailable", "the engine is not available")
        assert len(server.engine.requests) == 1, "a stream that has begun is not asked for again"
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=2) as other:
            with pytest.raises(anthropic.APIStatusError, match="the engine is not available") as also:
                list(other.messages.create(**CHAT, max_tokens=20, stream=True))
            assert also.value.body["error"]["type"] == "overloaded_error"
        assert len(server.engine.requests) == 2


def test_a_requests_own_timeout_is_a_408_with_the_field() -> None:
    with served() as (server, client):
        server.engine.is_held = True
        server.engine.end = (FinishReason.TIMEOUT, None)
        later(server, lambda: server.engine.requests, lambda: answer_all(server))
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**CHAT, extra_body={"timeout": 0.2})
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")


def test_anthropics_retries_with_a_key_share_one_message() -> None:
    with running(Config()) as server:
        asked: dict[str, Any] = {**CHAT, "max_tokens": 20, **KEYED}
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=3, timeout=SHORT_S) as client:
            server.engine.is_held = True
            later(server, lambda: server.context.runs.num_attached, lambda: answer_all(server))
            message = client.messages.create(**asked)
            assert message.content[0].text == TEXT
            assert client.messages.create(**asked).id == message.id
            assert len(server.engine.requests) == 1 and not server.engine.cancelled

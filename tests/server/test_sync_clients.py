"""Anthropic's and Ollama's synchronous clients against a real server on a loopback port, with a key."""

from typing import Any

import anthropic
import ollama
import pytest

from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind, QueueFullError
from tests.server.test_run import KEY, running

USER: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": USER}


def test_I03_the_anthropic_client_is_served() -> None:
    with running() as server, anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**ASKED)
        assert whole.content[0].text == "Hello é!"  # type: ignore[union-attr]
        assert whole._request_id is not None and whole.id.endswith(whole._request_id)
        with client.messages.stream(**ASKED) as stream:
            assert "".join(stream.text_stream) == "Hello é!"
            assert stream.get_final_message().stop_reason == "end_turn"
        kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        count = client.messages.count_tokens(model="tiny", messages=USER)
        assert count.input_tokens == whole.usage.input_tokens
        assert [model.display_name for model in client.models.list()] == ["tiny"]


def test_the_anthropic_client_understands_refusals_and_failures() -> None:
    with running() as server, anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="sk-no").messages.create(**ASKED)
        server.engine.submit_error = QueueFullError("the queue is full", retry_after_s=3.0)
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(**ASKED)
        assert int(full.value.response.headers["retry-after"]) >= 3
        server.engine.submit_error = None
        server.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE_DEAD, "gone"))
        with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
            client.messages.create(**ASKED)
        long = [{"role": "user", "content": "x" * 10_000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(**{**ASKED, "messages": long})


def test_the_ollama_client_is_served() -> None:
    with running() as server, ollama.Client(server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        assert client.chat("tiny", USER).message.content == "Hello é!"
        assert "".join(part.message.content or "" for part in client.chat("tiny", USER, stream=True)) == "Hello é!"
        assert "".join(part.response or "" for part in client.generate("tiny", "a", stream=True)) == "Hello é!"
        assert [model.model for model in client.list().models] == ["tiny"]
        with pytest.raises(ollama.ResponseError, match=r"options\.num_predict"):
            client.chat("tiny", USER, options={"num_predict": 0})
        with ollama.Client(server.url) as stranger, pytest.raises(ollama.ResponseError, match="valid key"):
            stranger.list()

"""Log-probabilities of prompts: echo, prompt_logprobs, scores alone; whole and streamed."""

from typing import Any

import httpx
import pytest

from octavo.core.plan import TokenLogprobs
from octavo.core.request import ErrorKind, FinishError, FinishReason, Want
from octavo.frontend.sessions import slice_tokens
from octavo.server.api.completions.answers import EchoedPrompt, LogprobColumns, top_logprobs
from octavo.server.api.sampling import MAX_PROMPT_SCORES, check_scores
from octavo.server.encoding import LOWEST_LOGPROB
from tests.server.fakes import Harness, events

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def ids_of(text: str) -> list[int]:
    return Harness().text.tokenizer.encode(text)


async def choice_of(**fields: Any) -> dict[str, Any]:
    response = await Harness().complete(**fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def joined(response: httpx.Response, index: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """Text and columns of a choice's chunks."""
    text, columns = "", {name: [] for name in COLUMNS}
    for chunk in events(response.text)[:-1]:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                for name in COLUMNS:
                    columns[name] += (choice["logprobs"] or {}).get(name, [])
    return text, columns


@pytest.mark.parametrize("prompt", ["hé!", ids_of("hé!")])
async def test_S24_echo_with_logprobs_covers_prompt_and_answer(prompt: str | list[int]) -> None:
    choice = await choice_of(prompt=prompt, echo=True, logprobs=1, max_tokens=2)
    assert choice["text"] == "hé!He"
    columns = choice["logprobs"]
    assert columns["tokens"] == ["h", "\ufffd", "\ufffd", "!", "H", "e"]
    assert columns["token_logprobs"] == [None, -1 / 8, -2 / 8, -3 / 8, -0.25, -0.25]
    assert columns["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert columns["top_logprobs"][0] is None
    assert all(len(tops) >= 1 for tops in columns["top_logprobs"][1:])


async def test_scores_alone_generate_nothing() -> None:
    harness = Harness()
    body = (await harness.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8, -2 / 8]
    assert body["usage"]["completion_tokens"] == 0
    assert harness.engine.requests[-1].wants == Want.SCORE
    plain = await choice_of(prompt="abc", echo=True, max_tokens=0)
    assert (plain["text"], plain["logprobs"]) == ("abc", None)


async def test_what_scores_alone_cannot_have_is_refused() -> None:
    harness = Harness()
    for fields in ({"echo": False}, {"n": 2}, {"best_of": 2}, {"use_beam_search": True, "logprobs": None}):
        body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, **fields}
        response = await harness.complete(**body)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == "max_tokens", fields
    assert (await harness.chat(max_tokens=0)).json()["error"]["param"] == "max_tokens"


async def test_a_beam_search_gives_no_logprobs_and_says_so() -> None:
    beams = {"use_beam_search": True, "n": 2}
    for response in (
        await Harness().complete(**beams, logprobs=1),
        await Harness().complete(**beams, logprobs=0, echo=True),
        await Harness().chat(**beams, logprobs=True),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert (await Harness().chat(**beams, logprobs=False)).status_code == 200


async def test_lists_of_ids_with_one_token_each_as_evaluation_harnesses_ask() -> None:
    prompts = [ids_of("abcd"), ids_of("xy"), [5]]
    body = (await Harness().complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)).json()
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None
        for value, tops in list(zip(*(choice["logprobs"][name] for name in COLUMNS[1:3]), strict=True))[1:]:
            assert value in tops.values(), "the token's own is among the best, as the very same number"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_adds_up_to_the_whole(n: int) -> None:
    text = "abc" * 200
    fields = {"prompt": [text, "q"], "echo": True, "logprobs": 2, "prompt_logprobs": 1, "n": n, "max_tokens": 4}
    whole = (await Harness().complete(**fields)).json()["choices"]
    streamed = await Harness().complete(**fields, stream=True)
    for choice in whole:
        got, columns = joined(streamed, choice["index"])
        assert got == choice["text"]
        assert columns == choice["logprobs"]
    chunks = [chunk["choices"][0] for chunk in events(streamed.text)[:-1]]
    scores = [one for choice in chunks if choice["index"] == 0 for one in choice.get("prompt_logprobs", [])]
    assert scores == whole[0]["prompt_logprobs"]
    largest = max(len(choice["logprobs"]["tokens"]) for choice in chunks if choice["logprobs"])
    assert largest <= slice_tokens(2) + 1, "long prompts come in pieces"


async def test_prompt_logprobs_have_the_token_and_the_best() -> None:
    choice = await choice_of(prompt="abc", prompt_logprobs=2)
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2 and choice["logprobs"] is None
    token = str(ids_of("b")[0])
    assert rest[0][token] == {"logprob": -1 / 8, "rank": 1, "decoded_token": "b"}
    assert len(rest[0]) == 3 and {entry["rank"] for entry in rest[0].values()} >= {1, 2}
    assert (await choice_of(prompt="a", prompt_logprobs=0))["prompt_logprobs"] == [None]
    assert "prompt_logprobs" not in await choice_of(prompt="abc")


async def test_chat_gives_prompt_logprobs_beside_its_choices() -> None:
    harness = Harness()
    whole = (await harness.chat(prompt_logprobs=1)).json()
    assert whole["choices"][0]["message"]["content"] == "Hello é!"
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    chunks = events((await harness.chat(prompt_logprobs=1, stream=True)).text)[:-1]
    assert [one for chunk in chunks for one in chunk.get("prompt_logprobs", [])] == whole["prompt_logprobs"]
    said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]]
    assert "".join(said) == "Hello é!"
    assert (await harness.chat(prompt_logprobs=21)).json()["error"]["param"] == "prompt_logprobs"


async def test_prompt_scores_are_not_kept_for_retries() -> None:
    for fields in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}):
        response = await Harness().complete(headers={"idempotency-key": "k"}, **fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == "Idempotency-Key"


async def test_many_log_probabilities_are_shaped_off_the_event_loop() -> None:
    choice = await choice_of(prompt="ab" * 1000, echo=True, logprobs=20, max_tokens=1)
    assert len(choice["logprobs"]["tokens"]) == 2001


def test_an_answer_holds_so_many_prompt_scores() -> None:
    check_scores(MAX_PROMPT_SCORES // 21, 20)
    check_scores(10**9, None)
    with pytest.raises(Exception, match="give fewer or shorter prompts"):
        check_scores(MAX_PROMPT_SCORES // 21 + 1, 20)


async def test_a_failed_request_gives_no_scores() -> None:
    harness = Harness()
    harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "bad row"))
    assert (await harness.complete(echo=True, logprobs=1)).status_code == 500


class Letters:
    """Ids 0 to 9 are all the letter x, 10 is an unfinished character, 11 a special token, 12 too."""

    def token_bytes(self, token_id: int) -> bytes:
        return {10: b"\xc3", 11: b"<s>", 12: b"<e>"}.get(token_id, b"x")


def test_ids_of_the_same_text_all_show() -> None:
    entry = TokenLogprobs(3, -2.0, 3, (1, 2, 3, 10), (-0.5, -1.0, -2.0, -4.0))
    tops = top_logprobs(entry, Letters())
    assert tops == {"token_id:1": -0.5, "token_id:2": -1.0, "x": -2.0, "\ufffd": -4.0}
    assert list(tops.values()) == sorted(tops.values(), reverse=True)
    outside = TokenLogprobs(11, float("-inf"), 99, (1,), (-0.5,))
    assert top_logprobs(outside, Letters()) == {"x": -0.5, "<s>": LOWEST_LOGPROB}


def test_tokens_that_an_echo_does_not_show_have_no_width() -> None:
    echo, columns = EchoedPrompt("x<e>x", 11, 0, Letters()), LogprobColumns()
    echo.add([TokenLogprobs(token_id, -1.0, 1, (), ()) for token_id in (1, 12, 2)], columns)
    assert columns.tokens == ["<s>", "x", "<e>", "x"]
    assert columns.text_offset == [0, 0, 1, 4]

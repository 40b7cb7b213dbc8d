"""The synchronous face: batches in input order, progress only on a terminal, clean ends."""

from __future__ import annotations

import gc
import io
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.fakes import VOCAB_SIZE, GatedExecutor, make_limits, make_sessions
from tests.fake_model import oracle

from octavo.core.request import SamplingParams
from octavo.errors import AdmissionError, InvalidRequestError, PromptTooLongError
from octavo.frontend.offline import OfflineEngine, progress_bar
from octavo.frontend.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[OfflineEngine]:
    with OfflineEngine(make_sessions(limits=make_limits(max_sequences=4))) as engine:
        yield engine


def answer(ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return oracle(ids, params.max_tokens or 0, VOCAB_SIZE, (), params)


def test_L01_generate_keeps_the_input_order(llm: OfflineEngine) -> None:
    prompts: list[Any] = ["Hi", [5, 6, 7], {"prompt_token_ids": [8]}, {"prompt": "yo"}]
    params = [SamplingParams(temperature=0.0, max_tokens=n, seed=3, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 3]
    assert [output.prompt for output in outputs] == ["Hi", None, None, "yo"]
    for output, each in zip(outputs, params, strict=True):
        assert output.outputs[0].token_ids == answer(output.prompt_token_ids, each)
        assert output.outputs[0].finish_reason == "length" and output.finished
        assert output.metrics is not None and output.metrics.completion_tokens == each.max_tokens


@pytest.mark.parametrize("prompt", ["Hi", [43, 72], {"prompt": "Hi"}, ["Hi"], [[43, 72]]])
def test_a_single_prompt_may_take_any_form(llm: OfflineEngine, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == [43, 72] and output.outputs[0].token_ids == answer([43, 72])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("bad_words_ids", "Par"),  # taken apart, it would be three words
        ("stop_token_ids", 5),
        ("stop_token_ids", {5: 1.0}),
        ("logit_bias", [5]),
        ("logit_bias", [(5, 1.0, 2.0)]),
    ],
)
def test_a_lone_value_where_a_tuple_belongs_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give a tuple of") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_other_forms_of_lists_are_taken() -> None:
    params = SamplingParams(stop="Par", stop_token_ids=None, logit_bias={5: 1.0}, bad_words_ids=None)  # type: ignore
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.bad_words_ids) == (
        ("Par",),
        (),
        ((5, 1.0),),
        (),
    )
    assert SamplingParams(stop=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("guided_decoding", "give grammar=grammar_from"),
        ("bad_words", "give their token ids as bad_words_ids"),
        ("max_new_tokens", "give max_tokens"),
        ("tempreature", "give max_tokens, min_tokens, temperature, "),
    ],
)
def test_an_unknown_field_says_what_to_give(llm: OfflineEngine, field: str, remedy: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"SamplingParams has no field {field}; {remedy}"):
        SamplingParams(**{field: 1})
    with pytest.raises(InvalidRequestError, match=f"no field {field}; {remedy}"):
        llm.generate("Hi", {field: 1})


def test_each_line_of_vllms_quickstart(llm: OfflineEngine) -> None:
    prompts = ["Hi", "yo", "Say"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(prompts, sampling_params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt == prompt and output.finished and output.request_id
        assert output.prompt_token_ids and output.outputs[0].token_ids and output.outputs[0].text
        assert output.outputs[0].index == 0 and output.outputs[0].finish_reason in ("stop", "length")
        assert output.outputs[0].stop_reason is None and output.outputs[0].logprobs is None
    messages_list = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert len(llm.chat(messages_list, sampling_params)) == 3
    assert len(llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False)) == 3
    assert len(llm.chat(messages=messages_list[0], sampling_params=sampling_params, use_tqdm=False)) == 1


def test_parameters_may_be_a_dict_one_for_all_or_a_list(llm: OfflineEngine) -> None:
    given = {"max_tokens": 3, "seed": 3, "ignore_eos": True}
    (plain,) = llm.generate("Hi", given)
    the_same = SamplingParams(temperature=0.0, top_k=3, **given)  # type: ignore[arg-type]  # the model's own, and these
    assert plain.outputs[0].token_ids == answer([43, 72], the_same)
    both = llm.generate(["Hi", "yo"], [{"max_tokens": 2, "ignore_eos": True}, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in both] == [2, 6]
    assert llm.generate("Hi", params=GREEDY)[0].outputs == llm.generate("Hi", sampling_params=GREEDY)[0].outputs
    with pytest.raises(InvalidRequestError, match="sampling_params is a str; give SamplingParams"):
        llm.generate("Hi", "greedy")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="are one argument"):
        llm.generate("Hi", GREEDY, params=GREEDY)


def test_a_text_is_a_conversation(llm: OfflineEngine) -> None:
    (one,) = llm.chat("Hi", GREEDY)
    assert llm.text.tokenizer.decode(one.prompt_token_ids) == "user:Hi;"
    assert [llm.text.tokenizer.decode(each.prompt_token_ids) for each in llm.chat(["Hi", "yo"], GREEDY)] == [
        "user:Hi;", "user:yo;"
    ]  # fmt: skip
    assert "".join(delta.text for delta in llm.stream_chat("Hi", GREEDY)) == one.outputs[0].text
    for wrong in (5, [5], [["Hi"]]):
        with pytest.raises(InvalidRequestError, match="messages must be a text or a list"):
            llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"lora_request": object()}, r"this engine has no adapters"),
        ({"prompt_token_ids": [[5]]}, 'give {"prompt_token_ids": '),
        ({"temperature": 0.5}, r"generate\(\) has no argument temperature; see help\(LLM.generate\)"),
    ],
)
def test_an_unknown_argument_says_what_to_do(llm: OfflineEngine, argument: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("Hi", GREEDY, **argument)
    assert llm.generate("Hi", GREEDY, lora_request=None)[0].finished
    with pytest.raises(InvalidRequestError, match="prompts is a NoneType; give a text"):
        llm.generate(None)  # type: ignore[arg-type]


def test_max_tokens_left_out_is_16_but_in_a_chat(llm: OfflineEngine) -> None:
    def lengths(outputs: list[RequestOutput]) -> list[int]:
        return [len(output.outputs[0].token_ids) for output in outputs]

    room = make_limits().max_model_len
    assert SamplingParams().max_tokens == 16 and llm.default_params.max_tokens == 16
    free = {"ignore_eos": True}
    assert lengths(llm.generate(["Hi", [5]], free)) == [16, 16]
    assert lengths(llm.generate("Hi", SamplingParams(ignore_eos=True))) == [16]
    assert sum(len(delta.token_ids) for delta in llm.stream("Hi", free)) == 16
    (unbounded,) = llm.generate("Hi", {**free, "max_tokens": None})
    assert len(unbounded.outputs[0].token_ids) == room - 2
    (chat,) = llm.chat("Hi", free)
    assert len(chat.outputs[0].token_ids) == room - len(chat.prompt_token_ids)
    assert sum(len(delta.token_ids) for delta in llm.stream_chat("Hi", free)) == room - len(chat.prompt_token_ids)
    assert lengths(llm.chat("Hi", SamplingParams(ignore_eos=True))) == [16], "its own default, as in vLLM"


def test_truncation_keeps_the_end_of_a_prompt(llm: OfflineEngine) -> None:
    room = make_limits().max_model_len
    long = [5 + i % 50 for i in range(3 * room)]
    with pytest.raises(
        PromptTooLongError, match=f"This model's maximum context length is {room} tokens, and the prompt"
    ):
        llm.generate([long], GREEDY)
    (output,) = llm.generate([long], replace(GREEDY, truncate_prompt_tokens=4))
    assert output.prompt_token_ids == long[-4:] and output.outputs[0].token_ids == answer(long[-4:])
    (output,) = llm.generate([long], replace(GREEDY, truncate_prompt_tokens=-1))
    assert output.prompt_token_ids == long[6 - room :] and len(output.outputs[0].token_ids) == 6
    (output,) = llm.generate([[5, 6]], replace(GREEDY, truncate_prompt_tokens=4))
    assert output.prompt_token_ids == [5, 6]
    for wrong in (0, -2, 1.5):
        with pytest.raises(InvalidRequestError, match="give how many of the prompt's last tokens to keep, or -1"):
            SamplingParams(truncate_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_no_prompts_no_answers(llm: OfflineEngine) -> None:
    assert llm.generate([], GREEDY) == []


def test_default_params_are_the_models_own(llm: OfflineEngine) -> None:
    assert llm.default_params == SamplingParams(temperature=0.0, top_k=3)
    (output,) = llm.generate("Hi")
    assert output.outputs[0].finish_reason in ("length", "stop")


def test_chat_takes_one_conversation_or_many(llm: OfflineEngine) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(talk, GREEDY)
    many = llm.chat([talk, [{"role": "user", "content": "yo"}]], GREEDY)
    assert one.outputs[0].token_ids == many[0].outputs[0].token_ids and len(many) == 2
    assert llm.text.tokenizer.decode(one.prompt_token_ids) == "user:Hi;"
    assert "".join(d.text for d in llm.stream_chat(talk, GREEDY)) == one.outputs[0].text


def test_stream_gives_deltas_and_leaving_it_cancels(llm: OfflineEngine) -> None:
    (whole,) = llm.generate("Hi", GREEDY)
    deltas = list(llm.stream("Hi", GREEDY))
    assert [i for d in deltas for i in d.token_ids] == whole.outputs[0].token_ids
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    stream = llm.stream("Hi", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    statistics: Any = llm.statistics()
    assert statistics["loop"]["open_requests"] == 0


def test_L01_requests_are_paused_resumed_and_cancelled_from_another_thread(llm: OfflineEngine) -> None:
    outputs: list[RequestOutput] = []
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    llm.pause()
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(["Hi", "yo"], [GREEDY, endless])))
    thread.start()

    def num_waiting() -> int:
        statistics: Any = llm.statistics()
        return int(statistics["loop"]["open_requests"]) if not outputs else -1

    while num_waiting() < 2:
        pass
    assert not outputs
    llm.resume()
    assert llm.generate("ab", GREEDY)[0].outputs[0].finish_reason == "length"
    while llm.cancel() == 0 and thread.is_alive():
        pass
    thread.join(30)
    assert [output.outputs[0].finish_reason in ("length", "cancelled") for output in outputs] == [True, True]
    assert llm.cancel("unknown") == 0


def test_L01_the_prefix_cache_is_reset(llm: OfflineEngine) -> None:
    prompt = {"prompt_token_ids": list(range(40))}

    def cached() -> int:
        metrics = llm.generate(prompt, GREEDY)[0].metrics
        assert metrics is not None
        return metrics.cached_tokens

    assert cached() == 0 and cached() > 0
    assert llm.reset_prefix_cache()
    assert cached() == 0 and cached() > 0


def test_a_refused_prompt_names_its_place_and_cancels_the_rest(llm: OfflineEngine) -> None:
    with pytest.raises(AdmissionError, match="128") as caught:
        llm.generate([[3], [4] * 500, [5]], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    assert caught.value.__notes__ == ["this was prompt 1 of 3"]
    statistics: Any = llm.statistics()
    assert statistics["loop"]["open_requests"] == 0
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1"):
        llm.generate("Hi", [GREEDY, GREEDY])
    for wrong in ({"text": "Hi"}, [b"Hi"], [None]):
        with pytest.raises(InvalidRequestError):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]


def test_bug_33_one_failing_request_is_an_answer_and_the_others_go_on() -> None:
    executor = GatedExecutor()
    with OfflineEngine(make_sessions(executor)) as llm:
        victim = 40

        def fail(plan: Any, owners: list[str]) -> Exception | None:
            by_id = {s.request_id: s.ids[0] for s in executor.slots.values()}
            by_id.update((new.request_id, new.token_ids[0]) for new in plan.new_sequences)
            return RuntimeError("boom") if any(by_id[o] == victim for o in owners) else None

        executor.fail = fail
        outputs = llm.generate([[i] for i in range(35, 45)], GREEDY)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length"] * 5 + ["error"] + ["length"] * 4
    assert "boom" in (outputs[5].outputs[0].message or "") and outputs[5].finished
    assert all(o.outputs[0].token_ids == answer(o.prompt_token_ids) for i, o in enumerate(outputs) if i != 5)


def test_on_delta_knows_the_index(llm: OfflineEngine) -> None:
    seen: dict[int, list[int]] = {}
    outputs = llm.generate([[5], [6]], GREEDY, on_delta=lambda i, d: seen.setdefault(i, []).extend(d.token_ids))
    assert seen == {i: output.outputs[0].token_ids for i, output in enumerate(outputs)}


def test_several_threads_share_one_engine(llm: OfflineEngine) -> None:
    results: dict[int, list[int]] = {}

    def work(first: int) -> None:
        results[first] = llm.generate([[first]], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(10 + i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {first: answer([first]) for first in range(10, 16)}


def test_L04_close_is_idempotent_and_ends_the_threads() -> None:
    before = threading.active_count()
    llm = OfflineEngine(make_sessions())
    llm.generate("Hi", GREEDY)
    llm.close()
    llm.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hi", GREEDY)


def test_an_engine_left_behind_is_closed_when_collected() -> None:
    before = threading.active_count()
    llm = OfflineEngine(make_sessions())
    llm.generate("Hi", GREEDY)
    del llm
    gc.collect()
    assert threading.active_count() == before


def test_no_bar_without_a_terminal(llm: OfflineEngine, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hi", "yo"], GREEDY, progress=True)
    llm.generate(["Hi", "yo"], GREEDY, use_tqdm=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argument", "is_shown"), [({}, True), ({"use_tqdm": False}, False), ({"progress": False}, False)]
)
def test_use_tqdm_is_the_bar(
    llm: OfflineEngine, monkeypatch: pytest.MonkeyPatch, argument: dict[str, bool], is_shown: bool
) -> None:
    shown = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = progress_console(io.StringIO())
    monkeypatch.setattr("rich.console.Console", lambda stderr: shown.append(stderr) or console)
    llm.generate("Hi", GREEDY, **argument)  # type: ignore[arg-type]
    llm.chat("Hi", GREEDY, **argument)  # type: ignore[arg-type]
    assert shown == [True, True] * is_shown


def test_the_bar_counts_answers_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = progress_console(out)
    monkeypatch.setattr("rich.console.Console", lambda stderr: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = RequestOutput("a", None, [1, 2], [CompletionOutput(0, "x", [3], "length")])
    with progress_bar(2) as advance:
        advance(done)
        advance(done)
    assert "2/2" in out.getvalue() and "out tokens/s" in out.getvalue()


def progress_console(out: io.StringIO) -> Any:
    from rich.console import Console

    return Console(file=out, force_terminal=True, width=120)

"""Scripted models: the real scheduler, cache, sessions and text around an executor that says what a script has.

(The conformance suite compares with a model's own numbers, of which there are none here.)
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.artifacts.resolve import resolve_model
from octavo.artifacts.script import encode, read_prompt, read_script
from octavo.assembly import build_local, create_scripted
from octavo.config.sources import config_from_keywords
from octavo.core.plan import ROW_POOL, NewSequence, StepPlan
from octavo.executors.protocol import ExecutorSpec
from octavo.text.text_model import TextModel

RULES = [
    {"contains": "weather", "role": "user", "call": {"name": "get", "arguments": {"city": "Paris"}}},
    {"role": "tool", "say": "It is sunny."},
    {"equals": "pick", "say": ["one", "two", "three"], "logprob": -2.0},
    {"equals": "on", "say": "on and ", "finish": "length"},
    {"equals": "fail", "say": "this fails", "fail_after": 4},
    {"equals": "crash", "say": "this crashes", "crash_after": 2},
    {"equals": "crash at once", "say": "never", "crash_after": 0},
    {"contains": "é", "say": "naïve 日本 🎉 " * 30},
    {"contains": "long", "say": "a longer answer, with more words than the others have, so that it takes a while"},
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(RULES))
    return path


@pytest.fixture(scope="module")
def llm(script: Path) -> Any:
    with LLM(f"scripted:{script}", max_model_len=2048) as engine:
        yield engine


def said(llm: LLM, message: str, **params: Any) -> list[str]:
    outputs = llm.chat([{"role": "user", "content": message}], SamplingParams(**{"max_tokens": None, **params}))
    return [output.text for output in outputs[0].outputs]


def test_rules_answer_and_the_rest_is_echoed(llm: LLM) -> None:
    assert said(llm, "hello") == ["hello"]
    assert said(llm, "what weather?") == ['<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>']
    assert said(llm, "pick", n=3) == ["one", "two", "three"]
    assert said(llm, "é") == ["naïve 日本 🎉 " * 30]
    assert llm.generate(["pick"])[0].outputs[0].text == "one", "a plain prompt is its own last message"


def test_a_whole_conversation_has_the_tools_message_last(llm: LLM) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
    conversation = [
        {"role": "user", "content": "what weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "weather: 25 degrees"},
    ]
    assert llm.chat(conversation, SamplingParams())[0].outputs[0].text == "It is sunny."


def test_ends_are_the_scripts_or_max_tokens(llm: LLM) -> None:
    [long] = llm.chat([{"role": "user", "content": "on"}], SamplingParams(max_tokens=16))
    assert (long.outputs[0].text, long.outputs[0].finish_reason) == ("on and on and on", "length")
    [cut] = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3))
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("hel", "length")
    [stopped] = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(stop=["l"]))
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("he", "stop")
    assert said(llm, "pick", min_tokens=8) == ["oneoneon"]
    assert said(llm, "pick", ignore_eos=True, max_tokens=7) == ["oneoneo"]


def test_log_probabilities_are_the_scripts(llm: LLM) -> None:
    params = SamplingParams(logprobs=3, prompt_logprobs=1)
    [output] = llm.chat([{"role": "user", "content": "pick"}], params)
    entries = output.outputs[0].logprobs
    assert [entry.logprob for entry in entries] == [-2.0] * 4  # with the end
    assert entries[0].top_logprobs == (-2.0, -3.0, -4.0) and entries[0].top_ids[0] == entries[0].token_id
    assert output.prompt_logprobs is not None
    scored = [entry for entry in output.prompt_logprobs if entry is not None]
    assert len(scored) == len(output.prompt_token_ids) - 1


def test_a_failing_answer_ends_behind_what_it_said(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "fail"}], SamplingParams())
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("this", "error")
    assert said(llm, "hello") == ["hello"], "others go on"


def test_beams_begin_with_what_is_said(llm: LLM) -> None:
    assert said(llm, "pick", n=2, beam_width=2)[0] == "one"


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 20, "block_size": 4, "max_batch_tokens": 16, "max_model_len": 72},  # preemptions
        {"num_blocks": 20, "block_size": 4, "host_cache_bytes": 65536, "preemption": "swap", "max_model_len": 72},
        {"depth": 3},
        {"speculate": "ngram"},
        {"policy": "prefill_first", "max_sequences": 3},
    ],
)
def test_answers_do_not_depend_on_how_they_are_scheduled(script: Path, settings: dict[str, Any]) -> None:
    prompts = ["pick", "a long one", "echo this please", "pick", "echo that please", "long again"] * 3
    with LLM(f"scripted:{script}", **settings) as llm:
        got = [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(max_tokens=48))]
    long = RULES[-1]["say"]
    assert isinstance(long, str)
    assert got == [{"pick": "one"}.get(p, long[:48] if "long" in p else p) for p in prompts]


def test_prefixes_are_cached_as_with_any_model(script: Path) -> None:
    prompt = "the same long beginning " * 8
    with LLM(f"scripted:{script}") as llm:
        llm.generate([prompt])
        assert llm.generate([prompt])[0].metrics.cached_tokens >= 128


def test_a_crash_in_this_process_is_a_failed_step_and_nothing_worse(llm: LLM) -> None:
    assert said(llm, "crash") == ["this crashes"], "the step is done again"
    [output] = llm.generate(["crash at once"])
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "error")


def test_like_texts_have_like_embeddings(script: Path) -> None:
    executor = create_scripted(resolve_model(f"scripted:{script}"))
    executor.open(ExecutorSpec(4, 64))

    def embedding(text: str) -> list[float]:
        ids = encode(text)
        plan = StepPlan(0, 0.0)
        plan.new_sequences = (NewSequence(0, "r", 0, len(ids), _ints(ids), SamplingParams()),)
        for column, value in ((plan.slots, 0), (plan.starts, 0), (plan.counts, len(ids)), (plan.flags, ROW_POOL)):
            column.append(value)
        [(row, data)] = executor.collect(executor.submit(plan)).pooled
        assert row == 0
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    def alike(a: str, b: str) -> float:
        return sum(x * y for x, y in zip(embedding(a), embedding(b), strict=True))

    text = "the quick brown fox jumps over the lazy dog"
    assert embedding(text) == embedding(text)
    assert math.isclose(alike(text, text), 1.0, abs_tol=1e-5)
    assert alike(text, text + " today") > alike(text, "an entirely different sentence") + 0.3
    assert len(embedding("a")) == 64


def _ints(ids: list[int]) -> Any:
    from array import array

    return array("i", ids)


def test_pool_sizes_are_honoured(script: Path) -> None:
    path = f"scripted:{script}"
    for settings, blocks in (({"num_blocks": 7}, 7), ({"kv_cache_tokens": 160}, 10), ({"kv_cache_bytes": "2K"}, 2)):
        engine = build_local(config_from_keywords(path, settings))
        assert engine.capacity.num_blocks == (blocks,)
        asyncio.run(engine.client.close())


def test_a_prompt_is_read_back_from_its_ids(script: Path) -> None:
    text = TextModel.load(resolve_model(f"scripted:{script}"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two\nlines <é>"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = read_prompt(text.prompt_ids_from_messages(messages, tools=tools))
    assert (asked.last, asked.role) == ("two\nlines <é>", "user")
    assert "be brief" in asked.prompt and '"name": "f"' in asked.prompt
    assert read_script(script).rule_for(read_prompt(encode("plain"))).echo
    said = "é <|im_end|> \x00\U0001f600<|endoftext|>"
    assert encode(said) == text.tokenizer.encode(said, add_special_tokens=False)
    assert read_prompt(encode(said)).prompt == text.tokenizer.decode(encode(said), skip_special_tokens=False) == said


def test_no_torch_is_loaded(script: Path) -> None:
    code = (
        "import sys\nfrom octavo import LLM\n"
        f"with LLM({f'scripted:{script}'!r}) as llm:\n"
        "    assert llm.generate(['pick'])[0].outputs[0].text == 'one'\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

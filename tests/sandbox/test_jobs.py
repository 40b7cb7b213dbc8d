"""Rendering in a sandbox process gives what rendering here gives, and evil templates end there too."""

import json

import pytest

from octavo.artifacts.resolve import find_wheel_model
from octavo.errors import InvalidRequestError, OctavoError, TooComplexError
from octavo.sandbox.pool import Sandbox, SandboxLimits
from octavo.sandbox.wire import CompileGrammar, RenderChat
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from tests.text.test_chat_template import CHAT, EVIL, TEMPLATES, TOOLS

TOKENS = {"bos_token": "<s>"}


def default_template() -> list[str]:
    files = find_wheel_model()
    template = None if files is None else TextModel.load(files).chat_template
    return [] if template is None else [template.source]


async def test_templates_render_as_they_do_here() -> None:
    tool = Sandbox(SandboxLimits(num_processes=1))
    try:
        for source in [*TEMPLATES, *default_template(), "{{ 'a\\n\\u00e9' }}{{ messages|length }}"]:
            for tools, prompt in ((None, True), (TOOLS, False)):
                here = ChatTemplate(source, TOKENS).render(CHAT, prompt, tools, custom=True)
                order = RenderChat(source, TOKENS, CHAT, prompt, tools, {"custom": True})
                assert await tool.run("render_chat", order) == here
        assert tool.counters.starts == 1
    finally:
        await tool.close()


async def test_a_compiler_that_panics_is_a_refusal_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    tool = Sandbox(SandboxLimits(num_processes=1))
    try:
        for padding in range(4):  # llguidance cuts what it shows at byte 100, inside a character or not
            schema = json.dumps({"multipleOf": {"k": "x" * padding + "猫" * 60}}, ensure_ascii=False)
            with pytest.raises(InvalidRequestError, match="cannot be followed"):
                await tool.run("compile_grammar", CompileGrammar("lark", f"start: %json {schema}"))
        assert (tool.counters.deaths, tool.counters.starts) == (0, 1)
    finally:
        await tool.close()
    assert "猫" not in capfd.readouterr().err


# Two equal lists of 2**40 places each, shared within, and a list whose sorting takes long: one operation inside C.
SHARED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
STALLS = {
    "==": SHARED + "{{ ns.x == ns.y }}",
    "<": SHARED + "{{ ns.x < ns.y }}",
    "in": SHARED + "{{ ns.x in [ns.y] }}",
    "count": SHARED + "{{ [ns.y].count(ns.x) }}",
    "index": SHARED + "{{ [ns.y].index(ns.x) }}",
    "sort": SHARED + "{{ [ns.x, ns.y]|sort }}",
    "max": SHARED + "{{ [ns.x, ns.y]|max }}",
    "select": SHARED + "{{ [ns.x]|select('eq', ns.y)|list }}",
    "groupby": SHARED + "{{ [{'a': ns.x}, {'a': ns.y}]|groupby('a') }}",
    "wide": "{{ (range(99999)|list * 50)|sort|length }}" * 16,  # one takes a second or more
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", STALLS)
async def test_templates_that_stall_inside_one_operation_are_cut(name: str) -> None:
    """No budget counts these; the process is killed, and the next job has another."""
    tool = Sandbox(SandboxLimits(num_processes=1))
    probe = RenderChat("{{ messages[0].content }}", {}, [{"content": "x"}])
    try:
        await tool.run("render_chat", probe)
        with pytest.raises(TooComplexError):
            await tool.run("render_chat", RenderChat(STALLS[name], {}, [{"content": "x"}]), 0.3)
        assert tool.counters.kills == 1
        assert await tool.run("render_chat", probe) == "x"
    finally:
        await tool.close()


@pytest.mark.timeout(60)
async def test_row_28_evil_templates_end_in_a_tool_process_too() -> None:
    tool = Sandbox(SandboxLimits(num_processes=1, job_s=3.0))
    try:
        for name, source in EVIL.items():
            with pytest.raises(OctavoError) as caught:
                await tool.run("render_chat", RenderChat(source, TOKENS, [{"role": "user", "content": "x"}]))
            text = str(caught.value)
            assert "OSError" not in text and "encodings" not in text and len(text) < 500, (name, text)
        assert tool.counters.deaths == 0
    finally:
        await tool.close()

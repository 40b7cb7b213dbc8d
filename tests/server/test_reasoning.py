"""Reasoning: told from the answer, under both names, whole and streamed; asked for where the template can be told."""

from typing import Any

import pytest

from octavo.config import ChatConfig, Config
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from tests.server.fakes import FakeClient, Harness, assert_ignored, events, make_text

SAID = "<think>\nHm, rain.\n</think>\n\nIt rains."
_MESSAGES = "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
_BEGIN = _MESSAGES + "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
# The model opens the tag itself; the prompt does; the prompt opens and closes it when told.
OPENS = _BEGIN + "{% if false %}</think>{% endif %}{% endif %}"
OPENED = _BEGIN + "<think>\n{% endif %}{% if false %}</think>{% endif %}"
CLOSES = (
    _BEGIN
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FORMAT = {"type": "json_object"}


def saying(text: str, template: str, **settings: Any) -> Harness:
    plain = make_text()
    model = TextModel("tiny", plain.spec, plain.tokenizer, ChatTemplate(template, {}, is_trusted=True))
    return Harness(FakeClient(text), model, Config(chat=ChatConfig(**settings)))


def of(message: dict[str, Any]) -> tuple[str | None, str | None]:
    """Reasoning, which has two names, and content."""
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning"), message["content"]


async def told(harness: Harness, **fields: Any) -> tuple[str | None, str | None]:
    """What came whole, which is what came streamed."""
    whole = of((await harness.chat(**fields)).json()["choices"][0]["message"])
    *chunks, _ = events((await harness.chat(stream=True, **fields)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    assert (thought, content) == (whole[0] or "", whole[1] or "")
    return whole


@pytest.mark.parametrize(
    ("template", "text", "thought", "content"),
    [
        (OPENS, SAID, "Hm, rain.", "It rains."),
        (OPENS, "It rains. <think>no</think>", None, "It rains. <think>no</think>"),
        (OPENS, "<think>\n\n</think>\n\nIt rains.", None, "It rains."),
        (OPENED, SAID.removeprefix("<think>\n"), "Hm, rain.", "It rains."),
        (OPENED, "Hm, ra", "Hm, ra", ""),
        (CLOSES, SAID, "Hm, rain.", "It rains."),
        (_BEGIN + "{% endif %}", SAID, None, SAID),
    ],
)
async def test_reasoning_is_told_from_content(template: str, text: str, thought: str | None, content: str) -> None:
    assert await told(saying(text, template)) == (thought, content)


async def test_a_prompt_that_closes_the_reasoning_leaves_none_to_be_told() -> None:
    harness = saying("It rains.</think>", CLOSES)
    assert await told(harness, chat_template_kwargs={"enable_thinking": False}) == (None, "It rains.</think>")
    assert await told(harness, reasoning_effort="none") == (None, "It rains.</think>")
    assert harness.prompt.endswith("</think>\n\n")
    await told(harness, reasoning_effort="high")
    assert harness.prompt.endswith("assistant:")


async def test_effort_is_for_models_that_can_be_told() -> None:
    harness = saying("ok", OPENED)
    assert_ignored(await harness.chat(reasoning_effort="none"), "reasoning_effort")
    assert_ignored(await harness.chat(reasoning={"effort": "none"}), "reasoning.effort")
    assert_ignored(await harness.chat(reasoning_effort="low"), "reasoning_effort")
    for kind in ("enabled", "disabled"):
        assert_ignored(await harness.chat(thinking={"type": kind}), "thinking")
    response = await harness.chat(reasoning={"effort": "much"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning.effort")
    assert_ignored(await harness.chat(reasoning={"budget": 3}), "reasoning.budget")
    plain = saying("ok", _BEGIN + "{% endif %}")  # no reasoning at all: there is nothing to switch off
    for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):
        assert "x-octavo-ignored" not in (await plain.chat(**fields)).headers


async def test_thinking_switches_the_template() -> None:
    harness = saying("It rains.</think>", CLOSES)
    await told(harness, thinking={"type": "disabled"})
    assert harness.prompt.endswith("</think>\n\n")
    await told(harness, thinking={"type": "enabled"})
    assert harness.prompt.endswith("assistant:")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_in_messages_reaches_the_template(name: str) -> None:
    harness = saying("ok", OPENS)
    asked = {"role": "user", "content": "hi"}
    await harness.chat(messages=[asked, {"role": "assistant", "content": "ho", name: "Hm."}, asked])
    assert "assistant:[Hm.]ho" in harness.prompt


async def test_the_settings_choose_the_tags() -> None:
    assert await told(saying(SAID, OPENS, reasoning_parser="none")) == (None, SAID)
    said = SAID.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert await told(saying(said, OPENS, reasoning_parser="mistral")) == ("Hm, rain.", "It rains.")
    assert await told(saying(said, OPENS)) == (None, said)


async def test_a_structure_comes_behind_the_reasoning() -> None:
    for template, begin in ((OPENS, r"(\"<think>\" thought BLANK)? "), (OPENED, "thought BLANK ")):
        harness = saying("Hm</think>{}", template)
        await harness.chat(response_format=FORMAT)
        assert f'"start: {begin}(@structure)' in harness.engine.requests[-1].params.grammar
        await harness.context.sandbox.close()
    harness = saying("{}", CLOSES)
    await harness.chat(response_format=FORMAT, reasoning_effort="none")
    assert "thought" not in harness.engine.requests[-1].params.grammar
    await harness.context.sandbox.close()

"""How calls and reasoning are written, by what the templates of model families hold."""

import pytest

from octavo.text.dialect import Dialect, read_dialect

TOOLS = "{%- if tools %}{{ tools | tojson }}{% endif %}"
THINK = ("<think>", "</think>")
# What the families' own templates have in common, in a line each.
FAMILIES: dict[str, tuple[str, Dialect]] = {
    "plain": ("{% for m in messages %}{{ m.content }}{% endfor %} no tools here", Dialect()),
    "hermes": (TOOLS + "<tool_call>\\n{...}</tool_call>", Dialect("hermes", True)),
    "qwen3": (
        TOOLS + "<tool_call></tool_call>{% if enable_thinking is defined %}<think>\\n\\n</think>{% endif %}",
        Dialect("hermes", True, THINK, ("enable_thinking",)),
    ),
    "qwen3-coder": (TOOLS + "<tool_call>\n<function=x>\n<parameter=y>", Dialect("qwen3_coder", True)),
    "llama3": (TOOLS + "<|eot_id|> <|python_tag|>", Dialect("llama3", True)),
    "llama3.2": (TOOLS + '<|eot_id|> {"name": x, "parameters": y}', Dialect("llama3", True)),
    "mistral": (TOOLS + "[TOOL_CALLS]", Dialect("mistral", True)),
    "magistral": (TOOLS + "[TOOL_CALLS] [THINK] [/THINK]", Dialect("mistral", True, ("[THINK]", "[/THINK]"))),
    "deepseek-r1": ("{% if '</think>' in content %}{% endif %}<think>\\n", Dialect("hermes", False, THINK)),
    "other": (TOOLS, Dialect("json", True)),
    "harmony": ("{% set x = reasoning_effort %}", Dialect("hermes", False, None, ("reasoning_effort",))),
    "short": ("{{ tools|length }}", Dialect("json", True)),
    "phi": ("{% if message['tools'] %}{{ message.tools }}{% endif %}", Dialect()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_tells(family: str) -> None:
    template, dialect = FAMILIES[family]
    assert read_dialect(template) == dialect


def test_settings_come_first() -> None:
    template = FAMILIES["qwen3"][0]
    assert read_dialect(template, "llama3_json", "none") == Dialect("llama3", True, None, ("enable_thinking",))
    assert read_dialect(template, "none", "thinking").calls is None
    assert read_dialect(None, "auto", "deepseek_r1") == Dialect(reasoning=THINK)


def test_markers_are_those_that_an_answer_may_hold() -> None:
    dialect = read_dialect(FAMILIES["magistral"][0])
    assert dialect.markers(has_tools=True) == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    assert dialect.markers(has_tools=False) == ("[THINK]", "[/THINK]")
    assert Dialect().markers(has_tools=False) == ()

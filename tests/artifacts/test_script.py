"""Scripts of scripted models: what is read, what is refused, which rule a prompt meets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.artifacts.script import Script, ScriptedRequest, read_script
from octavo.errors import ModelFileError, UnknownModelError


def written(tmp_path: Path, text: str, name: str = "script.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_script_is_a_model_of_its_files_name(tmp_path: Path) -> None:
    path = written(tmp_path, "max_model_len: 512\nrules: [{say: yes please}]", "polite.yaml")
    files = resolve_model(f"scripted:{path}")
    assert (files.name, files.kind, files.weights) == ("polite", "scripted", (path,))
    assert read_model_spec(files).max_model_len == 512
    with pytest.raises(UnknownModelError, match=r"no script 'nowhere\.yaml' here; give scripted:FILE"):
        resolve_model("scripted:nowhere.yaml")


def test_the_three_formats_hold_the_same_rules(tmp_path: Path) -> None:
    rules = [{"contains": "a", "say": ["x", "y"]}, {"echo": True}]
    as_json = written(tmp_path, json.dumps({"rules": rules}), "a.json")
    as_list = written(tmp_path, json.dumps(rules), "b.yaml")
    as_lines = written(tmp_path, "\n".join(map(json.dumps, rules)) + "\n\n", "c.jsonl")
    assert read_script(as_json) == read_script(as_list) == read_script(as_lines)
    assert read_script(written(tmp_path, "", "empty.yaml")) == Script()


@pytest.mark.parametrize(
    "text, reason",
    [
        ("rules: [{say: a, when: b}]", r"unknown field `when` - at `\$\.rules\[0\]`"),
        ("rules: [{say: 3}]", r"at `\$\.rules\[0\]\.say`"),
        ("rules: [{contains: a}]", r"rules\[0\] says nothing; give say, echo, call or think"),
        ("rules: [{say: a, echo: true}]", r"rules\[0\] has both say and echo"),
        ("rules: [{say: a, regex: '('}]", r"rules\[0\]\.regex is not a regular expression"),
        ("rules: [{say: a, delay_ms: 99999}]", r"delay_ms"),
        ("rules: [{say: a, fail_after: -1}]", r"fail_after"),
        ("rules: {say: a}", r"\$\.rules"),
        ("just words", r"is no script"),
        ("rules: [", r"is not well formed"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        read_script(written(tmp_path, text))


def test_a_wrong_line_is_told_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="line 2 is not JSON"):
        read_script(written(tmp_path, '{"say": "a"}\n{"say": ', "s.jsonl"))
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_script(tmp_path / "none.yaml")


def test_the_first_rule_that_holds_whole_answers(tmp_path: Path) -> None:
    script = read_script(
        written(
            tmp_path,
            """
rules:
  - {contains: cat, role: tool, say: a tool's cat}
  - {equals: cat, say: exactly}
  - {regex: "^c.t", contains: s, say: cats}
  - {contains: SECRET, where: prompt, say: from the whole prompt}
""",
        )
    )

    def said(last: str, role: str = "user", prompt: str = "") -> str:
        asked = ScriptedRequest(prompt or last, last, role)
        return script.rule_for(asked).answer(asked)

    assert said("the cat", "tool") == "a tool's cat"
    assert said("cat") == "exactly"
    assert said("cuts") == "cats"
    assert said("hello", prompt="SECRET hello") == "from the whole prompt"
    assert said("the cat") == "the cat", "what meets no rule is echoed"


def test_thoughts_text_and_calls_are_said_in_this_order(tmp_path: Path) -> None:
    rule = {"think": "hm", "say": ["one", "two"], "call": [{"name": "f", "arguments": {"é": 1}}, {"name": "g"}]}
    asked = ScriptedRequest("x", "x")
    script = read_script(written(tmp_path, json.dumps([rule]), "s.json"))
    said = script.rule_for(asked).answer(asked, choice=3)
    assert said == (
        '<think>\nhm\n</think>\n\ntwo\n<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )

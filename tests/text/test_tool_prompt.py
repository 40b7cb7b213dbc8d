"""Tools, calls and results for templates that know none of them."""

import json

from octavo.text.tool_prompt import with_short_ids, with_tools

TOOL = {"type": "function", "function": {"name": "f", "description": "{does} things", "parameters": {}}}
USER = {"role": "user", "content": "hi"}


def test_without_tools_nothing_changes() -> None:
    messages = [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "", "thinking": "x"}]
    assert with_tools(messages, None) == messages


def test_tools_are_described_in_a_system_message() -> None:
    [system, user] = with_tools([USER], [TOOL])
    assert (system["role"], user) == ("system", USER)
    lines = system["content"].split("\n")
    shown = lines[lines.index("<tools>") + 1 : lines.index("</tools>")]
    assert [json.loads(line) for line in shown] == [TOOL["function"]]
    [both, _] = with_tools([{"role": "system", "content": "Be brief."}, USER], [TOOL])
    assert both["content"] == "Be brief.\n\n" + system["content"]


def test_a_template_without_system_messages_has_them_in_the_first_question() -> None:
    [user] = with_tools([USER], [TOOL], takes_system=False)
    [system, _] = with_tools([USER], [TOOL])
    assert user == {"role": "user", "content": system["content"] + "\n\nhi"}


def test_calls_and_results_become_text() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]}
    results = [{"role": "tool", "content": "1", "tool_call_id": "x"}, {"role": "tool", "content": "2"}]
    shown = with_tools([USER, {**called, "content": "Well."}, *results, USER], None)
    assert [message["role"] for message in shown] == ["user", "assistant", "user", "user"]
    assert shown[1]["content"] == 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert shown[2] == {
        "role": "user",
        "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "\nNow answer my question in plain words.",
    }


def test_short_ids_stay_the_same_id() -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_long", "function": {}}, {"id": "abcDEF123"}]},
        {"role": "tool", "content": "1", "tool_call_id": "call_long"},
    ]
    [called, result] = with_short_ids(messages)
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids[0] == result["tool_call_id"] and len(ids[0]) == 9 and ids[0].isalnum()
    assert ids[1] == "abcDEF123"
    assert messages[1]["tool_call_id"] == "call_long"

import pytest

from octavo.errors import InvalidRequestError
from octavo.text.text_model import plain_messages


def test_text_parts_are_joined_and_missing_content_is_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "name": "n"},
    ]
    plain = plain_messages(messages)
    assert [message["content"] for message in plain] == ["a\nb", "", ""]
    assert plain[2]["name"] == "n"
    assert messages[0]["content"] is parts


def test_tool_arguments_are_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    plain = plain_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert plain[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'


def test_reasoning_is_there_under_the_names_that_templates_read():
    plain = plain_messages([{"role": "assistant", "content": "4", "reasoning": "2+2"}])[0]
    assert plain["reasoning_content"] == plain["thinking"] == "2+2"


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ("hi", "messages.0"),
        ([1], "messages.0"),
        ([{"content": "x"}], "messages.0"),
        ([{"role": 1}], "messages.0"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": [7]}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": 7}], "messages.0.tool_calls"),
    ],
)
def test_wrong_messages_name_their_place(messages, param):
    with pytest.raises(InvalidRequestError) as caught:
        plain_messages(messages)
    assert caught.value.param == param

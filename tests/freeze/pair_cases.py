"""The requests whose answers are frozen, as tables: routes by variants, then sequences, in groups of one server each.

Does not: send anything (pair_calls) or hold answers (pairs.jsonl).
The model is scripted: RULES says what is answered to which text, and everything else is echoed.
"""

from __future__ import annotations

import json
from typing import Any

from tests.freeze.pair_calls import ENDLESS, Call, Group

Fields = dict[str, Any]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "arguments": {"city": "Paris"}}
RULES = [
    {"contains": "person", "say": '{"name": "Ann", "age": 3}'},
    {"contains": "no json", "say": "this is none"},
    {"contains": "weather", "role": "user", "think": "I need a tool.", "call": WEATHER},
    {
        "contains": "two calls",
        "role": "user",
        "call": [WEATHER, {"name": "get_weather", "arguments": {"city": "Rome"}}],
    },
    {"role": "tool", "say": "Sunny."},
    {"contains": "think", "think": "Let me see.", "say": "Forty-two."},
    {"contains": "fails at once", "say": "x", "fail_after": 0},
    {"contains": "fails", "say": "half an answer", "fail_after": 4},
    {"contains": "crash", "say": "one, two", "crash_after": 3},
    {"contains": "slow", "say": "one two three four five six seven eight", "delay_ms": 10},
    {"contains": "endless", "say": ENDLESS, "finish": "length", "delay_ms": 5},
    {"contains": "forever", "say": ENDLESS, "finish": "length", "delay_ms": 50},
    {"contains": "choices", "say": ["alpha", "beta", "gamma"]},
    {"contains": "unicode", "say": "Größe 😀 é"},
    {"contains": "empty", "say": ""},
    {"contains": "yes or no", "say": "yes"},
]
SCRIPT = json.dumps({"rules": RULES, "max_model_len": 2048})
JSON_TYPE = {"content-type": "application/json"}
TEXT = "$text$"


def with_text(value: Any, text: str) -> Any:
    """A body with its text put in."""
    if isinstance(value, dict):
        return {name: with_text(item, text) for name, item in value.items()}
    if isinstance(value, list):
        return [with_text(item, text) for item in value]
    return text if value == TEXT else value


# The routes that take a body: name -> path, a good body, a field of the wrong kind, the field that must be there.
POSTS: dict[str, tuple[str, Fields, Fields, str]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, {"messages": 3}, "messages"),
    "completions": ("/v1/completions", {"prompt": TEXT}, {"prompt": {}}, "prompt"),
    "responses": ("/v1/responses", {"input": TEXT}, {"input": 3}, "input"),
    "input_tokens": ("/v1/responses/input_tokens", {"input": TEXT}, {"input": 3}, "input"),
    "messages": (
        "/v1/messages",
        {"max_tokens": 64, "messages": [{"role": "user", "content": TEXT}]},
        {"messages": "x"},
        "messages",
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": TEXT}]},
        {"messages": "x"},
        "messages",
    ),
    "ollama_chat": (
        "/api/chat",
        {"model": "script", "messages": [{"role": "user", "content": TEXT}]},
        {"messages": "x"},
        "messages",
    ),
    "ollama_generate": ("/api/generate", {"model": "script", "prompt": TEXT}, {"prompt": 3}, "prompt"),
    "ollama_embed": ("/api/embed", {"model": "script", "input": TEXT}, {"input": {}}, "input"),
    "ollama_embeddings": ("/api/embeddings", {"model": "script", "prompt": TEXT}, {"prompt": {}}, "prompt"),
    "ollama_show": ("/api/show", {"model": "script"}, {"model": 3}, "model"),
    "ollama_pull": ("/api/pull", {"model": "script"}, {"model": 3}, "model"),
    "embeddings": ("/v1/embeddings", {"input": TEXT}, {"input": {}}, "input"),
    "score": ("/v1/score", {"text_1": TEXT, "text_2": ["one", "two"]}, {"text_2": 3}, "text_1"),
    "rerank": ("/v1/rerank", {"query": TEXT, "documents": ["one", "two"]}, {"documents": 3}, "documents"),
    "tokenize": ("/tokenize", {"prompt": TEXT}, {"prompt": 3}, "prompt"),
    "detokenize": ("/detokenize", {"tokens": [75, 76]}, {"tokens": "x"}, "tokens"),
    "batches": (
        "/v1/batches",
        {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"},
        {"endpoint": 3},
        "input_file_id",
    ),
}
GENERATE = ("chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate")


def post(route: str, name: str, text: str = "Hello there", /, headers: Fields | None = None, **fields: Any) -> Call:
    """A call of a route with its good body and more fields."""
    path, body, _, _ = POSTS[route]
    return Call(
        f"{route}/{name}", path=path, body={**with_text(body, text), **fields}, headers={**JSON_TYPE, **(headers or {})}
    )


def malformed() -> list[Call]:
    """Every route by everything that is wrong whatever its fields are."""
    calls = []
    for route, (path, good, wrong, needed) in POSTS.items():
        body = with_text(good, "Hello there")
        text = json.dumps(body)
        rest = {name: value for name, value in body.items() if name != needed}
        variants: dict[str, Fields] = {
            "good": {"body": body},
            "no_content_type": {"body": body, "headers": {}},
            "text_type": {"body": body, "headers": {"content-type": "text/plain"}},
            "text_type_of_a_page": {
                "body": body,
                "headers": {"content-type": "text/plain", "sec-fetch-site": "same-origin"},
            },
            "page_of_another_site": {"body": body, "headers": {**JSON_TYPE, "origin": "https://evil.example"}},
            "compressed": {"body": body, "headers": {**JSON_TYPE, "content-encoding": "gzip"}},
            "wrong_host": {"body": body, "headers": {**JSON_TYPE, "host": "evil.example"}},
            "no_json": {"body": "{"},
            "no_object": {"body": "[1]"},
            "not_a_number": {"body": text[:-1] + ', "x": NaN}'},
            "repeated_key": {"body": text[:-1] + f", {text[1:]}"},
            "no_utf8": {"body": text[:-1].encode() + b', "x": "\xff"}'},
            "unknown_field": {"body": {**body, "bogus": 1}},
            "needed_is_missing": {"body": rest},
            "wrong_kind": {"body": {**body, **wrong}},
            "null": {"body": {**body, needed: None}},
            "unknown_model": {"body": {**body, "model": "other"}},
            "model_of_wrong_kind": {"body": {**body, "model": 3}},
            "too_large": {"length": 9 << 20, "body": " " * 70_000},
            "get": {"method": "GET"},
            "put": {"method": "PUT", "body": body},
        }
        calls += [
            Call(f"{route}/{name}", **{"path": path, "headers": JSON_TYPE, **fields})
            for name, fields in variants.items()
        ]
    return calls


# Fields with a value that is refused: routes -> fields.
WRONG: dict[tuple[str, ...], list[Fields]] = {
    ("chat", "completions"): [
        {"temperature": -1}, {"temperature": "hot"}, {"top_p": 2}, {"top_k": -5}, {"min_p": 2}, {"typical_p": 0},
        {"n": 0}, {"n": 17}, {"max_tokens": -1}, {"max_tokens": 1 << 40}, {"min_tokens": -1}, {"stop": [""]},
        {"stop": ["x"] * 17}, {"stop_token_ids": [9999]}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}},
        {"presence_penalty": 3}, {"repetition_penalty": 0}, {"seed": "x"}, {"bad_words": [""]},
        {"allowed_token_ids": [-1]}, {"priority": 1 << 31}, {"cache_salt": ""}, {"timeout": 0}, {"queue_timeout": -1},
        {"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": {"bogus": 1}},
        {"stream": "maybe"}, {"use_beam_search": True, "n": 2, "stream": True}, {"early_stopping": "soon"},
        {"response_format": {"type": "yaml"}}, {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"grammar": "start: ["}}, {"guided_json": {"type": "nothing"}},
        {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, {"prompt_logprobs": 21},
        {"truncate_prompt_tokens": -2}, {"dry_multiplier": -1}, {"lora_request": {"x": 1}},
    ],
    ("chat",): [
        {"messages": []}, {"messages": [{"role": "king", "content": "x"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "user", "content": "x", "bogus": 1}]},
        {"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"tools": [{"type": "function"}]},
        {"tool_choice": "required"}, {"tools": 3}, {"functions": [{"name": "f"}]}, {"modalities": ["audio"]},
        {"reasoning_effort": "huge"}, {"chat_template": "x"}, {"documents": [{"text": "x"}]}, {"echo": True},
        {"max_completion_tokens": -1}, {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ("completions",): [
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [300]}, {"prompt": ["x"] * 257}, {"logprobs": 21},
        {"logprobs": -1}, {"suffix": "x"}, {"best_of": 1, "n": 2}, {"max_tokens": 0}, {"echo": 3},
        {"prompt": "x" * 3000}, {"prompt": "x" * 2047, "max_tokens": 5},
    ],
    ("responses",): [
        {"input": []}, {"input": [{"type": "bogus"}]}, {"max_output_tokens": 0}, {"max_tokens": 5}, {"n": 2},
        {"prompt": {"id": "x"}}, {"conversation": "x"}, {"previous_response_id": "resp_none"}, {"store": "x"},
        {"background": True, "store": False}, {"include": ["bogus"]}, {"top_logprobs": 21}, {"truncation": "some"},
        {"tools": [{"type": "function"}]}, {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema"}}}, {"metadata": {"k": "v" * 513}}, {"user": "u" * 513},
        {"input": [{"type": "item_reference", "id": "msg_none"}]}, {"temperature": -1},
    ],
    ("messages",): [
        {"max_tokens": 0}, {"max_tokens": "x"}, {"temperature": -1}, {"top_p": 2}, {"top_k": "x"},
        {"stop_sequences": [""]}, {"thread": {"id": "x"}}, {"container": "x"}, {"mcp_servers": [{"x": 1}]},
        {"tools": [{"name": "f"}]}, {"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "maybe"}}, {"output_config": {"format": {"type": "yaml"}}}, {"system": 3},
        {"messages": []}, {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}]}]},
        {"messages": [{"role": "user", "content": "x" * 3000}]},
    ],
    ("ollama_chat", "ollama_generate"): [
        {"options": {"temperature": -1}}, {"options": 3}, {"options": {"bogus": 1}}, {"options": {"mirostat": 1}},
        {"format": "yaml"}, {"format": {"type": "nothing"}}, {"think": "hard"}, {"images": ["x"]}, {"context": [1]},
        {"options": {"stop": [""]}}, {"options": {"num_predict": "x"}}, {"stream": 3},
    ],
    ("embeddings",): [
        {"input": []}, {"input": [[]]}, {"input": [300]}, {"dimensions": 0}, {"dimensions": 65},
        {"encoding_format": "hex"}, {"input": "x" * 3000}, {"truncate_prompt_tokens": -2},
    ],
    ("score",): [{"text_1": ["a", "b"], "text_2": ["a"]}, {"text_1": []}],
    ("rerank",): [{"documents": []}, {"top_n": -1}, {"documents": [{"x": 1}]}],
    ("tokenize",): [{"messages": []}, {"prompt": "x", "return_token_strs": 3}],
    ("detokenize",): [{"tokens": [300]}, {"tokens": [-1]}],
}  # fmt: skip

# Good requests: name -> text and fields, by routes.
FUNCTION = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NAMED = {"type": "function", "name": "get_weather", "parameters": CITY}
ANTHROPIC_TOOL = {"name": "get_weather", "input_schema": CITY}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
USAGE = {"include_usage": True}
CALLED = [
    {"role": "user", "content": "how is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "25 degrees"},
]
GOOD: dict[tuple[str, ...], dict[str, tuple[str, Fields]]] = {
    GENERATE: {
        "unicode": ("unicode", {}),
        "empty": ("empty", {}),
        "fails_at_once": ("fails at once", {}),
        "fails": ("fails", {}),
        "thinks": ("think", {}),
        "unknown_fields": ("Hello", {"bogus": 1, "other": {"x": 1}}),
        "other_name": ("Hello", {"model": "alias"}),
    },
    ("chat", "completions"): {
        "cut": ("Hello there", {"max_tokens": 4}),
        "stop": ("Hello there", {"stop": "th"}),
        "stop_kept": ("Hello there", {"stop": ["th"], "include_stop_str_in_output": True}),
        "stop_id": ("Hello there", {"stop_token_ids": [111]}),
        "choices": ("choices", {"n": 3}),
        "best_of": ("choices", {"n": 1, "seed": 3, "temperature": 0.5}),
        "beams": ("Hello", {"use_beam_search": True, "n": 2, "max_tokens": 4}),
        "min_tokens": ("empty", {"min_tokens": 2, "max_tokens": 3}),
        "ignore_eos": ("Hello", {"ignore_eos": True, "max_tokens": 9}),
        "token_ids": ("Hello", {"return_token_ids": True}),
        "prompt_logprobs": ("Hi", {"prompt_logprobs": 1, "max_tokens": 2}),
        "truncated_prompt": ("Hello there", {"truncate_prompt_tokens": 8}),
        "schema": ("a person", {"response_format": JSON_SCHEMA}),
        "json_object": ("a person", {"response_format": {"type": "json_object"}}),
        "no_json": ("no json", {"response_format": JSON_SCHEMA}),
        "choice": ("yes or no", {"structured_outputs": {"choice": ["yes", "no"]}}),
        "regex": ("yes or no", {"guided_regex": "y[a-z]+"}),
        "grammar": ("yes or no", {"guided_grammar": 'start: "yes" | "no"'}),
        "sampling": ("Hello", {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "logit_bias": {"9": 1}}),
        "hints": ("Hello", {"service_tier": "auto", "prediction": {"type": "content", "content": "x"}, "user": "me"}),
        "served_fields": ("Hello", {"priority": -3, "cache_salt": "s", "timeout": 60, "queue_timeout": 60}),
        "timeout": ("endless", {"timeout": 0.2, "max_tokens": 1000}),
        "usage": ("Hello", {"stream": True, "stream_options": USAGE}),
        "usage_always": ("Hello", {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}}),
        "stream_choices": ("choices", {"stream": True, "n": 3, "stream_options": USAGE}),
        "stream_stop": ("Hello there", {"stream": True, "stop": "th"}),
        "stream_cut": ("Hello there", {"stream": True, "max_tokens": 4}),
        "stream_timeout": ("endless", {"stream": True, "timeout": 0.2, "max_tokens": 1000}),
        "stream_no_json": ("no json", {"stream": True, "response_format": JSON_SCHEMA}),
        "stream_token_ids": ("Hello", {"stream": True, "return_token_ids": True}),
        "stream_prompt_logprobs": ("Hi", {"stream": True, "prompt_logprobs": 1, "max_tokens": 2}),
    },
    ("chat",): {
        "logprobs": ("Hi", {"logprobs": True, "top_logprobs": 2}),
        "stream_logprobs": ("Hi", {"stream": True, "logprobs": True, "top_logprobs": 2}),
        "tokens_as_ids": ("Hi", {"logprobs": True, "return_tokens_as_token_ids": True}),
        "call": ("weather", {"tools": [FUNCTION]}),
        "call_required": ("weather", {"tools": [FUNCTION], "tool_choice": "required"}),
        "call_named": ("weather", {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
        "call_none": ("weather", {"tools": [FUNCTION], "tool_choice": "none"}),
        "two_calls": ("two calls", {"tools": [FUNCTION]}),
        "one_call": ("two calls", {"tools": [FUNCTION], "parallel_tool_calls": False}),
        "stream_call": ("weather", {"tools": [FUNCTION], "stream": True, "stream_options": USAGE}),
        "stream_two_calls": ("two calls", {"tools": [FUNCTION], "stream": True}),
        "called": ("", {"messages": CALLED, "tools": [FUNCTION]}),
        "hosted_tool": ("Hello", {"tools": [{"type": "web_search"}, FUNCTION]}),
        "effort": ("think", {"reasoning_effort": "low"}),
        "system": ("", {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]}),
        "goes_on": ("", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "continue_final_message": True, "add_generation_prompt": False}),
        "max_completion_tokens": ("Hello there", {"max_completion_tokens": 3}),
        "parts": ("", {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]}),
    },
    ("completions",): {
        "several": ("", {"prompt": ["one", "two"]}),
        "several_choices": ("", {"prompt": ["choices", "two"], "n": 2}),
        "ids": ("", {"prompt": [75, 76]}),
        "lists_of_ids": ("", {"prompt": [[75, 76], [77]]}),
        "logprobs": ("Hi", {"logprobs": 2}),
        "stream_logprobs": ("Hi", {"logprobs": 2, "stream": True}),
        "echo": ("Hi", {"echo": True, "logprobs": 1}),
        "echo_alone": ("Hi", {"echo": True, "max_tokens": 0, "logprobs": 1}),
        "stream_echo": ("Hi", {"echo": True, "stream": True}),
        "best_of_two": ("choices", {"best_of": 2, "n": 1, "seed": 1}),
        "n_predict": ("Hello", {"n_predict": 3}),
        "stream_several": ("", {"prompt": ["one", "two"], "stream": True}),
        "key_and_scores": ("Hi", {"prompt_logprobs": 1, "max_tokens": 1}),
    },
    ("chat", "completions", "responses", "messages"): {
        "stream": ("Hello there", {"stream": True}),
        "stream_unicode": ("unicode", {"stream": True}),
        "stream_empty": ("empty", {"stream": True}),
        "stream_fails": ("fails", {"stream": True}),
        "stream_fails_at_once": ("fails at once", {"stream": True}),
        "stream_thinks": ("think", {"stream": True}),
    },
    ("chat", "messages"): {"stream_crash": ("crash", {"stream": True})},

    ("responses",): {
        "cut": ("Hello there", {"max_output_tokens": 4}),
        "stream_cut": ("Hello there", {"max_output_tokens": 4, "stream": True}),
        "stop": ("Hello there", {"stop": "th"}),
        "instructions": ("Hello", {"instructions": "Be kind."}),
        "call": ("weather", {"tools": [NAMED]}),
        "stream_call": ("weather", {"tools": [NAMED], "stream": True}),
        "stream_two_calls": ("two calls", {"tools": [NAMED], "stream": True}),
        "called": ("", {"input": [{"role": "user", "content": "how is it?"}, {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c1", "output": "25"}], "tools": [NAMED]}),
        "schema": ("a person", {"text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}}),
        "logprobs": ("Hi", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        "stream_logprobs": ("Hi", {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": True}),
        "labels": ("Hello", {"metadata": {"k": "v"}, "user": "u", "prompt_cache_key": "p", "safety_identifier": "s"}),
        "hints": ("Hello", {"text": {"verbosity": "low"}, "service_tier": "auto", "client_metadata": {"a": 1}}),
        "hosted_tool": ("Hello", {"tools": [{"type": "web_search"}]}),
        "truncation": ("", {"input": [{"role": "user", "content": "x" * 2000}, {"role": "user", "content": "Hello"}], "truncation": "auto"}),
        "no_store": ("Hello", {"store": False}),
        "timeout": ("endless", {"timeout": 0.2}),
        "stream_timeout": ("endless", {"timeout": 0.2, "stream": True}),
    },
    ("messages",): {
        "cut": ("Hello there", {"max_tokens": 4}),
        "stream_cut": ("Hello there", {"max_tokens": 4, "stream": True}),
        "stop": ("Hello there", {"stop_sequences": ["th"]}),
        "stream_stop": ("Hello there", {"stop_sequences": ["th"], "stream": True}),
        "system": ("Hello", {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]}),
        "call": ("weather", {"tools": [ANTHROPIC_TOOL]}),
        "call_any": ("weather", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
        "stream_call": ("weather", {"tools": [ANTHROPIC_TOOL], "stream": True}),
        "stream_two_calls": ("two calls", {"tools": [ANTHROPIC_TOOL], "stream": True}),
        "called": ("", {"messages": [{"role": "user", "content": "how is it?"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "25"}]}], "tools": [ANTHROPIC_TOOL]}),
        "hides_thinking": ("think", {"thinking": {"type": "adaptive", "display": "omitted"}}),
        "schema": ("a person", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        "full_context": ("endless" + "x" * 1990, {"max_tokens": 5000}),
        "prefilled": ("", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        "beta": ("Hello", {"betas": ["x"], "metadata": {"user_id": "u"}, "speed": "fast"}),
        "timeout": ("endless", {"timeout": 0.2}),
        "stream_timeout": ("endless", {"timeout": 0.2, "stream": True}),
    },
    ("ollama_chat", "ollama_generate"): {
        "whole": ("Hello there", {"stream": False}),
        "whole_thinks": ("think", {"stream": False}),
        "whole_fails": ("fails", {"stream": False}),
        "whole_cut": ("Hello there", {"stream": False, "options": {"num_predict": 4}}),
        "cut": ("Hello there", {"options": {"num_predict": 4, "temperature": 0, "num_ctx": 100}}),
        "stop": ("Hello there", {"options": {"stop": ["th"]}}),
        "json": ("a person", {"format": "json", "stream": False}),
        "schema": ("a person", {"format": SCHEMA}),
        "logprobs": ("Hi", {"logprobs": True, "top_logprobs": 1, "stream": False}),
        "latest": ("Hello", {"model": "script:latest", "keep_alive": "5m"}),
        "timeout": ("endless", {"timeout": 0.2}),
    },
    ("ollama_chat",): {
        "crash": ("crash", {}),
        "load": ("", {"messages": []}),
        "call": ("weather", {"tools": [FUNCTION]}),
        "whole_call": ("weather", {"tools": [FUNCTION], "stream": False}),
        "called": ("", {"messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {}}}]}, {"role": "tool", "tool_name": "get_weather", "content": "25"}]}),
    },
    ("ollama_generate",): {
        "load": ("", {"prompt": ""}),
        "raw": ("Hello", {"raw": True, "stream": False}),
        "system": ("Hello", {"system": "Be kind.", "stream": False}),
    },
    ("embeddings",): {
        "several": ("", {"input": ["one", "two"]}),
        "ids": ("", {"input": [75, 76]}),
        "base64": ("Hello", {"encoding_format": "base64"}),
        "dimensions": ("Hello", {"dimensions": 4}),
        "truncated": ("x" * 3000, {"truncate_prompt_tokens": -1}),
    },
    ("ollama_embed",): {"several": ("", {"input": ["one", "two"]}), "truncated": ("x" * 3000, {}), "long": ("x" * 3000, {"truncate": False})},
    ("score",): {"pairs": ("", {"text_1": ["a", "b"], "text_2": ["a", "c"]})},
    ("rerank",): {"top": ("one", {"top_n": 1, "return_documents": False}), "objects": ("one", {"documents": [{"text": "one"}]})},
    ("tokenize",): {"strings": ("Hé", {"return_token_strs": True}), "long": ("x" * 3000, {})},
    ("count_tokens", "input_tokens"): {"more": ("Hello", {"tools": []})},
    ("count_tokens",): {"tools": ("Hello", {"tools": [ANTHROPIC_TOOL], "system": "Be kind."})},
    ("input_tokens",): {"tools": ("Hello", {"tools": [NAMED], "instructions": "Be kind."})},
}  # fmt: skip


def by_fields() -> list[Call]:
    """Every route by what its fields may say."""
    calls = []
    for routes, variants in GOOD.items():
        calls += [post(route, name, text, **fields) for route in routes for name, (text, fields) in variants.items()]
    for routes, bodies in WRONG.items():
        for route in routes:
            calls += [post(route, f"wrong_{number:02}_{'_'.join(body)}", **body) for number, body in enumerate(bodies)]
    return calls


# Everything that takes no body.
GETS = (
    "/", "/livez", "/readyz", "/health", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/script",
    "/v1/models/alias", "/v1/models/none", "/tokenizer_info", "/api/version", "/api/tags", "/api/ps", "/dashboard",
    "/login", "/static/chat.js", "/static/none.js", "/v1/files", "/v1/files/none", "/v1/files/none/content", "/v1/batches",
    "/v1/batches/none", "/v1/responses/none", "/v1/responses/none/input_items", "/v1/requests/none/explain", "/nowhere",
    "/v1", "/v1/", "/v1/chat", "//v1/models", "/v1/models/", "/V1/models", "/v1/../v1/models", "/metrics?x=1",
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "POST": ("/v1/models", "/nowhere", "/v1/responses/compact", "/api/push", "/api/create", "/api/copy", "/logout", "/metrics", "/v1/requests/none/cancel", "/v1/responses/none/cancel", "/v1/batches/none/cancel"),
    "DELETE": ("/v1/files/none", "/v1/responses/none", "/api/delete", "/v1/models/script", "/v1/chat/completions"),
    "HEAD": ("/", "/livez", "/health", "/v1/models", "/api/version", "/api/tags", "/nowhere", "/v1/chat/completions"),
    "OPTIONS": ("/", "/v1/models", "/v1/chat/completions", "/nowhere", "*"),
    "PATCH": ("/v1/models",),
    "TRACE": ("/v1/models",),
}  # fmt: skip
ANTHROPIC = {"anthropic-version": "2023-06-01"}
HTML = {"accept": "text/html"}
RAW = {
    "no_host": b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two_hosts": b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    "no_http": b"garbage\r\n\r\n",
    "http_10": b"GET /livez HTTP/1.0\r\nHost: $HOST$\r\n\r\n",
    "http_30": b"GET /livez HTTP/3.0\r\nHost: $HOST$\r\n\r\n",
    "connect": b"CONNECT $HOST$ HTTP/1.1\r\nHost: $HOST$\r\n\r\n",
    "two_lengths": b"POST /v1/completions HTTP/1.1\r\nHost: $HOST$\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length_and_chunks": b"POST /v1/completions HTTP/1.1\r\nHost: $HOST$\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
    "other_coding": b"POST /v1/completions HTTP/1.1\r\nHost: $HOST$\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "large_head": b"GET /livez HTTP/1.1\r\nHost: $HOST$\r\nX-A: " + b"a" * 17000 + b"\r\nConnection: close\r\n\r\n",
    "many_headers": b"GET /livez HTTP/1.1\r\nHost: $HOST$\r\n" + b"X-A: a\r\n" * 120 + b"Connection: close\r\n\r\n",
    "upgrade": b"GET /livez HTTP/1.1\r\nHost: $HOST$\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    "chunked": b'POST /detokenize HTTP/1.1\r\nHost: $HOST$\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n{"tokens":[75] \r\n1\r\n}\r\n0\r\n\r\n',
}  # fmt: skip


def around() -> list[Call]:
    """Routes without a body, other methods, unknown paths, headers, and bytes that are no HTTP."""
    calls = [Call(f"GET {path}", "GET", path) for path in GETS]
    calls += [Call(f"{method} {path}", method, path) for method, paths in METHODS.items() for path in paths]
    calls += [
        Call(f"anthropic GET {path}", "GET", path, headers=ANTHROPIC) for path in GETS if path.startswith("/v1/m")
    ]
    calls += [
        Call(f"html GET {path}", "GET", path, headers=HTML)
        for path in ("/", "/docs", "/dashboard", "/login", "/nowhere")
    ]
    calls += [Call(f"anthropic/{name}", path="/v1/messages", body=body, headers=JSON_TYPE) for name, body in
              {"bad_json": "{", "no_model": {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}}.items()]  # fmt: skip
    calls += [Call(f"raw/{name}", raw=data) for name, data in RAW.items()]
    named = {"x-request-id": "mine-1"}
    bad = {"x-request-id": "a b\tc" * 80}
    calls += [
        post("chat", "named", headers=named),
        Call("explain/ended", "GET", "/v1/requests/mine-1/explain", drops=("events",)),
        Call("cancel/ended", "POST", "/v1/requests/mine-1/cancel"),
        post("chat", "badly_named", headers=bad),
    ]
    return calls


# Sequences: calls that need what earlier ones left.

BOUNDARY = "freeze"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
LINES = (
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "one"}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": -1}},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fails"}},
)
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}


def form(content: str | None, purpose: str | None = "batch", **fields: str) -> str:
    """The body of an upload."""
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    given = {**({} if purpose is None else {"purpose": purpose}), **fields}
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in given.items()]
    if content is not None:
        parts.append(f'{head}"file"; filename="in.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n{content}\r\n')
    return "".join(parts) + f"--{BOUNDARY}--\r\n"


def lines(*items: Any) -> str:
    """A batch's file."""
    return "\n".join(item if isinstance(item, str) else json.dumps(item) for item in items)


def stored_responses() -> list[Call]:
    """Responses that are kept, gone on from, read again, run in the background, cancelled and deleted."""
    here = "/v1/responses/$first$"
    behind = "/v1/responses/$second$"
    return [
        post("responses", "stored", "First question", metadata={"k": "v"}) | saving(first="id"),
        Call("responses/get", "GET", here),
        Call("responses/items", "GET", f"{here}/input_items"),
        Call("responses/get_as_stream", "GET", f"{here}?stream=true"),
        post("responses", "next", "Second question", previous_response_id="$first$") | saving(second="id"),
        Call("responses/next_items", "GET", f"{behind}/input_items?order=asc"),
        Call("responses/next_items_page", "GET", f"{behind}/input_items?order=asc&limit=1"),
        *(
            Call(f"responses/items?{query}", "GET", f"{behind}/input_items?{query}")
            for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none")
        ),
        *(
            Call(f"responses/get?{query}", "GET", f"{here}?{query}")
            for query in ("stream=maybe", "starting_after=1", "include=bogus")
        ),
        Call("responses/cancel_ended", "POST", f"{here}/cancel"),
        Call("responses/delete", "DELETE", here),
        Call("responses/get_deleted", "GET", here),
        Call("responses/delete_again", "DELETE", here),
        post("responses", "next_of_kept", "Third question", previous_response_id="$second$"),
        post("responses", "next_of_deleted", "Third question", previous_response_id="$first$"),
        post("responses", "background", "slow", background=True) | saving(third="id"),
        Call("responses/background_ends", "GET", "/v1/responses/$third$", until=("status", ("completed", "failed"))),
        Call("responses/background_stream", "GET", "/v1/responses/$third$?stream=true"),
        Call("responses/background_rest", "GET", "/v1/responses/$third$?stream=true&starting_after=3"),
        Call("responses/background_rest_of_none", "GET", "/v1/responses/$third$?stream=true&starting_after=999"),
        post("responses", "background_endless", "endless", background=True) | saving(fourth="id"),
        Call("responses/background_cancel", "POST", "/v1/responses/$fourth$/cancel", drops=("output", "usage")),
        Call("responses/background_cancelled", "GET", "/v1/responses/$fourth$", drops=("output", "usage")),
        post("responses", "background_stream_made", "slow", background=True, stream=True),
        post("responses", "background_fails", "fails at once", background=True) | saving(fifth="id"),
        Call("responses/background_failed", "GET", "/v1/responses/$fifth$", until=("status", ("completed", "failed"))),
    ]


def batches() -> list[Call]:
    """Uploads, lists, a batch with answers and failures, and batches that fail before they begin."""
    upload = {"path": "/v1/files", "headers": FORM}
    no_json, twice, stream, other = (
        lines("{", LINES[0]),
        lines(LINES[0], LINES[0]),
        lines({**LINES[0], "body": {"prompt": "x", "stream": True}}),
        lines({**LINES[0], "url": "/v1/embeddings"}),
    )
    calls = [
        Call("files/upload", **upload, body=form(lines(*LINES)), save={"file": "id"}),
        Call("files/upload_with_expiry", **upload, body=form("x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}), save={"other": "id"}),
        Call("files/upload_bad_expiry", **upload, body=form("x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"})),
        Call("files/upload_no_file", **upload, body=form(None)),
        Call("files/upload_no_purpose", **upload, body=form("x", None)),
        Call("files/upload_other_purpose", **upload, body=form("x", "fine-tune")),
        Call("files/upload_more_fields", **upload, body=form("x", bogus="1"), save={"third": "id"}),
        Call("files/upload_json", path="/v1/files", body={}, headers=JSON_TYPE),
        Call("files/upload_broken", **upload, body="--freeze\r\nnothing"),
        Call("files/get", "GET", "/v1/files/$file$"),
        Call("files/content", "GET", "/v1/files/$file$/content"),
        Call("files/list", "GET", "/v1/files"),
        *(Call(f"files/list?{query}", "GET", f"/v1/files?{query}") for query in ("limit=1", "limit=0", "order=asc", "order=up", "after=$file$", "after=none", "purpose=batch", "purpose=other")),
        Call("files/delete", "DELETE", "/v1/files/$third$"),
        Call("files/get_deleted", "GET", "/v1/files/$third$"),
        Call("batches/create", path="/v1/batches", body={**BATCH, "input_file_id": "$file$", "metadata": {"k": "v"}}, headers=JSON_TYPE, save={"batch": "id", "output": "output_file_id"}, drops=("status", "request_counts", "in_progress_at", "completed_at", "finalizing_at", "output_file_id", "error_file_id")),
        Call("batches/ends", "GET", "/v1/batches/$batch$", until=("status", ("completed", "failed")), save={"output": "output_file_id", "errors": "error_file_id"}),
        Call("batches/output", "GET", "/v1/files/$output$/content"),
        Call("batches/errors", "GET", "/v1/files/$errors$/content"),
        Call("batches/output_file", "GET", "/v1/files/$output$"),
        Call("batches/cancel_ended", "POST", "/v1/batches/$batch$/cancel"),
        Call("batches/list", "GET", "/v1/batches"),
        Call("batches/list?limit=0", "GET", "/v1/batches?limit=0"),
    ]  # fmt: skip
    for name, fields in {
        "no_file": {"input_file_id": "file-none"},
        "endpoint": {"input_file_id": "$file$", "endpoint": "/v1/files"},
        "window": {"input_file_id": "$file$", "completion_window": "1h"},
        "metadata": {"input_file_id": "$file$", "metadata": {"k": 3}},
        "field": {"input_file_id": "$file$", "bogus": 3},
    }.items():
        calls.append(Call(f"batches/wrong_{name}", path="/v1/batches", body={**BATCH, **fields}, headers=JSON_TYPE))
    for name, content in {
        "no_json": no_json,
        "twice": twice,
        "stream": stream,
        "other_url": other,
        "nothing": "",
    }.items():
        calls += [
            Call(f"batches/{name}/upload", **upload, body=form(content), save={"bad": "id"}),
            Call(f"batches/{name}/create", path="/v1/batches", body={**BATCH, "input_file_id": "$bad$"}, headers=JSON_TYPE, save={"failed": "id"}, drops=("status", "errors", "failed_at")),
            Call(f"batches/{name}/ends", "GET", "/v1/batches/$failed$", until=("status", ("completed", "failed"))),
        ]  # fmt: skip
    return calls


def retries() -> list[Call]:
    """Idempotency-Key and Last-Event-ID over every route that generates."""
    calls = []
    for route in GENERATE:
        key = {"idempotency-key": f"key-{route}"}
        calls += [
            post(route, "keyed", headers=key),
            post(route, "keyed_again", headers=key),
            post(route, "keyed_other_body", "Another", headers=key),
            post(route, "key_of_spaces", headers={"idempotency-key": "a b"}),
            post(route, "key_too_long", headers={"idempotency-key": "k" * 256}),
        ]
    for route in ("chat", "completions", "messages", "responses"):
        key = {"idempotency-key": f"stream-{route}"}
        calls += [
            post(route, "keyed_stream", headers=key, stream=True),
            post(route, "keyed_stream_again", headers=key, stream=True),
            post(route, "keyed_stream_as_whole", headers=key),
            post(route, "resumed", headers={**key, "last-event-id": "4"}, stream=True),
            post(route, "resumed_bad_id", headers={**key, "last-event-id": "x"}, stream=True),
            post(route, "resumed_without_key", headers={"last-event-id": "4"}, stream=True),
            post(route, "resumed_of_nothing", headers={"idempotency-key": f"none-{route}", "last-event-id": "4"}, stream=True),
        ]  # fmt: skip
    several = {"idempotency-key": "several"}
    usage = {"stream": True, "stream_options": USAGE}
    calls += [
        post("completions", "keyed_choices", "choices", headers=several, n=3, **usage),
        *(post("completions", f"resumed_choices_{place}", "choices", headers={**several, "last-event-id": place}, n=3, **usage) for place in ("2,-,1", "6.,5.,6.", "6.,5.,6.;u", "1,1")),
        post("chat", "keyed_fails", "fails", headers={"idempotency-key": "fails"}),
        post("chat", "keyed_fails_again", "fails", headers={"idempotency-key": "fails"}),
        post("chat", "keyed_refused", headers={"idempotency-key": "refused"}, temperature=-1),
        post("chat", "keyed_after_refusal", headers={"idempotency-key": "refused"}),
        post("completions", "keyed_scores", headers={"idempotency-key": "scores"}, prompt_logprobs=1),
        post("completions", "keyed_running", "slow", headers={"idempotency-key": "running"}, stream=True) | leaving(),
        post("completions", "keyed_running_again", "slow", headers={"idempotency-key": "running"}, stream=True),
        post("chat", "keyed_thinks", "think", headers={"idempotency-key": "thinks"}, stream=True),
        post("chat", "resumed_thinks", "think", headers={"idempotency-key": "thinks", "last-event-id": "9"}, stream=True),
        post("embeddings", "keyed", headers={"idempotency-key": "vectors"}),
    ]  # fmt: skip
    return calls


def disconnects() -> list[Call]:
    """Clients that leave, requests that are cancelled, and what is counted of them."""
    idle = ("open_requests", (0,))
    lasting: dict[str, Fields] = {"completions": {"max_tokens": 1500}, "messages": {"max_tokens": 1500}}
    calls: list[Call] = []
    for route in GENERATE:
        calls += [
            post(route, "left", "endless", stream=True, **lasting.get(route, {})) | leaving(),
            Call(f"{route}/idle_after_left", "GET", "/health", until=idle),
        ]
    for route in GENERATE:
        name = f"cancel-{route}"
        begun = post(
            route,
            "to_cancel",
            "endless",
            headers={"x-request-id": name},
            **lasting.get(route, {}),
            **({"stream": False} if route.startswith("ollama") else {}),
        )
        calls += [
            begun | background(),
            Call(
                f"{route}/runs",
                "GET",
                f"/v1/requests/{name}/explain",
                until=("explanations.0.state", ("decode",)),
                drops=("explanations", "queue"),
            ),
            Call(f"{route}/cancel", "POST", f"/v1/requests/{name}/cancel"),
            Call(f"{route}/cancelled", join=begun.name),
        ]
    streamed = post("chat", "stream_to_cancel", "endless", headers={"x-request-id": "cancel-stream"}, stream=True)
    calls += [
        streamed | background(),
        Call("chat/stream_runs", "GET", "/v1/requests/cancel-stream/explain", until=("explanations.0.state", ("decode",)), drops=("explanations", "queue")),
        Call("admin/cancel", action="admin cancel cancel-stream"),
        Call("chat/stream_cancelled", join=streamed.name),
        Call("idle", "GET", "/health", until=idle),
        *(Call(f"admin/{verb}", action=f"admin {verb}") for verb in ("status", "explain", "reset_prefix_cache", "reload_keys", "pause", "resume", "cancel_all", "cancel", "nothing", "explain none", "drain sometime", "statistics")),
        Call("after/metrics", "GET", "/metrics", shows=("octavo_requests_failed_total", "octavo_ignored_fields_total", "octavo_running_requests", "octavo_waiting_requests", "octavo_kv_blocks_used")),
    ]  # fmt: skip
    return calls


def saving(**places: str) -> Fields:
    """With parts of the answer saved."""
    return {"save": places}


def leaving() -> Fields:
    """With a client that leaves after the first event."""
    return {"leaves": True}


def background() -> Fields:
    """With the next calls beside it."""
    return {"in_background": True}


# Keys.

KEYS = """
[[keys]]
name = "alice"
key = "sk-alice-0123456789"
tenant = "a"
dashboard = true
metrics = true

[[keys]]
name = "bob"
key = "sk-bob-0123456789"
tenant = "b"
priority = 2
max_priority = 0

[[keys]]
name = "rates"
key = "sk-rates-0123456789"
requests_per_minute = 2

[[keys]]
name = "tokens"
key = "sk-tokens-0123456789"
tokens_per_minute = 40

[[keys]]
name = "one"
key = "sk-one-0123456789"
max_concurrent = 1

[[keys]]
name = "small"
key = "sk-small-0123456789"
max_files = 1
max_storage_bytes = 400
max_pending_batches = 1
"""


def bearer(name: str) -> Fields:
    """The header of a key."""
    return {"authorization": f"Bearer sk-{name}-0123456789"}


def keyed() -> list[Call]:
    """Authentication, rights, limits and tenants."""
    calls = [Call(f"no key GET {path}", "GET", path) for path in GETS]
    calls += [Call(f"no key {method} {path}", method, path) for method, paths in METHODS.items() for path in paths]
    calls += [
        Call(f"no key/{route}", path=POSTS[route][0], body=with_text(POSTS[route][1], "x"), headers=JSON_TYPE)
        for route in POSTS
    ]
    calls += [
        Call(f"no key html {path}", "GET", path, headers=HTML)
        for path in ("/", "/docs", "/dashboard", "/login", "/v1/models")
    ]
    for name, headers in {
        "bearer": bearer("alice"),
        "x_api_key": {"x-api-key": "sk-alice-0123456789"},
        "both_second_wrong": {**bearer("alice"), "x-api-key": "wrong"},
        "lower_case_scheme": {"authorization": "bearer sk-alice-0123456789"},
        "basic": {"authorization": "Basic sk-alice-0123456789"},
        "no_scheme": {"authorization": "sk-alice-0123456789"},
        "anthropic_refused": {**ANTHROPIC, "authorization": "Basic x"},
        "other_host": {**bearer("alice"), "host": "evil.example"},
        "other_site": {**bearer("alice"), "origin": "https://evil.example"},
    }.items():
        calls.append(Call(f"key/{name}", "GET", "/v1/models", headers=headers))
    for path in ("/health", "/metrics", "/dashboard", "/dashboard/feed", "/v1/files", "/docs", "/"):
        calls += [Call(f"alice GET {path}", "GET", path, headers=bearer("alice"))] if path != "/dashboard/feed" else []
        calls += [Call(f"bob GET {path}", "GET", path, headers=bearer("bob"))]
    alice, bob = {**JSON_TYPE, **bearer("alice")}, {**JSON_TYPE, **bearer("bob")}
    calls += [
        post("chat", "bob_too_urgent", headers=bearer("bob"), priority=-1),
        post("chat", "bob_urgent_enough", headers=bearer("bob"), priority=0),
        post("responses", "of_alice", headers=bearer("alice")) | saving(mine="id"),
        Call("responses/of_alice_for_bob", "GET", "/v1/responses/$mine$", headers=bob),
        Call("responses/of_alice_for_alice", "GET", "/v1/responses/$mine$", headers=alice),
        post("responses", "next_for_bob", headers=bearer("bob"), previous_response_id="$mine$"),
        post("completions", "named_by_alice", headers={**bearer("alice"), "x-request-id": "of-alice"}),
        Call("explain/of_alice_for_bob", "GET", "/v1/requests/of-alice/explain", headers=bob),
        post("completions", "key_of_alice", headers={**bearer("alice"), "idempotency-key": "same"}),
        post("completions", "key_of_bob", "Another", headers={**bearer("bob"), "idempotency-key": "same"}),
        Call("files/of_alice", path="/v1/files", body=form(lines(*LINES)), headers={**FORM, **bearer("alice")}, save={"file": "id"}),
        Call("files/of_alice_for_bob", "GET", "/v1/files/$file$", headers=bob),
        Call("files/none_of_bob", "GET", "/v1/files", headers=bob),
        Call("batches/of_alice_for_bob", path="/v1/batches", body={**BATCH, "input_file_id": "$file$"}, headers=bob),
        Call("files/small_first", path="/v1/files", body=form("x" * 300), headers={**FORM, **bearer("small")}),
        Call("files/small_second", path="/v1/files", body=form("x"), headers={**FORM, **bearer("small")}),
        *(post("chat", f"rates_{number}", headers=bearer("rates")) for number in range(3)),
        Call("rates/models", "GET", "/v1/models", headers=bearer("rates")),
        Call("rates/livez", "GET", "/livez", headers=bearer("rates")),
        post("tokenize", "rates", headers=bearer("rates")),
        post("messages", "rates", headers=bearer("rates")),
        post("ollama_chat", "rates", headers=bearer("rates")),
        *(post("chat", f"tokens_{number}", headers=bearer("tokens")) for number in range(3)),
        post("chat", "one_runs", "endless", headers={**bearer("one"), "x-request-id": "one"}, stream=True) | background(),
        Call("one/runs", "GET", "/v1/requests/one/explain", headers=bearer("one"), until=("explanations.0.state", ("decode",)), drops=("explanations", "queue")),
        post("chat", "one_second", headers=bearer("one")),
        post("responses", "one_second", headers=bearer("one")),
        Call("one/cancel_by_bob", "POST", "/v1/requests/one/cancel", headers=bob),
        Call("one/cancel", "POST", "/v1/requests/one/cancel", headers=bearer("one")),
        Call("one/cancelled", join="chat/one_runs"),
        post("chat", "one_third", headers=bearer("one")),
        Call("admin/reload_keys", action="admin reload_keys"),
        *logins(),
        *(Call(f"wrong_key/{number}", "GET", "/v1/models", headers={"authorization": "Bearer wrong"}) for number in range(11)),
        Call("wrong_key/right", "GET", "/v1/models", headers=bearer("alice")),
        Call("wrong_key/login", path="/login", body={"key": "wrong"}, headers=JSON_TYPE),
        Call("keyed/metrics", "GET", "/metrics", headers=bearer("alice"), shows=("octavo_key_requests_total", "octavo_key_refused_total", "octavo_requests_failed_total")),
    ]  # fmt: skip
    return calls


def logins() -> list[Call]:
    """Sessions of pages."""
    page = {"sec-fetch-site": "same-origin", "cookie": "$cookie$"}
    by_form = {"content-type": "application/x-www-form-urlencoded", **HTML}
    return [
        Call("login/page", "GET", "/login?next=docs", headers=HTML),
        Call("login/json", path="/login", body={"key": "sk-alice-0123456789"}, headers=JSON_TYPE, save={"cookie": "@set-cookie"}),
        Call("login/form", path="/login", body="key=sk-bob-0123456789&next=dashboard", headers=by_form),
        Call("login/form_elsewhere", path="/login", body="key=sk-bob-0123456789&next=//evil", headers=by_form),
        Call("login/form_wrong", path="/login", body="key=x", headers=by_form),
        Call("login/bad_json", path="/login", body="{", headers=JSON_TYPE),
        Call("login/no_key", path="/login", body={}, headers=JSON_TYPE),
        Call("login/too_large", path="/login", body="key=" + "x" * 5000, headers=by_form),
        Call("login/other_site", path="/login", body={"key": "x"}, headers={**JSON_TYPE, "origin": "https://evil.example"}),
        Call("session/models", "GET", "/v1/models", headers=page),
        Call("session/dashboard", "GET", "/dashboard", headers={**page, **HTML}),
        Call("session/other_site", "GET", "/v1/models", headers={**page, "sec-fetch-site": "cross-site"}),
        Call("session/logout", path="/logout", headers=page),
        Call("session/after", "GET", "/v1/models", headers=page),
    ]  # fmt: skip


# A path in front, other origins, strict fields.

GOOD_ORIGIN = {"origin": "https://good.example"}
PREFLIGHT = {"access-control-request-method": "POST"}


def web() -> list[Call]:
    """CORS, the path in front, strict fields."""
    return [
        Call("web/livez", "GET", "/livez"),
        Call("web/front", "GET", "/llm/livez"),
        Call("web/front_twice", "GET", "/llm/llm/livez"),
        Call("web/front_alone", "GET", "/llm"),
        Call("web/front_root", "GET", "/llm/"),
        Call("web/front_page", "GET", "/llm/", headers=HTML),
        Call("web/front_spelled", "GET", "/%6clm/livez"),
        Call("web/front_like", "GET", "/llmx/livez"),
        Call("web/openapi", "GET", "/llm/openapi.json"),
        *(Call(f"cors/{method}/{name}", method, "/v1/models", headers=headers) for method in ("GET", "OPTIONS") for name, headers in {
            "no_origin": {}, "good": GOOD_ORIGIN, "bad": {"origin": "https://evil.example"}, "null": {"origin": "null"},
            "good_cross_site": {**GOOD_ORIGIN, "sec-fetch-site": "cross-site"}, "cross_site": {"sec-fetch-site": "cross-site"},
            "good_preflight": {**GOOD_ORIGIN, **PREFLIGHT}, "bad_preflight": {"origin": "https://evil.example", **PREFLIGHT},
            "good_preflight_headers": {**GOOD_ORIGIN, **PREFLIGHT, "access-control-request-headers": "x-one, authorization"},
            "long_preflight_headers": {**GOOD_ORIGIN, **PREFLIGHT, "access-control-request-headers": "x" * 1025},
            "delete_preflight": {**GOOD_ORIGIN, "access-control-request-method": "DELETE"},
        }.items()),
        Call("cors/nowhere", "GET", "/nowhere", headers=GOOD_ORIGIN),
        Call("cors/preflight_nowhere", "OPTIONS", "/nowhere", headers={**GOOD_ORIGIN, **PREFLIGHT}),
        post("chat", "cors", headers=GOOD_ORIGIN),
        post("chat", "cors_stream", headers=GOOD_ORIGIN, stream=True),
        post("chat", "cors_refused", headers=GOOD_ORIGIN, temperature=-1),
        Call("cors/text_type", path="/v1/chat/completions", body={"messages": []}, headers={**GOOD_ORIGIN, "content-type": "text/plain"}),
        Call("hosts/allowed", "GET", "/v1/models", headers={"host": "allowed.example:80"}),
        Call("hosts/other", "GET", "/v1/models", headers={"host": "other.example"}),
        *(post(route, f"strict_{name}", **fields) for route in ("chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate", "embeddings", "score", "rerank", "tokenize") for name, fields in {"unknown": {"bogus": 1}, "hint": {"service_tier": "auto"}, "known": {"user": "u"}}.items()),
        post("chat", "strict_inside", messages=[{"role": "user", "content": "x", "foo": 1}]),
    ]  # fmt: skip


# One place, a short queue, a small pool; then a drain.


def waits_for(call: Call) -> Call:
    """Ask for a request until it waits."""
    name = call.headers["x-request-id"]
    waits = ("explanations.0.state", ("waiting",))
    return Call(
        f"small/{name}",
        "GET",
        f"/v1/requests/{name}/explain",
        until=waits,
        drops=("events", "prediction", "seconds", "ahead", "position", "wait_s"),
    )


def small() -> list[Call]:
    """Refusals of a full server, and the end of one."""
    long = post("completions", "long", "forever", headers={"x-request-id": "long"}, max_tokens=450, stream=True)
    waiting = [
        post(
            "completions" if number % 2 else "chat",
            f"waits_{number}",
            "Hello",
            headers={"x-request-id": f"waits-{number}"},
        )
        for number in range(4)
    ]
    last = post("completions", "last", "slow", headers={"x-request-id": "last"}, stream=True)
    runs = ("explanations.0.state", ("decode",))
    return [
        Call("small/models", "GET", "/v1/models"),
        post("completions", "too_long", "x" * 600),
        post("completions", "too_long_with_output", "x" * 400, max_tokens=500),
        post("chat", "too_long", "x" * 600),
        post("messages", "too_long", "x" * 600),
        post("responses", "too_long", "x" * 600),
        post("ollama_chat", "too_long", "x" * 600),
        post("embeddings", "too_long", "x" * 600),
        long | {"in_background": True, "leaves": False},
        Call("small/runs", "GET", "/v1/requests/long/explain", until=runs, drops=("explanations", "queue")),
        *(call for each in waiting[:3] for call in (each | background(), waits_for(each))),
        post("completions", "low_priority", priority=5),
        post("chat", "low_priority", priority=5),
        post("messages", "low_priority", priority=5),
        post("ollama_chat", "low_priority", priority=5),
        post("completions", "no_time", queue_timeout=0.001),
        waiting[3] | background(),
        waits_for(waiting[3]),
        *(post(route, "full") for route in ("chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate", "embeddings", "score", "rerank")),
        post("tokenize", "full"),
        post("chat", "full_keyed", headers={"idempotency-key": "full"}),
        Call("small/metrics", "GET", "/metrics", shows=("octavo_queue_sequences", "octavo_load_level", "octavo_requests_failed_total")),
        Call("small/cancel", "POST", "/v1/requests/long/cancel"),
        *(Call(f"{each.name} ends", join=each.name) for each in waiting),
        Call("small/idle", "GET", "/health", until=("open_requests", (0,))),
        last | background(),
        Call("small/last_runs", "GET", "/v1/requests/last/explain", until=runs, drops=("explanations", "queue")),
        Call("admin/drain", action="admin drain"),
        Call("small/unready", "GET", "/readyz", until=("error.code", ("draining",))),
        Call("small/health", "GET", "/health"),
        Call("small/livez", "GET", "/livez"),
        post("chat", "draining"),
        post("messages", "draining"),
        post("ollama_chat", "draining"),
        Call("small/last", join=last.name),
        Call("small/exit", action="exit"),
    ]  # fmt: skip


def journal() -> list[Call]:
    """Answers that outlive the server."""
    keys = {"idempotency-key": "kept"}, {"idempotency-key": "streamed"}, {"idempotency-key": "open"}
    several = post("completions", "kept_choices", "choices", headers={"idempotency-key": "several"}, n=3)
    return [
        post("chat", "kept", headers=keys[0]),
        post("completions", "kept_stream", headers=keys[1], stream=True),
        several,
        post("completions", "open", "slow", headers=keys[2], stream=True) | leaving(),
        Call("journal/health", "GET", "/health", drops=("open_requests",)),
        Call("journal/restart", action="restart"),
        post("chat", "kept_again", headers=keys[0]),
        post("chat", "kept_other_body", "Another", headers=keys[0]),
        post("completions", "kept_stream_again", headers=keys[1], stream=True),
        post("completions", "kept_stream_rest", headers={**keys[1], "last-event-id": "4"}, stream=True),
        several,
        post("completions", "open_again", "slow", headers=keys[2], stream=True),
        post("completions", "open_rest", "slow", headers={**keys[2], "last-event-id": "3"}, stream=True),
        post("completions", "stopping", "slow", headers={"x-request-id": "stopping"}, stream=True) | background(),
        Call("journal/runs", "GET", "/v1/requests/stopping/explain", until=("explanations.0.state", ("decode",)), drops=("explanations", "queue")),
        Call("journal/signal", action="signal SIGTERM"),
        Call("journal/stopping", join="completions/stopping"),
        Call("journal/exit", action="exit"),
    ]  # fmt: skip


def groups() -> tuple[Group, ...]:
    """All that is asked: the groups, each one server."""
    script = ("scripted:{dir}/script.json",)
    files = {"script.json": SCRIPT}
    names = ("--served-model-name", "script", "alias")
    first = (*malformed(), *by_fields(), *around(), *stored_responses(), *batches(), *retries(), *disconnects())
    return (
        Group("open", (*script, *names, "--batch-dir", "{dir}/batches"), first, files),
        Group("keyed", (*script, *names, "--api-key-file", "{dir}/keys.toml", "--batch-dir", "{dir}/batches"), tuple(keyed()), {**files, "keys.toml": KEYS}),
        Group("web", (*script, *names, "--allowed-origins", "https://good.example", "--allowed-hosts", "allowed.example", "--root-path", "/llm", "--strict-fields"), tuple(web()), files),
        Group("small", (*script, *names, "--max-num-seqs", "1", "--max-queue-size", "4", "--kv-cache-tokens", "512"), tuple(small()), files),
        Group("journal", (*script, *names, "--journal", "{dir}/journal"), tuple(journal()), files),
    )  # fmt: skip

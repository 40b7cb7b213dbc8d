"""Requests that no honest client sends, made from a seed: mutated bodies, broken JSON, odd heads, on every route.

Owns: the corpus and the mutator. Does not: judge answers.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Bodies that are fine as they are, or refused for one unsupported field; the mutator starts from them.
SEEDS: Mapping[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b",
                       "name": "n"}], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3, "stream": True,
         "stream_options": {"include_usage": True}, "stop": ["x", "y"], "n": 2, "seed": 3},
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True, "chat_template_kwargs":
         {"mood": "x"}, "logit_bias": {"5": 1.5}, "presence_penalty": 0.5, "min_tokens": 1, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "x"}], "tools": [_FUNCTION], "tool_choice": "auto", "user": "u"},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema":
         {"name": "a", "schema": {"type": "object"}}}},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema":
         {"name": "a", "strict": True, "schema": {"$defs": {"b": {"type": ["string", "null"], "pattern": "^a+$"}},
          "type": "object", "properties": {"x": {"$ref": "#/$defs/b"}, "y": {"type": "array", "minItems": 1, "maxItems":
          3, "items": {"oneOf": [{"const": 1}, {"enum": ["a", None]}]}}, "z": {"type": "number", "minimum": 0,
          "multipleOf": 0.5}, "d": {"format": "date"}}, "required": ["x"], "additionalProperties": False}}}},
        {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": {"anyOf": [{"minLength": 3},
         {"prefixItems": [True], "items": False}]}, "whitespace_pattern": "[ ]?", "disable_fallback": True}},
        {"messages": [{"role": "user", "content": "x"}], "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"],
         "bad_words": ["no"], "allowed_token_ids": [4, 5, 6], "typical_p": 0.9, "timeout": 5, "priority": 1},
    ],
    COMPLETION: [
        {"prompt": "hi"},
        {"prompt": ["a", "b"], "best_of": 2, "n": 2, "max_tokens": 4, "echo": True, "suffix": ""},
        {"prompt": [5, 6, 7], "logprobs": 3, "stream": True, "stop_token_ids": [9], "repetition_penalty": 1.2},
        {"prompt": [[5, 6], [7]], "use_beam_search": True, "best_of": 3, "length_penalty": 1.1, "early_stopping": True},
        {"prompt": "x", "structured_outputs": {"regex": "[a-c]{1,3}\\d"}},
        {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 3},
        {"prompt": "x", "guided_grammar": 'start: a+ "b"\na: /[0-9]/ | "(" a ")"', "stream": True},
        {"prompt": "x", "cache_salt": "s", "frequency_penalty": -1, "ttft_objective": 1, "metadata": {"a": "b"}},
    ],
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 16, 17, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63, 2**64,
    -(2**63) - 1, 10**30,
    0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1e16, "", "x", "0", "1", "-1", "NaN", "true", "null", "\x00", "\ufeff",
    "\u202e",
    "\U0010ffff", "é" * 300, "猫" * 3000, "x" * 5000, "a" * 257, "%s%n{0}{{x}}", "../../etc/passwd", "<script>",
    "{{ 7*7 }}",
    "{% for x in range(9) %}x{% endfor %}", "__class__", "self", "messages", "constructor", [], [[]], [None], [0],
    ["x"], [""],
    [True], [1.5], [-1], [2**31], [[5]], ["x"] * 20, [5] * 5000, list(range(300)), [{}], {}, {"": ""}, {"a": {}},
    {"type": "text"},
    {"type": "text", "text": 5}, {"role": "user"}, {"role": "user", "content": None}, {"content": "x"},
    {"role": "tool", "content": "x"}, {"role": "user", "content": [{"type": "image_url",
    "image_url": {"url": "http://x"}}]},
    {"__proto__": 1}, {"$ref": "#"}, {str(i): 1 for i in range(300)}, {"5": "x"}, {"x": 1}, {"-1": 1}, {"99999": 1},
]  # fmt: skip
BROKEN: list[bytes] = [
    b"", b" ", b"\x00", b"{", b"}", b"[", b"[]", b"null", b"true", b"0", b'"x"', b"{}", b"{} {}", b"{}x", b'{"a"}',
    b'{"a":}',
    b'{"a":1,}', b"{a:1}", b"{'a':1}", b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":01}', b'{"a":+1}',
    b'{"a":.5}',
    b'{"a":1.}', b'{"a":0x10}', b'{"a":"\\ud800"}', b'{"a":"\\udfff\\ud800"}', b'{"a":"\\x41"}', b'{"a":"\x01"}',
    b'{"a":"\n"}',
    b'{"\\ud800":1}', b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xc0\x80"}', b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    b'{"a":1,"a":2}', b'{"messages":[],"messages":[]}', b"[" * 100_000, b'{"a":' * 70_000,
    b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a":' + b"9" * 10_000 + b"}", b'{"a":1' + b"0" * 400 + b".5}", b'{"a":1e' + b"9" * 400 + b"}", b"/*x*/{}",
    b'{"a":1//x\n}',
    b'{"messages":[' + b"{}," * 3000 + b"{}]}", b'{"messages":[{"role":"user","content":"' + b"x" * 300_000 + b'"}]}',
    b'{"prompt":"' + b"\\u0000" * 5000 + b'"}', b'{"prompt":[' + b"[]," * 30_000 + b"[]]}", b'{"prompt":"x","n":1e0}',
    b'{"prompt":"x","max_tokens":1E400}', b'{"prompt":["' + b'","' * 500 + b'"]}', b"<xml/>", b"a=b&c=d",
    b"--x\r\n\r\n",
]  # fmt: skip
PATHS = [
    "/v1/requests/x/explain", "/v1/requests/x/cancel", "/v1/requests/%ff/cancel", "/v1/requests//explain",
    "/livez", "/readyz", "/health", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/tiny", CHAT,
    COMPLETION,
    "/", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/%2e%2e", "/v1/models/" + "x" * 3000, "/v1/models/%00%ff",
    "/v1/models//",
    "/v1/chat/completions/", "/V1/CHAT/COMPLETIONS", "/v1//completions", "/%76%31/completions", "/v1/embeddings",
    "/v1/responses",
    "/tokenize", "/redoc", "/docs/oauth2-redirect", "/favicon.ico", "/../../etc/passwd", "/v1/completions?x=1",
    "/metrics?a=b&a",
    "/v1/completions;x", "/.%2e/livez", "/\u00e9", "/v1/models/tiny?x=%zz",
]  # fmt: skip
METHODS = ["GET", "POST", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "QUERY"]
HEADERS: list[dict[str, str]] = [
    {}, {}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-16"}, {"content-type": ""},
    {"x-request-id": "ok-1"}, {"x-request-id": "a b"}, {"x-request-id": "x" * 200}, {"authorization": "Bearer"},
    {"authorization": "Basic x"}, {"authorization": "Bearer " + "x" * 9000}, {"content-encoding": "gzip"},
    {"accept": "image/png"}, {"range": "bytes=0-1"}, {"if-none-match": "*"}, {"host": "evil"},
    {"cookie": "a=b; " * 500},
    {"x-forwarded-for": "1.2.3.4"}, {"transfer-encoding": "gzip"}, {"upgrade": "websocket", "connection": "upgrade"},
    {"idempotency-key": "k"}, {"idempotency-key": "x" * 999}, {"last-event-id": "7"}, {"last-event-id": "\u00e9"},
    {"idempotency-key": "k2", "last-event-id": "-1"}, {"content-length": "5"}, {"traceparent": "00-zz"},
    {"te": "trailers"},
]  # fmt: skip


@dataclass
class Nasty:
    """One request."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """For a failing test's message."""
        return f"{self.method} {self.path[:80]} {self.headers} {self.body[:300]!r}"


def nasty_request(rng: random.Random) -> Nasty:
    """The next one. Most are bodies that were nearly right."""
    kind = rng.random()
    if kind < 0.75:
        path = rng.choice((CHAT, COMPLETION))
        seeds = SEEDS[path] if rng.random() < 0.95 else SEEDS[CHAT if path == COMPLETION else COMPLETION]
        body = _spell(mutated(rng, rng.choice(seeds)), rng)
        return Nasty("POST", path, body, dict(rng.choice(HEADERS)) if rng.random() < 0.1 else {})
    if kind < 0.87:
        return Nasty("POST", rng.choice((CHAT, COMPLETION)), rng.choice(BROKEN))
    return Nasty(rng.choice(METHODS), rng.choice(PATHS), rng.choice((b"", b"{}", rng.choice(BROKEN))),
                 dict(rng.choice(HEADERS)))  # fmt: skip


def mutated(rng: random.Random, seed: dict[str, Any]) -> Any:
    """A copy with one to four changes anywhere in it."""
    value: Any = copy.deepcopy(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        value = _mutate(rng, value)
    return value


def _mutate(rng: random.Random, value: Any) -> Any:
    places = _places(value)
    holder, key = rng.choice(places)
    if holder is None:
        return copy.deepcopy(rng.choice(VALUES)) if rng.random() < 0.05 else value
    kind = rng.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        other = rng.choice([*ALL_FIELDS, "x", "", "\u00e9", "__class__", "a" * 300, key + "s", key.upper()])
        holder[other] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 2 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 3, 40))))
    elif kind == 3:
        holder[key] = [holder[key]]
    elif kind == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice((-holder[key], holder[key] + 1, holder[key] * 1000, holder[key] / 3, str(holder[key])))
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    return value


ALL_FIELDS = [
    *sorted({name for seeds in SEEDS.values() for seed in seeds for name in seed}),
    "model", "functions", "function_call", "modalities", "audio", "prediction", "reasoning", "reasoning_effort",
    "store", "service_tier", "prompt_logprobs", "structured_outputs", "guided_json", "max_completion_tokens",
    "queue_timeout", "include_stop_str_in_output", "skip_special_tokens", "tpot_objective", "dry_base",
    "dry_range", "dry_allowed_length",
]  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside, the outermost values more often; and one for the whole."""
    found: list[tuple[Any, Any]] = [(None, None)]
    pending = [(value, 3)]
    while pending:
        node, weight = pending.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(min(len(node), 20))
            found += [(node, key) for key in keys for _ in range(max(weight, 1))]
            pending += [(node[key], weight - 1) for key in keys]
    return found


def _spell(value: Any, rng: random.Random) -> bytes:
    """As JSON, now and then a little damaged."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.06 and text:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) * rng.choice((0, 1, 2)) + text[at + 1 :]
    return text

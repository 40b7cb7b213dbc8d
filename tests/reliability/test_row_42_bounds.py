"""Row 42: what an answer must be, at and past every bound: followed, or refused with a 400 that names the bound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.assembly import find_files, load_text, open_engine
from octavo.config import ChatConfig, Config, ModelConfig
from octavo.frontend.local_client import LocalClient
from octavo.grammar.limits import MAX_OPTIONAL_PROPERTIES
from octavo.sandbox.checks import (
    MAX_COUNT,
    MAX_GROUP_DEPTH,
    MAX_PATTERN_BYTES,
    MAX_PATTERNS,
    MAX_REFERENCES_IN_ROW,
    MAX_SCHEMA_DEPTH,
    MAX_WEIGHT,
)
from octavo.server.api.structured_output import MAX_ALTERNATIVES
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness, events
from tests.tiny_models import make_tiny_model

Json = dict[str, Any]
Case = tuple[str, str, object]  # its name, the kind of source, the source


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Harness]:
    """The app over a real engine with a tiny model, both in this process; schemas are compiled by a sandbox process."""
    make_tiny_model("smollm2", folder, max_position_embeddings=2048)
    template = folder / "short.jinja"  # shows no tools: they fit into any prompt
    template.write_text("{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = ChatConfig(tool_call_parser="hermes", chat_template=str(template))
    config = Config(model=ModelConfig(model=str(folder)), chat=chat)
    loop, _ = open_engine(config)
    client = LocalClient(loop)
    harness = Harness(engine=client, text=load_text(config, find_files(config)), config=config)  # type: ignore[arg-type]
    try:
        yield harness
    finally:
        await harness.context.sandbox.close()
        await client.close()
    assert loop.failure is None


def around(*bounds: int) -> list[int]:
    """A bound, what is beside it, and what is far beyond."""
    return [count for bound in bounds for count in (bound - 1, bound, bound + 1, 3 * bound)]


def nested(depth: int, key: str) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        inner = {"properties": {"a": schema}} if key == "properties" else {key: [schema] if key == "anyOf" else schema}
        schema = inner if key == "anyOf" else {"type": "object" if key == "properties" else "array", **inner}
    return schema


def chain(count: int) -> Json:
    """References, one to the next, and the last back to the first."""
    table = {f"n{i}": {"properties": {"next": {"$ref": f"#/$defs/n{(i + 1) % count}"}}} for i in range(count)}
    return {"$defs": table, "$ref": "#/$defs/n0"}


def properties(count: int, **more: object) -> Json:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, **more}


SCHEMAS: dict[str, tuple[list[int], Callable[[int], object]]] = {
    "optional properties": ([400, 500, *around(MAX_OPTIONAL_PROPERTIES)], lambda n: properties(n)),
    "closed properties": (
        [500, *around(MAX_OPTIONAL_PROPERTIES)],
        lambda n: properties(n, additionalProperties=False),
    ),
    "required properties": ([500, 1500], lambda n: properties(n, required=[f"p{i}" for i in range(n)])),
    "optional ones in items": (
        [600, MAX_OPTIONAL_PROPERTIES],
        lambda n: {"type": "array", "items": properties(n), "minItems": 1},
    ),
    "named in an enum": (
        [600, 1200, 1300, 4000],
        lambda n: {"propertyNames": {"enum": [f"k{i}" for i in range(n)]}, "additionalProperties": {"type": "null"}},
    ),
    "properties of several": ([300, 600], lambda n: {"anyOf": [properties(n // 4, required=["p1"])] * 4}),
    "all of several": ([300, 1400], lambda n: {"allOf": [properties(n), {"required": ["p0"]}]}),
    "nested objects": (around((MAX_SCHEMA_DEPTH - 1) // 2), lambda n: nested(n, "properties")),
    "nested arrays": (around(MAX_SCHEMA_DEPTH - 1), lambda n: nested(n, "items")),
    "nested choices": (around((MAX_SCHEMA_DEPTH - 1) // 2), lambda n: nested(n, "anyOf")),
    "values of an enum": ([1000, 3000, 5000, 20_000], lambda n: {"enum": [f"v{i}" for i in range(n)]}),
    "numbers of an enum": ([1000, 5000, 20_000], lambda n: {"enum": list(range(n))}),
    "objects of an enum": ([100, 1000, 4000], lambda n: {"enum": [{"a": i} for i in range(n)]}),
    "schemas of anyOf": ([100, 500, 1500], lambda n: {"anyOf": [{"const": [i, "x"]} for i in range(n)]}),
    "objects of anyOf": (
        [100, 500, 900],
        lambda n: {"anyOf": [{"properties": {"k": {"const": i}, "v": {"type": "null"}}} for i in range(n)]},
    ),
    "oneOf by a constant": (
        [10, 100, 300],
        lambda n: {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(n)]},
    ),
    "minLength": (around(MAX_COUNT), lambda n: {"type": "string", "minLength": n}),
    "maxLength": (around(MAX_COUNT), lambda n: {"type": "string", "maxLength": n}),
    "length of a pattern": (around(MAX_COUNT), lambda n: {"type": "string", "pattern": "^[a-z]+$", "minLength": n}),
    "minItems": (around(MAX_COUNT), lambda n: {"items": {"type": "boolean"}, "type": "array", "minItems": n}),
    "maxItems": (around(MAX_COUNT), lambda n: {"items": {"type": "object"}, "type": "array", "maxItems": n}),
    "forced items": ([100, 5000, 20_000, MAX_COUNT], lambda n: {"items": {"const": 1}, "minItems": n, "type": "array"}),
    "prefixItems": ([100, 1000, 3000], lambda n: {"type": "array", "prefixItems": [{"type": "null"}] * n}),
    "maxProperties": (around(MAX_COUNT), lambda n: {"type": "object", "maxProperties": n}),
    "numbers in a range": (
        [10**3, 10**9, 2**53 - 1, 2**53, 2**53 + 1, 10**30, 10**300],
        lambda n: {"type": "integer", "minimum": -n, "maximum": n},
    ),
    "fractions in a range": (
        [1, 10**9, 10**18, 10**300],
        lambda n: {"type": "number", "minimum": -n + 0.123456789, "exclusiveMaximum": n / 7},
    ),
    "multipleOf": ([7, 9999, 10**6, 10**12], lambda n: {"type": "integer", "multipleOf": n}),
    "several multiples": ([2, 3, 5], lambda n: {"allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19)[:n]]}),
    "a long constant": ([1000, 20_000, 60_000, 65_520, 70_000], lambda n: {"const": "x" * n}),
    "a constant object": ([10, 1000, 5000], lambda n: {"const": {f"k{i}": i for i in range(n)}}),
    "patterns": (
        around(MAX_PATTERNS),
        lambda n: {"type": "object", "properties": {f"p{i}": {"pattern": f"^a{i}+$"} for i in range(n)}},
    ),
    "patternProperties": (
        around(MAX_PATTERNS),
        lambda n: {"type": "object", "patternProperties": {f"^k{i}-[a-z]+$": {"type": "null"} for i in range(n)}},
    ),
    "intersections of patterns": (
        [2, 4, 8, 16],
        lambda n: {"type": "string", "allOf": [{"pattern": f"^[a-z]*{'abcdefghijklmnop'[i]}" } for i in range(n)]},
    ),
    "chains of references": (around(MAX_REFERENCES_IN_ROW), chain),
    "references to one": (
        [10, 500, 1200],
        lambda n: {"$defs": {"a": properties(3)}, "properties": {f"q{i}": {"$ref": "#/$defs/a"} for i in range(n)}},
    ),
}  # fmt: skip
REGEXES: dict[str, tuple[list[int], Callable[[int], str]]] = {
    "bytes": (around(MAX_PATTERN_BYTES), lambda n: "a" * n),
    "repetitions": (around(MAX_WEIGHT), lambda n: f"a{{{n}}}"),
    "repetitions from 0": (around(MAX_WEIGHT), lambda n: f"[a-z]{{0,{n // 20}}}b"),
    "alternatives": ([100, 400, 800], lambda n: "|".join(str(i) for i in range(n))),
    "groups": (around(MAX_GROUP_DEPTH), lambda n: "(" * n + "a" + ")" * n),
    "classes": ([10, 100, 1000], lambda n: "".join(rf"[\w&&[^{chr(97 + i % 26)}]]" for i in range(n))),
    "scripts": ([1, 10, 100, 1000], lambda n: rf"\p{{L}}{{{n}}}x"),
    "dots": ([10, 1000, 10_000], lambda n: f".*a.{{{n}}}b"),
}
GRAMMARS: dict[str, tuple[list[int], Callable[[int], str]]] = {
    "GBNF repetitions": ([1000, 10_000, 30_000, 50_000, 100_000, 10**9], lambda n: f'root ::= "a"{{{n}}}'),
    "GBNF up to": ([1000, 100_000, 10**7], lambda n: f'root ::= ("a" | "b"){{0,{n}}} "c"'),
    "GBNF words": ([1000, 100_000], lambda n: f'root ::= ([a-z]+ " "){{{n}}}'),
    "GBNF after a choice": ([1000, 100_000], lambda n: f'root ::= ("x" | "y") "a"{{{n}}}'),
    "GBNF alternatives": (
        [500, 2000, 3000, 4999, 5001, 8000],
        lambda n: "root ::= " + " | ".join(f'"{i:x}"' for i in range(n)),
    ),
    "GBNF rules": (
        [100, 1000, 2000],
        lambda n: "root ::= x0\n" + "\n".join(f'x{i} ::= "a" x{i + 1} | "b"' for i in range(n)) + f'\nx{n} ::= "c"',
    ),
    "Lark alternatives": ([2000, 3000, 6000], lambda n: "start: " + " | ".join(f'"{i:x}"' for i in range(n))),
    "Lark optional parts": ([100, 1000, 3000], lambda n: "start: " + " ".join(f'"{i:x}"?' for i in range(n))),
    "Lark repetitions": ([1000, 100_000], lambda n: f'start: "ab"~{n}'),
    "Lark right recursion": ([1, 100], lambda n: "start: " + " ".join(["x"] * n) + '\nx: "a" x | "a"'),
    "Lark nesting": ([10, 100, 1000], lambda n: "start: " + "(" * n + '"a"' + ")" * n),
    "Lark expressions": ([10, 200, 2000], lambda n: "start: A\nA: " + " | ".join(f"/a{i}[a-z]*/" for i in range(n))),
}
CHOICES: dict[str, tuple[list[int], Callable[[int], list[str]]]] = {
    "choices": ([*around(MAX_ALTERNATIVES)], lambda n: [f"choice {i}" for i in range(n)]),
    "long choices": ([10, 60, 70], lambda n: [f"{i:04}" + "x" * 1000 for i in range(n)]),
}
KINDS: dict[str, dict[str, tuple[list[int], Callable[[int], Any]]]] = {
    "json": SCHEMAS, "regex": REGEXES, "grammar": GRAMMARS, "choice": CHOICES,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for kind, families in KINDS.items():
        for name, (counts, make) in families.items():
            for count in counts:
                yield f"{name}, {count}", kind, make(count)


def chat(**fields: object) -> tuple[str, Json]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}


def bodies(kind: str, source: object) -> Iterator[tuple[str, Json]]:
    """The same through every interface that has a field for it."""
    yield chat(max_tokens=4, temperature=1.0, seed=1, structured_outputs={kind: source})
    yield "/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {kind: source}, "stream": True}
    if kind != "json":
        return
    form = {"name": "x", "schema": source}
    yield chat(max_tokens=4, response_format={"type": "json_schema", "json_schema": form}, stream=True)
    yield "/v1/responses", {"input": "x", "max_output_tokens": 16, "text": {"format": {"type": "json_schema", **form}}}
    yield "/api/chat", {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "format": source,
        "options": {"num_predict": 4},
        "stream": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": source}}
    yield chat(max_tokens=40, tools=[tool], tool_choice="required")
    yield "/v1/messages", {
        "model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": source}], "tool_choice": {"type": "any"},
    }  # fmt: skip


def verdict(response: httpx.Response) -> str:
    """What became of a request: "work", "refused" with a reason of its own, or what is wrong."""
    text = response.text
    if response.status_code == 400:
        found = response.json()["error"]
        message = found if isinstance(found, str) else found["message"]
        return (
            "refused"
            if len(message) > 20 and re.search(r"\d|supported|allows|nested|too many expressions", message)
            else f"400 {text}"
        )
    if response.status_code != 200:
        return f"{response.status_code} {text[:300]}"
    if '"error"' in text and '"error":null' not in text.replace(" ", ""):
        return "refused" if '"too_complex"' in text else f"in the stream: {text[-300:]}"
    return "work"


@pytest.mark.timeout(1800)
async def test_row_42_every_bound_is_kept_or_named(score: Score, tmp_path: Path) -> None:
    every = score.dose(17, 1)
    counts: dict[str, int] = {"work": 0, "refused": 0}
    wrong: list[str] = []
    asked = [(name, path, body) for name, kind, source in cases() for path, body in bodies(kind, source)]
    async with served(tmp_path / "tiny") as harness:
        for name, path, body in asked[::every]:
            response = await harness.request("POST", path, json=body)
            said = verdict(response)
            if said in counts:
                counts[said] += 1
            else:
                wrong.append(f"{name} at {path}: {said}")
        assert (await harness.chat(max_tokens=2)).status_code == 200
    score.tell("requests", len(asked[::every]))
    score.tell("followed", counts["work"])
    score.tell("refused by a bound that is named", counts["refused"])
    assert wrong == []
    score.count("500s, and refusals without a name", len(wrong))


async def test_row_42_a_limit_that_is_met_late_ends_that_request_alone(score: Score, tmp_path: Path) -> None:
    """Thirty letters, and then a text that takes more than one token may: no check before sees so far."""
    late = {"structured_outputs": {"grammar": 'start: /[a-z]{30}/ "a"~100000'}, "max_tokens": 60, "seed": 1}
    wrong = 0
    async with served(tmp_path / "tiny") as harness:
        beside = asyncio.create_task(harness.chat(max_tokens=50, structured_outputs={"regex": "[a-z]{45}"}))
        whole, streamed = await harness.chat(**late), await harness.chat(**late, stream=True)
        for error in (whole.json()["error"], events(streamed.text)[-2]["error"]):
            wrong += error["code"] != "too_complex" or "50000 parser items" not in error["message"]
        assert whole.status_code == 400 and whole.headers["x-should-retry"] == "false", whole.text
        assert (await beside).json()["choices"][0]["finish_reason"] == "stop"
        nothing = await harness.chat(structured_outputs={"choice": ["a"]}, allowed_token_ids=[5], max_tokens=3)
        wrong += nothing.status_code != 400 or "no token may follow" not in nothing.text
        together = {"allOf": [{"pattern": f"^.*{letter}.*$"} for letter in "abcdefgh"]}
        many = await harness.chat(structured_outputs={"json": together}, max_tokens=60)
        wrong += many.status_code != 200 and many.json()["error"]["code"] != "too_complex"
    score.count("late limits answered as a server error", wrong)

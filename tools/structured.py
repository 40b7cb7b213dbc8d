"""Validate 1,000 answers that are constrained by JSON schemas: fifty schemas, temperatures 0 to 2.

Owns: what is asked, what is counted, and the table in docs/structured-output.md. Does not: start a server.
Usage, beside `octavo serve --port 8000`, from the root of the repository:
    python -m tools.structured --url http://127.0.0.1:8000 [--per-schema 20] [--page docs/structured-output.md]
The last line is one JSON object. Exit status 1: an answer that ended by itself was not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.grammar.schemas import SCHEMAS
from tests.grammar.validity import Validity

HOTTEST = 2.0
BEGIN, END = "<!-- figures: python -m tools.structured -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Answer:
    """One generation: `end` is its finish_reason, or the error's code; `fault` what the validators say."""

    title: str
    temperature: float
    end: str
    text: str
    fault: str
    num_tokens: int


@dataclass(frozen=True)
class Ask:
    """The fields of every request, and the number of concurrent requests."""

    url: str
    model: str
    max_tokens: int
    concurrency: int


async def generate(client: httpx.AsyncClient, ask: Ask, index: int, seed: int, temperature: float) -> Answer:
    """Request one answer."""
    title, schema = SCHEMAS[index]
    body = {
        "model": ask.model,
        "messages": [{"role": "user", "content": f"Give an example as JSON: {title}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": f"schema_{index}", "schema": schema}},
        "temperature": temperature,
        "max_tokens": ask.max_tokens,
        "seed": seed,
    }
    response = await client.post(f"{ask.url}/v1/chat/completions", json=body)
    answer = response.json()
    if response.status_code != 200:
        message = str(answer["error"]["message"])
        return Answer(title, temperature, f"error {response.status_code}", message, message, 0)
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    fault = Validity(schema).fault(text)
    return Answer(title, temperature, choice["finish_reason"], text, fault, answer["usage"]["completion_tokens"])


async def run(ask: Ask, per_schema: int) -> list[Answer]:
    """All answers; those of a schema go up in temperature."""
    places = asyncio.Semaphore(ask.concurrency)
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=ask.concurrency)) as client:

        async def one(index: int, seed: int) -> Answer:
            async with places:
                return await generate(client, ask, index, seed, HOTTEST * seed / max(per_schema - 1, 1))

        return await asyncio.gather(*(one(index, seed) for seed in range(per_schema) for index in range(len(SCHEMAS))))


def figures(answers: Sequence[Answer], took_s: float) -> dict[str, Any]:
    """The counts."""
    ends = Counter(answer.end for answer in answers)
    cut = Counter(answer.title for answer in answers if answer.end == "length")
    stopped = [answer for answer in answers if answer.end == "stop"]
    return {
        "generations": len(answers),
        "schemas": len(SCHEMAS),
        "ended by themselves": len(stopped),
        "of these valid": sum(not answer.fault for answer in stopped),
        "cut by length": ends["length"],
        "errors": len(answers) - len(stopped) - ends["length"],
        "tokens": sum(answer.num_tokens for answer in answers),
        "seconds": round(took_s, 1),
        "cut schemas": dict(cut.most_common()),
    }


def table(answers: Sequence[Answer]) -> list[str]:
    """Lines of a table: a row for each half degree of temperature."""
    lines = [
        "| temperature | generations | ended by themselves | of these valid | cut by length |",
        "|---|---|---|---|---|",
    ]
    for low in (0.0, 0.5, 1.0, 1.5):
        high = low + 0.5
        part = [a for a in answers if low <= a.temperature < high or high == HOTTEST == a.temperature]
        stopped = [answer for answer in part if answer.end == "stop"]
        valid, cut = sum(not answer.fault for answer in stopped), sum(answer.end == "length" for answer in part)
        lines.append(f"| {low:g} to {high:g} | {len(part)} | {len(stopped)} | {valid} | {cut} |")
    return lines


def write_page(page: Path, lines: Sequence[str], found: dict[str, Any]) -> None:
    """Put the table between the page's marks."""
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    whole = (
        f"{found['generations']} generations over {found['schemas']} schemas: {found['ended by themselves']} ended by "
        f"themselves, {found['of these valid']} of these are valid; {found['cut by length']} were cut by `max_tokens`."
    )
    page.write_text(f"{head}{BEGIN}\n{whole}\n\n" + "\n".join(lines) + f"\n{END}{tail}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requests, count the valid answers, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", help="default: the served one")
    parser.add_argument("--per-schema", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--page", type=Path, help="the page whose table is rewritten")
    parser.add_argument("--log", type=Path, help="a file for all answers, a line of JSON each")
    args = parser.parse_args(arguments)
    model = args.model or httpx.get(f"{args.url}/v1/models").json()["data"][0]["id"]
    begun = time.perf_counter()
    answers = asyncio.run(run(Ask(args.url, model, args.max_tokens, args.concurrency), args.per_schema))
    found = figures(answers, time.perf_counter() - begun)
    lines = table(answers)
    print("\n".join(lines))
    for answer in answers:
        if answer.end not in ("stop", "length") or (answer.end == "stop" and answer.fault):
            print(f"{answer.title} at {answer.temperature:.2f}: {answer.end}: {answer.fault}: {answer.text[:200]!r}")
    if args.log is not None:
        args.log.write_text("".join(json.dumps(vars(answer)) + "\n" for answer in answers), encoding="utf-8")
    if args.page is not None:
        write_page(args.page, lines, found)
    print(json.dumps({"model": model, **found}))
    return int(found["of these valid"] != found["ended by themselves"] or found["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())

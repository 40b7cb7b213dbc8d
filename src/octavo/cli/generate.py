"""`octavo generate FILE`: answer prompts, one a line, into lines of JSON in the same order.

Owns: the form of a line (a text; or JSON with `prompt` or `messages`, an `id`, and fields of a request), the order,
the number of open requests.
Does not: resume after a kill, or take OpenAI's batch format (octavo batch does both).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.assembly import LocalEngine, build_local
from octavo.cli.answer_flags import add_answer_arguments, sampling_params
from octavo.cli.flags import UsageError, add_settings, check_output, config_from, whole
from octavo.cli.inner_app import answering
from octavo.cli.terminal import loading, say, warn_limits
from octavo.config import ENGINE_SECTIONS, Config
from octavo.server.api.batches.run import InnerCall, InnerResponse

MAX_LINE_BYTES = 8 << 20
_FIELDS = ("max_tokens", "temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line: its id, path and body; or the fault that makes it invalid."""

    name: object
    path: str = ""
    body: dict[str, Any] | None = None
    fault: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.usage = "octavo generate FILE [-o OUT] [options]"
    parser.add_argument(
        "file", metavar="FILE", help="prompts, one a line: texts, or JSON in a .jsonl file; - reads stdin"
    )
    group = parser.add_argument_group("answers")
    group.add_argument("--output", "-o", metavar="OUT", help="where answers go, a JSON object a line [stdout]")
    group.add_argument("--open", type=whole, metavar="N", help="requests open at once [twice --max-num-seqs]")
    group.add_argument("--raw", action="store_true", help="continue each text as it is, without the chat template")
    group.add_argument("--jsonl", action="store_true", help="lines are JSON, whatever the file is called")
    add_answer_arguments(group)
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Answer every line; return 0 when all were answered, 1 when some failed."""
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template; leave out --raw")
    if args.open is not None and not 1 <= args.open <= 4096:
        raise UsageError(f"--open is {args.open}; give a whole number from 1 to 4096")
    check_output("--output", args.output)
    sampling_params(args, {})  # report a wrong flag before the model loads
    config = config_from(args)
    with _reading(args.file) as source, _writing(args.output) as out:
        with loading(config.model.model, args.quiet):
            engine = build_local(config)
        warn_limits(config, engine.capacity)
        return asyncio.run(_answer(engine, config, (source, out), args))


@contextlib.contextmanager
def _reading(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(name).open("rb") as file:
            yield file
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder; give a file of prompts") from None
    except FileNotFoundError:
        raise UsageError(f"file not found: {name}; give prompts, one a line") from None


@contextlib.contextmanager
def _writing(name: str | None) -> Iterator[IO[str]]:
    if name is None:
        yield sys.stdout
        return
    with Path(name).open("w", encoding="utf-8") as file:
        yield file


async def _answer(
    engine: LocalEngine, config: Config, files: tuple[IO[bytes], IO[str]], args: argparse.Namespace
) -> int:
    source, out = files
    begun, num_tokens, num_failed, num_done = time.perf_counter(), 0, 0, 0
    is_raw = args.raw or engine.text.chat_template is None
    if is_raw and args.system is not None:
        await engine.client.close()
        raise UsageError("this model has no chat template, so --system cannot be given; leave it out")
    async with answering(engine, config) as call:
        prompts = read_prompts(source, args, is_raw)
        async for line, tokens in _in_order(call, prompts, args.open or 2 * engine.capacity.num_slots):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            num_done, num_tokens, num_failed = num_done + 1, num_tokens + tokens, num_failed + ("error" in line)
    if not args.quiet:
        seconds = time.perf_counter() - begun
        failed = f", {num_failed:,} failed" if num_failed else ""
        speed = f"{num_tokens / seconds:,.1f} tokens/s"
        say(f"{num_done:,} prompts{failed}: {num_tokens:,} tokens in {seconds:.1f} s, {speed}")
    return 1 if num_failed else 0


async def _in_order(call: InnerCall, prompts: Iterator[Prompt], num_open: int) -> Any:
    """Yield output lines with their token counts, in the order of the prompts."""
    tasks: deque[asyncio.Task[tuple[dict[str, Any], int]]] = deque()
    try:
        while True:
            while len(tasks) < num_open and (prompt := await asyncio.to_thread(next, prompts, None)) is not None:
                tasks.append(asyncio.create_task(_one(call, prompt)))
            if not tasks:
                return
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(call: InnerCall, prompt: Prompt) -> tuple[dict[str, Any], int]:
    if prompt.body is None:
        return {"id": prompt.name, "error": {"message": prompt.fault}}, 0
    answer: InnerResponse = await call(prompt.path, json.dumps(prompt.body).encode())
    value = json.loads(answer.body)
    if answer.status != 200:
        return {"id": prompt.name, "error": value["error"]}, 0
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in value["choices"]]
    made = {"id": prompt.name, "text": texts[0], "finish_reason": value["choices"][0]["finish_reason"]}
    if len(texts) > 1:
        made["texts"] = texts
    if calls := value["choices"][0].get("message", {}).get("tool_calls"):
        made["tool_calls"] = calls
    usage = value["usage"]
    counts = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"]}
    return {**made, "usage": counts}, usage["completion_tokens"]


def read_prompts(source: IO[bytes], args: argparse.Namespace, is_raw: bool) -> Iterator[Prompt]:
    """Yield the prompts of a file without blank lines; an invalid line becomes a Prompt with a fault."""
    is_json = args.jsonl or args.file.endswith(".jsonl")
    number = 0
    while data := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            while data and not data.endswith(b"\n"):
                data = source.readline(MAX_LINE_BYTES)
            yield Prompt(number, fault=f"line {number} has more than {MAX_LINE_BYTES} bytes")
            continue
        try:
            text = data.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            yield Prompt(number, fault=f"line {number} is no UTF-8")
            continue
        if text.strip():
            yield _of_json(number, text, args, is_raw) if is_json else _made(number, {"prompt": text}, args, is_raw)


def _of_json(number: int, text: str, args: argparse.Namespace, is_raw: bool) -> Prompt:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Prompt(number, fault=f"line {number} is not JSON ({error})")
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        return Prompt(number, fault=f"line {number} must be an object with prompt or messages")
    return _made(value.pop("id", number), value, args, is_raw)


def _made(name: object, value: dict[str, Any], args: argparse.Namespace, is_raw: bool) -> Prompt:
    """Return a request; the line's own fields override the command's."""
    flags = {field: given for field in _FIELDS if (given := getattr(args, field)) is not None}
    if value.get("stream"):
        return Prompt(name, fault="an answer here cannot be streamed; leave stream out")
    if "messages" not in value and (is_raw or not isinstance(value["prompt"], str)):
        return Prompt(name, "/v1/completions", {**flags, **value})
    if "messages" not in value:
        value["messages"] = [{"role": "user", "content": value.pop("prompt")}]
    if args.system is not None and isinstance(value["messages"], list):
        value["messages"] = [{"role": "system", "content": args.system}, *value["messages"]]
    return Prompt(name, "/v1/chat/completions", {**flags, **value})

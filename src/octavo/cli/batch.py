"""`octavo generate FILE` and `octavo batch FILE`: answer a file of prompts, or of requests in OpenAI's batch format.

Owns: the arguments; parsing lines of prompts; the order and number of open requests; the progress bar and the summary;
exit codes (0: all answered, 1: some failed). Both commands post to the server's application in this process, without a
port. Does not: know the batch format, or how a run resumes (server.batches does). After a kill at any time, the same
`octavo batch` command resumes the run; `octavo generate` does not resume.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.assembly import LocalEngine
from octavo.cli.answers import add_answer_arguments, load_engine, params_given, sampling_params
from octavo.cli.flags import UsageError, add_settings, check_output, config_from
from octavo.cli.terminal import say
from octavo.config import ENGINE_SECTIONS, Config
from octavo.config.setting import Number
from octavo.server.api.batches.run import (
    BATCH_PATHS,
    BatchPaths,
    BatchRun,
    Counts,
    InnerCall,
    InnerResponse,
    RunOptions,
    inner_call,
    is_output,
)
from octavo.server.app import create_app
from octavo.server.http.keys import ANONYMOUS

MAX_TRIES = 5
OPEN_REQUESTS = Number(int, 1, 4096)
MAX_LINE_BYTES = 8 << 20


@contextlib.asynccontextmanager
async def _application(engine: LocalEngine, config: Config) -> AsyncIterator[InnerCall]:
    """Yield a function that posts to the application. At the end, close the sandbox process and the engine."""
    try:
        app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
        try:
            yield inner_call(app, ANONYMOUS)
        finally:
            await app.state.context.sandbox.close()
    finally:
        await engine.client.close()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input line of `octavo generate`: the request's id, path and body, or the fault of an invalid line."""

    name: object
    path: str = ""
    body: dict[str, Any] | None = None
    fault: str = ""


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo generate`."""
    parser.usage = "octavo generate FILE [-o OUT] [options]"
    parser.add_argument(
        "file", metavar="FILE", help="prompts, one a line: texts, or JSON in a .jsonl file; - reads stdin"
    )
    group = parser.add_argument_group("answers")
    group.add_argument("--output", "-o", metavar="OUT", help="where answers go, a JSON object a line [stdout]")
    group.add_argument("--open", type=OPEN_REQUESTS, metavar="N", help="requests open at once [twice --max-num-seqs]")
    group.add_argument("--raw", action="store_true", help="continue each text as it is, without the chat template")
    group.add_argument("--jsonl", action="store_true", help="lines are JSON, whatever the file is called")
    add_answer_arguments(group)
    add_settings(parser, (*ENGINE_SECTIONS, "adapters"))


def run_generate(args: argparse.Namespace) -> int:
    """Answer every line; return 0 when all were answered, 1 when some failed."""
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template; leave out --raw")
    check_output("--output", args.output)
    sampling_params(args, {})  # reports a wrong flag before the model loads
    config = config_from(args)
    with _reading(args.file) as source, _writing(args.output) as out:
        engine = load_engine(config, args.quiet)
        return asyncio.run(_answer_prompts(engine, config, (source, out), args))


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


async def _answer_prompts(
    engine: LocalEngine, config: Config, files: tuple[IO[bytes], IO[str]], args: argparse.Namespace
) -> int:
    source, out = files
    started_at, num_tokens, num_failed, num_done = time.perf_counter(), 0, 0, 0
    is_raw = args.raw or engine.text.chat_template is None
    if is_raw and args.system is not None:
        await engine.client.close()
        raise UsageError("this model has no chat template, so --system cannot be given; leave it out")
    async with _application(engine, config) as call:
        prompts = read_prompts(source, args, is_raw)
        async for line, tokens in _answers_in_order(call, prompts, args.open or 2 * engine.capacity.num_slots):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            num_done, num_tokens, num_failed = num_done + 1, num_tokens + tokens, num_failed + ("error" in line)
    if not args.quiet:
        seconds = time.perf_counter() - started_at
        failed = f", {num_failed:,} failed" if num_failed else ""
        speed = f"{num_tokens / seconds:,.1f} tokens/s"
        say(f"{num_done:,} prompts{failed}: {num_tokens:,} tokens in {seconds:.1f} s, {speed}")
    return 1 if num_failed else 0


async def _answers_in_order(call: InnerCall, prompts: Iterator[Prompt], num_open: int) -> Any:
    """Yield output lines with their token counts, in the order of the prompts."""
    tasks: deque[asyncio.Task[tuple[dict[str, Any], int]]] = deque()
    try:
        while True:
            while len(tasks) < num_open and (prompt := await asyncio.to_thread(next, prompts, None)) is not None:
                tasks.append(asyncio.create_task(_answer_prompt(call, prompt)))
            if not tasks:
                return
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer_prompt(call: InnerCall, prompt: Prompt) -> tuple[dict[str, Any], int]:
    if prompt.body is None:
        return {"id": prompt.name, "error": {"message": prompt.fault}}, 0
    answer: InnerResponse = await call(prompt.path, json.dumps(prompt.body).encode())
    value = json.loads(answer.body)
    if answer.status != 200:
        return {"id": prompt.name, "error": value["error"]}, 0
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in value["choices"]]
    line = {"id": prompt.name, "text": texts[0], "finish_reason": value["choices"][0]["finish_reason"]}
    if len(texts) > 1:
        line["texts"] = texts
    if calls := value["choices"][0].get("message", {}).get("tool_calls"):
        line["tool_calls"] = calls
    usage = value["usage"]
    counts = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"]}
    return {**line, "usage": counts}, usage["completion_tokens"]


def read_prompts(source: IO[bytes], args: argparse.Namespace, is_raw: bool) -> Iterator[Prompt]:
    """Yield the prompts of a file; skip blank lines. An invalid line becomes a Prompt with a fault."""
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
            yield Prompt(number, fault=f"line {number} is not UTF-8")
            continue
        if text.strip():
            yield (
                _prompt_from_json(number, text, args, is_raw)
                if is_json
                else _make_prompt(number, {"prompt": text}, args, is_raw)
            )


def _prompt_from_json(number: int, text: str, args: argparse.Namespace, is_raw: bool) -> Prompt:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Prompt(number, fault=f"line {number} is not JSON ({error})")
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        return Prompt(number, fault=f"line {number} must be an object with prompt or messages")
    return _make_prompt(value.pop("id", number), value, args, is_raw)


def _make_prompt(name: object, value: dict[str, Any], args: argparse.Namespace, is_raw: bool) -> Prompt:
    """Return one line's request. The line's fields override the command's flags."""
    flags = params_given(args)
    if value.get("stream"):
        return Prompt(name, fault="an answer here cannot be streamed; leave stream out")
    if "messages" not in value and (is_raw or not isinstance(value["prompt"], str)):
        return Prompt(name, "/v1/completions", {**flags, **value})
    if "messages" not in value:
        value["messages"] = [{"role": "user", "content": value.pop("prompt")}]
    if args.system is not None and isinstance(value["messages"], list):
        value["messages"] = [{"role": "system", "content": args.system}, *value["messages"]]
    return Prompt(name, "/v1/chat/completions", {**flags, **value})


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo batch`."""
    parser.usage = "octavo batch FILE [-o OUT] [options]"
    parser.add_argument(
        "file", metavar="FILE", help="requests, a JSON object on each line, as OpenAI's batches have them"
    )
    group = parser.add_argument_group("batch")
    group.add_argument("--output", "-o", metavar="OUT", help="answers, a line each [FILE with .output before its end]")
    group.add_argument("--errors", metavar="FILE", help="requests that failed [OUT with .errors before its end]")
    group.add_argument(
        "--open", type=OPEN_REQUESTS, metavar="N", help="requests open at once [a quarter more than --max-num-seqs]"
    )
    group.add_argument("--retry-failed", action="store_true", help="repeat requests that failed in an earlier run")
    group.add_argument("--overwrite", action="store_true", help="start again, without the answers of an earlier run")
    group.add_argument("--quiet", "-q", action="store_true", help="print no progress and no figures on stderr")
    add_settings(parser, (*ENGINE_SECTIONS, "adapters"))


def run_batch(args: argparse.Namespace) -> int:
    """Answer the requests that have no answer yet; return 0 if all were answered, 1 if some failed."""
    paths = paths_of(args.file, args.output, args.errors)
    config = config_from(args)
    with _locked(paths.output):
        if args.overwrite:
            paths.output.unlink(missing_ok=True)
        else:
            _check_outputs(paths)
        if args.overwrite or args.retry_failed:
            paths.errors.unlink(missing_ok=True)
        engine = load_engine(config, args.quiet)
        try:
            counts = asyncio.run(_answer_batch(engine, config, paths, args))
        except KeyboardInterrupt:
            say("interrupted; the same command continues where it was")
            raise
    return 1 if counts.num_failed else 0


def paths_of(file: str, output: str | None, errors: str | None) -> BatchPaths:
    """Return the paths of the requests, answers and errors. Raises UsageError."""
    requests = Path(file)
    if not requests.is_file():
        raise UsageError(f"file not found: {file}; give requests as lines of JSON, each with custom_id, url and body")
    out = Path(output) if output else _sibling(requests, ".output")
    failed = Path(errors) if errors else _sibling(out, ".errors")
    check_output("--output", str(out))
    check_output("--errors", str(failed))
    if len({path.resolve() for path in (requests, out, failed)}) < 3:
        raise UsageError(f"requests, answers and errors must be three files; give --output and --errors beside {file}")
    return BatchPaths(requests, out, failed)


def _check_outputs(paths: BatchPaths) -> None:
    """Refuse a file that no run wrote, because resuming would truncate its last line. Raises UsageError."""
    for flag, path in (("--output", paths.output), ("--errors", paths.errors)):
        if not is_output(path):
            raise UsageError(f"{flag} {path} is not a file of answers; give another file, or --overwrite")


def _sibling(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}{word}{path.suffix or '.jsonl'}")


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Lock the output against a second run. Raises UsageError."""
    import fcntl

    with output.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run writes to {output}; wait for it, or give another --output") from None
        yield


async def _answer_batch(engine: LocalEngine, config: Config, paths: BatchPaths, args: argparse.Namespace) -> Counts:
    num_slots = engine.capacity.num_slots
    options = RunOptions(args.open or num_slots + max(2, num_slots // 4), MAX_TRIES)  # so that no slot waits for a line
    async with _application(engine, config) as call:
        total = await asyncio.to_thread(_num_lines, paths.requests)
        started_at = time.perf_counter()
        with _progress(total, args.quiet) as update:
            counts = await BatchRun(call, paths, options, update).run()
    if not args.quiet:
        say(*summary(counts, time.perf_counter() - started_at, paths))
    return counts


def summary(counts: Counts, seconds: float, paths: BatchPaths) -> Iterator[str]:
    """Yield lines with the counts, the speed and the paths of the answers."""
    speed = f", {counts.completion_tokens / seconds:,.1f} tokens/s" if counts.completion_tokens else ""
    yield (
        f"{counts.num_done:,} requests: {counts.num_completed:,} answered, {counts.num_failed:,} failed; this run took "
        f"{seconds:.1f} s: {counts.prompt_tokens:,} prompt and {counts.completion_tokens:,} output tokens{speed}"
    )
    yield f"answers: {paths.output}"
    if counts.num_failed:
        yield f"failed:  {paths.errors} (--retry-failed repeats them)"
    if not counts.num_done:
        yield f"no requests; each line needs custom_id, url ({', '.join(BATCH_PATHS)}) and body"


def _num_lines(path: Path) -> int:
    """Return the number of lines that are not blank, reading one line at a time."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


@contextlib.contextmanager
def _progress(total: int, is_quiet: bool) -> Iterator[Callable[[Counts], object]]:
    """Show a progress bar if stderr is a terminal; yield the function that updates it with counts."""
    if is_quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda counts: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("batch", total=total)
        started_at = time.perf_counter()

        def update(counts: Counts) -> None:
            speed = counts.completion_tokens / max(1e-3, time.perf_counter() - started_at)
            failed = f", {counts.num_failed} failed" if counts.num_failed else ""
            bar.update(task, completed=counts.num_done, description=f"{speed:,.0f} tokens/s{failed}")

        yield update

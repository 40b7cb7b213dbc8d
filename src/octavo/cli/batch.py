"""`octavo batch FILE`: answer a file of requests in OpenAI's batch format, with an engine in this process.

Owns: the arguments, the output paths, the progress bar, the summary, exit codes (0 all answered, 1 some failed).
Does not: know the format of lines or how a run resumes (server.batches does): after a kill at any time, the same
command continues where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.assembly import LocalEngine, build_local
from octavo.cli.flags import UsageError, add_settings, check_output, config_from, whole
from octavo.cli.inner_app import answering
from octavo.cli.terminal import loading, say, warn_limits
from octavo.config import ENGINE_SECTIONS, Config
from octavo.server.api.batches.run import BATCH_PATHS, BatchPaths, BatchRun, Counts, RunOptions, is_output

MAX_TRIES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.usage = "octavo batch FILE [-o OUT] [options]"
    parser.add_argument(
        "file", metavar="FILE", help="requests, a JSON object on each line, as OpenAI's batches have them"
    )
    group = parser.add_argument_group("batch")
    group.add_argument("--output", "-o", metavar="OUT", help="answers, a line each [FILE with .output before its end]")
    group.add_argument("--errors", metavar="FILE", help="requests that failed [OUT with .errors before its end]")
    group.add_argument(
        "--open", type=whole, metavar="N", help="requests open at once [a quarter more than --max-num-seqs]"
    )
    group.add_argument("--retry-failed", action="store_true", help="ask again for what failed in an earlier run")
    group.add_argument("--overwrite", action="store_true", help="begin anew, whatever an earlier run left")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no numbers on stderr")
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Answer the requests that have no answer yet; return 0 when all were answered, 1 when some failed."""
    if args.open is not None and not 1 <= args.open <= 4096:
        raise UsageError(f"--open is {args.open}; give a whole number from 1 to 4096")
    paths = paths_of(args.file, args.output, args.errors)
    config = config_from(args)
    with _locked(paths.output):
        if args.overwrite:
            paths.output.unlink(missing_ok=True)
        else:
            _check_outputs(paths)
        if args.overwrite or args.retry_failed:
            paths.errors.unlink(missing_ok=True)
        with loading(config.model.model, args.quiet):
            engine = build_local(config)
        warn_limits(config, engine.capacity)
        try:
            counts = asyncio.run(_answer(engine, config, paths, args))
        except KeyboardInterrupt:
            say("interrupted; the same command goes on where it was")
            raise
    return 1 if counts.num_failed else 0


def paths_of(file: str, output: str | None, errors: str | None) -> BatchPaths:
    """Return the files of requests, answers and errors. Raises UsageError."""
    requests = Path(file)
    if not requests.is_file():
        raise UsageError(f"file not found: {file}; give requests as lines of JSON, each with custom_id, url and body")
    out = Path(output) if output else _beside(requests, ".output")
    failed = Path(errors) if errors else _beside(out, ".errors")
    check_output("--output", str(out))
    check_output("--errors", str(failed))
    if len({path.resolve() for path in (requests, out, failed)}) < 3:
        raise UsageError(f"requests, answers and errors must be three files; give --output and --errors beside {file}")
    return BatchPaths(requests, out, failed)


def _check_outputs(paths: BatchPaths) -> None:
    """Refuse a file that is not the output of a run, as resuming from it would cut its last line. Raises UsageError."""
    for flag, path in (("--output", paths.output), ("--errors", paths.errors)):
        if not is_output(path):
            raise UsageError(f"{flag} {path} holds something else than answers; give another file, or --overwrite")


def _beside(path: Path, word: str) -> Path:
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


async def _answer(engine: LocalEngine, config: Config, paths: BatchPaths, args: argparse.Namespace) -> Counts:
    num_slots = engine.capacity.num_slots
    options = RunOptions(args.open or num_slots + max(2, num_slots // 4), MAX_TRIES)  # so that no slot waits for a line
    async with answering(engine, config) as call:
        total = await asyncio.to_thread(_num_lines, paths.requests)
        begun = time.perf_counter()
        with _progress(total, args.quiet) as told:
            counts = await BatchRun(call, paths, options, told).run()
    if not args.quiet:
        say(*summary(counts, time.perf_counter() - begun, paths))
    return counts


def summary(counts: Counts, seconds: float, paths: BatchPaths) -> Iterator[str]:
    """Yield lines about what was done, how fast, and where the answers are."""
    speed = f", {counts.completion_tokens / seconds:,.1f} tokens/s" if counts.completion_tokens else ""
    yield (
        f"{counts.num_done:,} requests: {counts.num_completed:,} answered, {counts.num_failed:,} failed; this run took "
        f"{seconds:.1f} s: {counts.prompt_tokens:,} prompt and {counts.completion_tokens:,} output tokens{speed}"
    )
    yield f"answers: {paths.output}"
    if counts.num_failed:
        yield f"failed:  {paths.errors} (--retry-failed asks again)"
    if not counts.num_done:
        yield f"there was nothing to ask; each line needs custom_id, url ({', '.join(BATCH_PATHS)}) and body"


def _num_lines(path: Path) -> int:
    """Return the number of lines that are not blank, reading one line at a time."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


@contextlib.contextmanager
def _progress(total: int, is_quiet: bool) -> Iterator[Callable[[Counts], object]]:
    """Show a progress bar on a terminal, nothing elsewhere; yield the function that takes the counts."""
    if is_quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda counts: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("batch", total=total)
        begun = time.perf_counter()

        def told(counts: Counts) -> None:
            speed = counts.completion_tokens / max(1e-3, time.perf_counter() - begun)
            failed = f", {counts.num_failed} failed" if counts.num_failed else ""
            bar.update(task, completed=counts.num_done, description=f"{speed:,.0f} tokens/s{failed}")

        yield told

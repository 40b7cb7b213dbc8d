"""A sandbox process: its jobs, and the loop that runs one order after the other under the system's resource limits.

Owns: the registry of jobs; the limits on memory, CPU time, files and elapsed time; reading and writing the pipes. To
add a job, add a line in `JOBS` and its argument in wire. Does not: queue jobs or kill processes (pool does).
Invariants: from its first order on, the process can open no file and no socket. If the parent does not kill a job that
exceeds its limit, the alarm ends the process. The process ends when its stdin ends.
"""

from __future__ import annotations

import argparse
import codecs
import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2.debug  # noqa: F401  (jinja2 loads it at a template's first error)
import msgspec

from octavo.errors import EngineError, OctavoError
from octavo.sandbox import wire
from octavo.sandbox.checks import check_regex, check_schema, compile_checked
from octavo.text.chat_template import ChatTemplate

_PR_SET_PDEATHSIG = 1
NICENESS = 5  # gives a third of a serving process's CPU share, so that a job that spins takes little from it
SPARE_S = 2.0  # from a job's limit until the process ends itself; the parent should act first
_CODECS = ("ascii", "latin_1", "unicode_escape", "raw_unicode_escape", "utf_16", "utf_32", "idna", "punycode")
_TEMPLATE = (
    "{%- macro m(x) -%}{{ x|trim|upper }}{%- endmacro -%}{% set n = namespace(a=1) %}{% for x in messages %}"
    "{{ m('\\u00e9\\n\\t') ~ x|tojson(indent=1) }}{% set n.a = loop.index %}{% endfor %}{{ strftime_now('%d %b %Y') }}"
    "{{ [2, 1]|sort|join(',')|replace('1', '3')|title }}{{ '%s'|string|escape }}{{ raise_exception('x') }}"
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job's argument type and its function, which returns plain values or raises an OctavoError."""

    argument: type[msgspec.Struct]
    run: Callable[[Any], object]


def _render_chat(render: wire.RenderChat) -> str:
    template = _template(render.source, tuple(render.tokens.items()))
    return template.render(render.messages, render.add_generation_prompt, render.tools, **render.variables)


@lru_cache(maxsize=4)
def _template(source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(tokens))


JOBS: Mapping[str, Job] = {
    "render_chat": Job(wire.RenderChat, _render_chat),
    "check_schema": Job(wire.CheckSchema, lambda check: check_schema(check.text)),
    "check_regex": Job(wire.CheckRegex, lambda check: check_regex(check.pattern)),
    "compile_grammar": Job(wire.CompileGrammar, compile_checked),
}


def main(
    jobs: Mapping[str, Job] | None = None,
    arguments: list[str] | None = None,
    warm_up: Callable[[], None] | None = None,
) -> None:
    """Serve orders from stdin until it ends. `warm_up` loads what jobs need: no file can be opened after it."""
    parser = argparse.ArgumentParser(prog="python -m octavo.sandbox.child", description="a sandbox process")
    parser.add_argument("--memory-bytes", type=int, required=True, help="most bytes of address space")
    args = parser.parse_args(arguments)
    orders = sys.stdin.buffer
    log, null_device = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(null_device, 1)  # printed text must not mix with the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the terminal's signals
    _end_with_parent()
    os.nice(NICENESS)
    (warm_up or _warm_up)()
    _set_limits(args.memory_bytes, answers.fileno() + 1)
    _send(answers, wire.WorkerReady(wire.VERSION))
    while (order := _receive(orders)) is not None:
        os.dup2(null_device, 2)  # a library that panics prints its input, which must not be logged
        answer = _answer(JOBS if jobs is None else jobs, order)
        os.dup2(log, 2)
        _send(answers, answer)


def _end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even during a job or while the process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _warm_up() -> None:
    """Load everything that jobs load on first use; after this call the process can open no file."""
    for name in _CODECS:
        codecs.lookup(name)
    for work in (
        lambda: ChatTemplate(_TEMPLATE, {}).render([{"content": "x"}]),
        lambda: ChatTemplate("{% for", {}),
        lambda: check_schema('{"pattern": "("}'),
        lambda: compile_checked(wire.CompileGrammar("json_schema", '{"type": "integer", "minimum": "x"}')),
        lambda: compile_checked(wire.CompileGrammar("lark", 'root ::= "a" | [^b]+')),
    ):
        try:
            work()
        except OctavoError:
            continue


def _set_limits(memory_bytes: int, num_files: int) -> None:
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_NOFILE, num_files)  # only the files that are open now
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _answer(jobs: Mapping[str, Job], order: wire.Order) -> wire.JobResult | wire.Refusal:
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    cpu_limit_s = math.ceil(used_s + order.limit_s + SPARE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_REAL, order.limit_s + SPARE_S)
    try:
        return wire.JobResult(order.number, _run_job(jobs, order.job, order.argument))
    except Exception as error:  # a shell: every failure of a job is answered
        return wire.Refusal.of(order.number, error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run_job(jobs: Mapping[str, Job], name: str, packed: msgspec.Raw) -> object:
    """Run a job. Raises the job's errors, or EngineError for an unknown job or a malformed argument."""
    job = jobs.get(name)
    if job is None:
        raise EngineError(f"no job {name!r}")
    try:
        argument = msgspec.msgpack.decode(packed, type=job.argument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise wire.FrameError(f"not an argument of {name}: {error}") from None
    return job.run(argument)


def _receive(orders: BinaryIO) -> wire.Order | None:
    head = orders.read(wire.LENGTH.size)
    if len(head) < wire.LENGTH.size:
        return None
    length = wire.length_of(head)
    body = orders.read(length)
    return wire.decode_order(body) if len(body) == length else None


def _send(answers: BinaryIO, message: wire.ToParent) -> None:
    try:
        data = wire.frame(message)
    except wire.FrameError as error:
        assert isinstance(message, wire.JobResult)
        data = wire.frame(wire.Refusal.of(message.number, error))
    answers.write(data)
    answers.flush()


if __name__ == "__main__":
    main()

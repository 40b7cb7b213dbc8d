"""The main loop of a tool process: run one order after the other, under the system's limits.

Owns: the limits on memory, CPU time, files and time of day, and reading and writing the pipes.
Does not: know the jobs.
Invariants: from its first order on the process can open no file and no socket; a job that its parent does not kill is
ended by the alarm; the process ends with its stdin.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import BinaryIO

from octavo.tool import wire
from octavo.tool.jobs import JOBS, Job, do, warm_up

_PR_SET_PDEATHSIG = 1
NICENESS = 5  # a third of the CPU share of a serving process, so that a job that spins takes little from it
SPARE_S = 2.0  # beyond a job's limit, before the process ends itself: the parent should act first


def main(jobs: Mapping[str, Job] = JOBS, arguments: list[str] | None = None) -> None:
    """Serve orders from stdin until it ends."""
    parser = argparse.ArgumentParser(prog="python -m octavo.tool", description="a tool process")
    parser.add_argument("--memory-bytes", type=int, required=True, help="most bytes of address space")
    args = parser.parse_args(arguments)
    orders = sys.stdin.buffer
    log, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(nowhere, 1)  # printed text must not mix with the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's signals are the parent's to handle
    _end_with_parent()
    os.nice(NICENESS)
    warm_up()
    _set_limits(args.memory_bytes, answers.fileno() + 1)
    _send(answers, wire.WorkerReady(wire.VERSION))
    while (order := _receive(orders)) is not None:
        os.dup2(nowhere, 2)  # a library that panics prints its input, which belongs in no log
        answer = _answer(jobs, order)
        os.dup2(log, 2)
        _send(answers, answer)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even during a job or while stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_limits(memory_bytes: int, num_files: int) -> None:
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_NOFILE, num_files)  # only those that are open now
    _limit(resource.RLIMIT_CORE, 0)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (allowed, allowed))


def _answer(jobs: Mapping[str, Job], order: wire.Order) -> wire.JobResult | wire.Refusal:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    most = math.ceil(used + order.limit_s + SPARE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_REAL, order.limit_s + SPARE_S)
    try:
        return wire.JobResult(order.number, do(jobs, order.job, order.argument))
    except Exception as error:  # a shell: any failure of a job is answered
        return wire.Refusal.of(order.number, error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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

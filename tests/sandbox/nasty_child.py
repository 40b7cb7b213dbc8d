"""A sandbox process whose jobs misbehave, for tests: python nasty_child.py --memory-bytes N."""

import os
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError
from octavo.sandbox.child import JOBS, Job, main


class Nothing(msgspec.Struct):
    """What these jobs take."""

    value: Any = None


def _spin(_: Nothing) -> None:
    while True:
        pass


def _hold_the_lock(_: Nothing) -> object:
    return 7 ** (10**8)  # one operation of many seconds, which no signal handler of Python's interrupts


def _kill_once(asked: Nothing) -> str:
    """Die, but not when the file descriptor that the path names was made: the second child of a pair lives."""
    if not os.path.exists(asked.value):
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"


def _refuse(_: Nothing) -> None:
    raise InvalidRequestError("no such thing", "thing")


def _print(_: Nothing) -> str:
    print("not a frame")
    return "printed"


def _recurse(asked: Nothing) -> None:
    _recurse(asked)


def _environment(_: Nothing) -> list[str]:
    return sorted(os.environ)


def _descriptor(_: Nothing) -> int:
    with open("/dev/null") as file:
        return file.fileno()


def _socket(_: Nothing) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()


NASTY = {
    "spin": _spin,
    "lock": _hold_the_lock,
    "sleep": lambda asked: time.sleep(asked.value),
    "echo": lambda asked: asked.value,
    "memory": lambda asked: len(bytearray(asked.value)),
    "exit": lambda asked: os._exit(asked.value),
    "kill_once": _kill_once,
    "refuse": _refuse,
    "fail": lambda asked: 1 // 0,
    "print": _print,
    "recurse": _recurse,
    "long": lambda asked: "x" * asked.value,
    "environment": _environment,
    "open": _descriptor,
    "socket": _socket,
}

if __name__ == "__main__":
    main({**JOBS, **{name: Job(Nothing, do) for name, do in NASTY.items()}}, sys.argv[1:])

"""A child for tests of the supervisor: `python fake_child.py --listener FD --status FD`, its task a line on stdin.

The task's "says" is what it does in each of its lives, in order; the last one repeats. "serve" answers every connection
with its life's number and ends with 0 at SIGTERM; "hang" is ready and ignores SIGTERM; "exit N" ends before it is
ready; "still" is ready, alive once, and then not; "crash" is ready and then dies; "useful" answers one and dies; "fail"
ends as if its engine had failed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from octavo.engine.parent import end_with_parent
from octavo.frontend.api_supervisor import ALIVE, ANSWERED, EXIT_ENGINE_FAILED, READY


def main(arguments: list[str]) -> int:
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    task = json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    word = task["says"][min(task["life"], len(task["says"])) - 1]
    status = int(given["--status"])
    listener = socket.socket(fileno=int(given["--listener"]))
    listener.setblocking(True)
    if word.startswith("exit"):
        return int(word.split()[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if word == "hang" else lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, lambda *_: print("the child got SIGHUP", file=sys.stderr, flush=True))
    os.write(status, READY + ALIVE * (word == "still"))
    if word == "fail":
        return EXIT_ENGINE_FAILED
    while word != "crash":
        connection = listener.accept()[0]
        with connection:
            connection.sendall(f"{task['life']} {os.getpid()}".encode())
        if word == "useful":
            os.write(status, ANSWERED)
            break
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

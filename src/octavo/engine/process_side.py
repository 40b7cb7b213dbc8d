"""The main function of an engine process.

Owns: the arguments, the config line, ending with the parent, stack dumps, and the exit status.
Does not: know which executor runs; assembly (or a test) passes a function that opens the engine.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from octavo.config import Config
from octavo.engine.heartbeat import HeartbeatPage, HeartbeatWriter
from octavo.engine.loop import EngineLoop
from octavo.engine.parent import DUMP_SIGNAL, end_with_parent
from octavo.engine.socket_server import EngineServer
from octavo.errors import ConfigError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.observe.log import num_dropped_lines, set_up_log

EXIT_FAILED = 1  # the engine could not be opened, or it died; the parent has the reason

Open = Callable[[Config], tuple[EngineLoop, Capacity]]


def run_engine_process(open_engine: Open, arguments: Sequence[str] | None = None) -> int:
    """Serve an engine on a connection until the client or the parent has ended; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m octavo.assembly", description="an engine process")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection to the client")
    parser.add_argument("--page", type=int, required=True, help="descriptor of the heartbeat's page")
    parser.add_argument("--flight", default="", help="descriptors of the flight recorder's files, with commas between")
    parser.add_argument("--epoch", type=int, default=1, help="number of this engine, in every frame")
    args = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    config = _read_config(sys.stdin.buffer.readline())
    set_up_log(config.telemetry.log_format, config.telemetry.log_level, "engine")
    end_with_parent()
    server = EngineServer(socket.socket(fileno=args.socket), args.epoch)
    try:
        try:
            engine, capacity = open_engine(config)
        except (OctavoError, OSError, MemoryError, ImportError, RuntimeError) as error:
            if not isinstance(error, OctavoError):  # the parent shows the message of an OctavoError
                logging.getLogger(__name__).exception("the engine cannot start")
            server.fail(error)
            return EXIT_FAILED
        engine.heartbeat = HeartbeatWriter(HeartbeatPage(args.page), args.epoch)
        if args.flight:
            engine.attach_flight([int(word) for word in args.flight.split(",")])
        engine.sections["log"] = lambda: {"dropped": num_dropped_lines()}
        gc.freeze()  # objects made so far live as long as this process, so the collector need not scan them
        server.serve(engine, capacity)
        return EXIT_FAILED if engine.failure is not None else 0
    finally:
        server.close()


def _read_config(line: bytes) -> Config:
    try:
        return msgspec.json.decode(line, type=Config)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the config line on stdin cannot be read: {error}") from None

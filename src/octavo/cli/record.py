"""`octavo record`: writes the last minutes of a running server as a recording.

Owns: the flags, the order to the server, and how the server carries it out. Does not: record, or replay.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.cli.flags import read_duration
from octavo.cli.servers import add_server_arguments, call_admin, named_server
from octavo.config import FlightConfig
from octavo.errors import ConfigError
from octavo.frontend.flight_recordings import FlightRecordings

if TYPE_CHECKING:
    from octavo.cli.api_process import Engine

SETTLE_S = 0.25  # more than twice the time after which a recorder writes


class RecordOrder(msgspec.Struct, forbid_unknown_fields=True):
    """The argument of the admin verb: the folder to write to, and how many seconds (None: all that is kept)."""

    folder: str
    last_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--last", metavar="TIME", help="the last 90s, 5m or 1h of what the server keeps [all of it, see docs]"
    )
    parser.add_argument("--output", "-o", metavar="DIR", help="folder to write to [octavo-record-DATE-TIME, here]")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Have the server write the recording; print where it is."""
    last_s = None if args.last is None else read_duration("--last", args.last)
    folder = Path(args.output or time.strftime("octavo-record-%Y%m%d-%H%M%S")).expanduser().absolute()
    order = msgspec.json.encode(RecordOrder(str(folder), last_s)).decode()
    answer = call_admin(named_server(args).admin, "record", order)
    for each in answer["recordings"]:
        print(f"{each['folder']}: {each['bytes']:,} bytes, {each['seconds']:.1f} s; octavo replay {each['folder']}")
    return 0


async def record(engine: Engine, config: FlightConfig, argument: str) -> object:
    """Write what the flight recorders of a server's engines keep: the admin verb. Raises ConfigError."""
    try:
        order = msgspec.json.decode(argument, type=RecordOrder)
    except msgspec.MsgspecError:
        order = RecordOrder(argument)
    if config.flight_recorder <= 0:
        raise ConfigError(
            "this server has no flight recorder; start it with --flight-recorder and seconds, or --record"
        )
    folder = Path(order.folder)
    if not order.folder or not folder.is_absolute():
        raise ConfigError(f"record {order.folder[:200]!r} is no folder; give its whole path, or use octavo record")
    if folder.is_dir() and any(folder.rglob("*.octrec")):
        raise ConfigError(f"{folder} holds a recording already; name another folder")
    flights = engine.flights()
    await asyncio.sleep(SETTLE_S)  # until the calls so far are in the files
    return {"recordings": await asyncio.to_thread(_write, folder, flights, order.last_s)}


def _write(folder: Path, flights: dict[str, FlightRecordings], last_s: float | None) -> list[dict[str, object]]:
    """Write each engine's recording, several to a folder each; return what was written. Raises ConfigError."""
    written: list[dict[str, object]] = []
    for name, kept in flights.items():
        own = folder if len(flights) == 1 else folder / re.sub(r"[^\w.-]", "-", name)
        try:
            found = kept.read("taken by octavo record", last_s)
            if found is None:
                continue
            kept.write(own, found[0])
        except ValueError:  # the engine has ended, and its files are closed
            continue
        except OSError as error:
            raise ConfigError(f"{own} cannot be written to: {error.strerror or error}; give another folder") from None
        written.append({"folder": str(own), "bytes": len(found[0]), "seconds": round(found[1], 3)})
    if not written:
        raise ConfigError("there is nothing to record yet: no engine has accepted a request since it started")
    return written

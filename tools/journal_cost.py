"""Compare the journal's segments with SQLite as the place for its records: `python -m tools.journal_cost`.

Each step appends one record with a token for each row. The ways: `segment` is the journal's, one write(2) in the event
loop's thread, and fdatasync in another. `sqlite` commits in the event loop's thread (WAL, synchronous NORMAL); another
thread syncs the WAL and checkpoints it. `sqlite thread` gives the record to a thread that commits (synchronous FULL).
Prints, for each way: the time in the event loop's thread, the bytes written, how often a killed process had not written
what a client saw, and what is read after one bit of the file was flipped.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from octavo.frontend.journal_files import BootClock, Disk, Head, JournalSegment, LoggedEvents, packed, read_records

WAL_PAGES = 1000  # at which SQLite checkpoints
SYNC_S = 0.01


def records(rows: int) -> Iterator[bytes]:
    """Yield the records of decoding steps without end."""
    numbers, zeros = array("i", range(rows)).tobytes(), bytes(4 * rows)
    position = 0
    while True:
        ids = array("i", range(position, position + rows)).tobytes()
        positions = (array("i", [position]) * rows).tobytes()
        yield packed(LoggedEvents(0.0, numbers, zeros, positions, ids))
        position += 1


class Segment:
    """A segment, synced by another thread."""

    def __init__(self, folder: Path) -> None:
        clock = BootClock.now()
        head = Head(2, 1, 0, clock.boot, clock.mono, clock.wall, "m")
        self.path = folder / "journal-00000001.seg"
        self._segment = JournalSegment(self.path, head, Disk())
        self._is_open = True
        self._thread = threading.Thread(target=self._sync)
        self._thread.start()

    def add(self, data: bytes) -> None:
        """Append a record."""
        self._segment.add(data)

    def close(self) -> None:
        """End the thread and close the file."""
        self._is_open = False
        self._thread.join()
        self._segment.close()

    def _sync(self) -> None:
        while self._is_open:
            time.sleep(SYNC_S)
            self._segment.sync()

    @staticmethod
    def read(folder: Path) -> list[bytes]:
        """Return the whole records."""
        contents = read_records((folder / "journal-00000001.seg").read_bytes())
        return [packed(record) for record in contents.records[1:]]


class Sqlite:
    """A table that is committed to by the caller's thread."""

    synchronous = "normal"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records.db"
        self._db = self._connect()
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("create table record(id integer primary key, body blob)")
        self._db.execute("pragma wal_autocheckpoint=0")
        self._is_open = True
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        db.execute(f"pragma synchronous={self.synchronous}")
        return db

    def add(self, data: bytes) -> None:
        """Append a record."""
        self._db.execute("insert into record(body) values (?)", (data,))

    def close(self) -> None:
        """End the thread and close the database."""
        self._is_open = False
        self._thread.join()
        self._db.close()

    def _work(self) -> None:
        """Sync the WAL, and checkpoint it when it has grown."""
        db, wal, num_done = self._connect(), self.path.with_name("records.db-wal"), 0
        fd = os.open(wal, os.O_RDONLY)
        while self._is_open:
            time.sleep(SYNC_S)
            os.fdatasync(fd)
            num_changes = self._db.total_changes
            if num_changes - num_done > WAL_PAGES // 3:  # a commit writes two pages or more
                num_done = num_changes
                db.execute("pragma wal_checkpoint(passive)")
                db.execute("pragma wal_checkpoint(restart)")
        os.close(fd)
        db.close()

    @staticmethod
    def read(folder: Path) -> list[bytes]:
        """Return the records."""
        db = sqlite3.connect(folder / "records.db")
        try:
            return [body for (body,) in db.execute("select body from record order by id")]
        finally:
            db.close()


class SqliteThread(Sqlite):
    """A table that another thread commits to."""

    synchronous = "full"

    def __init__(self, folder: Path) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        super().__init__(folder)

    def add(self, data: bytes) -> None:
        """Hand a record to the thread."""
        self._waiting.put(data)

    def close(self) -> None:
        """Commit what waits, and close the database."""
        self._waiting.put(None)
        super().close()

    def _work(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get())
            self._db.execute("begin")
            self._db.executemany("insert into record(body) values (?)", [(data,) for data in taken if data is not None])
            self._db.execute("commit")
            if None in taken:
                return


WAYS: dict[str, type[Segment | Sqlite]] = {"segment": Segment, "sqlite": Sqlite, "sqlite thread": SqliteThread}


def written() -> int:
    """Return the bytes that this process wrote so far."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def measure(name: str, rows: int, seconds: float, folder: Path) -> str:
    """Append records with pauses; return the figures of a step."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        way = WAYS[name](Path(place))
        times, before, end = [], written(), time.perf_counter() + seconds
        for data in records(rows):
            begin = time.perf_counter()
            way.add(data)
            times.append(time.perf_counter() - begin)
            if begin > end:
                break
            time.sleep(0.002)
        way.close()
        times.sort()
        figures = [f"{times[int(len(times) * part)] * 1e6:,.0f}" for part in (0.5, 0.99, 0.999)]
        size = (written() - before) // len(times)
    return f"median, p99, p99.9, max {', '.join(figures)}, {times[-1] * 1e6:,.0f} us; {size:,} bytes written"


def serve(name: str, place: Path) -> None:
    """Append records until killed; print a dot for each record that a client has seen."""
    way = WAYS[name](place)
    for number, data in enumerate(records(32)):
        way.add(data)
        os.write(1, b".")
        busy = time.perf_counter() + 0.003
        while time.perf_counter() < busy:
            pass
        time.sleep(0.002 * (number % 2))


def lost(name: str, folder: Path) -> int:
    """Kill a process that appends; return how many records were seen and are not there."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = [sys.executable, "-m", "tools.journal_cost", "--serve", name, "--folder", place]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            num_seen = len(process.stdout.read(20))
            time.sleep(0.1 + 0.2 * random.random())
            process.send_signal(signal.SIGKILL)
            num_seen += len(process.stdout.read())
        return max(0, num_seen - len(WAYS[name].read(Path(place))))


def flipped(name: str, folder: Path) -> str:
    """Flip one bit of a closed file; return what a reader gets."""
    made = [data for data, _ in zip(records(32), range(300), strict=False)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        way = WAYS[name](Path(place))
        for data in made:
            way.add(data)
        way.close()
        content = bytearray(way.path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        way.path.write_bytes(content)
        found: list[bytes] = []
        with suppress(sqlite3.Error):
            found = WAYS[name].read(Path(place))
    if found == made:
        return "all"
    return "some, all right" if all(data in made for data in found) else "wrong ones"


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (the current folder)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of measurements, interleaved")
    parser.add_argument("--times", type=int, default=24, help="processes killed, and bits flipped, for each way")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.folder)
    for rows in (32, 256):
        for _ in range(given.rounds):
            for name in WAYS:
                print(f"{rows} rows, {name}: {measure(name, rows, given.seconds, given.folder)}", flush=True)
    for name in WAYS:
        steps = [lost(name, given.folder) for _ in range(given.times)]
        print(f"{name}: kills that lost what a client saw: {sum(map(bool, steps))} of {given.times}", flush=True)
        found = Counter(flipped(name, given.folder) for _ in range(given.times))
        print(f"{name}: read after a flipped bit: {dict(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

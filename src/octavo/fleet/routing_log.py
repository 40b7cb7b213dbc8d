"""The routing log of a fleet: each choice of its router with what the router saw, written, read back, and replayed.

Owns: the records, the log's secret, the thread that writes, the bound in bytes, and the comparison of choices.
Does not: choose (fleet.routing), or frame and compress (observe.recording.reader).
A log is MARK, the version (uint16, little-endian), and frames: the header as JSON, then msgpack arrays of records. A
choice holds only the targets that changed since the last one. Keys, sessions and tenants are digests under a secret
that is drawn for each log and not stored, so that a guess of the text cannot be verified. Request ids are digests too.
Invariants: the calls of the event loop never wait and never raise. A file that is cut off is read to its last frame.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.fleet.routing import RoutedPrompt, RouterTarget, create_router
from octavo.observe.recording.format import RecordingError
from octavo.observe.recording.reader import pack_frame, read_frame
from octavo.observe.recording.recorder import prepare_folder

_LOG = logging.getLogger(__name__)
MARK = b"octavo-routing\n"
VERSION = 1
SUFFIX = ".octroute"
DIGEST_BYTES = 8
FLUSH_S = 0.25  # of choices that a kill may lose
MAX_QUEUED = 16384  # records that may wait for the writer
MAX_OPEN = 65536  # requests whose end may be logged
_END_BYTES = 1024  # reserved for the last record
_VERSION = struct.Struct("<H")
_CLOSED = "the fleet was stopped"


class RoutingHeader(msgspec.Struct, frozen=True):
    """The router of a log, the tokens under each key, and the Unix time of its begin."""

    router: str
    seed: int
    key_tokens: int
    began: float


class PromptRecord(msgspec.Struct, frozen=True, array_like=True):
    """A request as the router saw it; `keys` has DIGEST_BYTES for each key.

    `name` is the digest_of its id, which recordings of engines have. It arrived at the front `waited_s` before the
    choice. Older logs have neither.
    """

    keys: bytes
    prompt_tokens: int
    session: str
    tenant: str
    num_choices: int
    name: bytes = b""
    waited_s: float = 0.0

    def prompt(self) -> RoutedPrompt:
        """Return the request for a router."""
        size = DIGEST_BYTES
        keys = tuple(self.keys[start : start + size] for start in range(0, len(self.keys), size))
        return RoutedPrompt(keys, self.prompt_tokens, self.session, self.tenant)


class ChoiceRecord(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A choice, `time` seconds after the log's begin. `prompt` is None if the request was routed before.

    `changed` has the number, load and open requests of each target that differs from the last choice; `gone` has the
    targets that are no longer up.
    """

    time: float
    request: int
    prompt: PromptRecord | None
    changed: tuple[tuple[int, int, int], ...]
    gone: tuple[int, ...]
    chosen: int


class EndRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The end of a request, with the output tokens of all its choices, and when the front had the first one."""

    time: float
    request: int
    output_tokens: int
    first_token: float | None = None


class LogEndRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The log's own end; the last record."""

    reason: str


RoutingRecord = ChoiceRecord | EndRecord | LogEndRecord
_RECORDS = msgspec.msgpack.Decoder(list[RoutingRecord])
_HEADER = msgspec.json.Decoder(RoutingHeader)


class RoutingLog:
    """Writes the choices of one router to a new file in a folder of at most `max_bytes` of routing logs."""

    def __init__(
        self, folder: Path, max_bytes: int, header: RoutingHeader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin a file. Raises ConfigError if the folder cannot be written to, or is full."""
        self._clock, self._began = clock, clock()
        prepare_folder(folder)
        self._room = max_bytes - sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}")) - _END_BYTES
        head = MARK + _VERSION.pack(VERSION) + pack_frame(msgspec.json.encode(header))
        if self._room < len(head):
            raise ConfigError(f"{folder} holds {max_bytes} bytes of routing logs; give another, or more --record-bytes")
        numbers = (int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())
        number, descriptor = max(numbers, default=0), -1
        while descriptor < 0:
            number += 1
            self.path = folder / f"{number:04d}{SUFFIX}"
            with contextlib.suppress(FileExistsError):  # of another model of the same fleet
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._write(head)
        self._secret = secrets.token_bytes(16)
        self._requests: dict[str, int] = {}  # requests that have not ended -> their numbers in the log
        self._num_requests = 0
        self._targets: dict[int, tuple[int, int, int]] = {}  # as of the last choice
        self._queue: deque[RoutingRecord] = deque()
        self._end_reason = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-routing-log", daemon=True)
        self._thread.start()

    # --- the event loop's thread

    def mask(self, prompt: RoutedPrompt) -> RoutedPrompt:
        """Return the request with digests under the log's secret, as the log has it."""
        digest = self._digest
        names = (digest(name.encode("utf-8", "surrogatepass")).hex() if name else "" for name in
                 (prompt.session, prompt.tenant))  # fmt: skip
        return RoutedPrompt(tuple(map(digest, prompt.keys)), prompt.prompt_tokens, *names)

    def chosen(self, request: Request, prompt: RoutedPrompt, targets: Sequence[RouterTarget], number: int) -> None:
        """Record a choice: `prompt` is masked, `targets` are as they were at the choice."""
        if self._end_reason:
            return
        name, num_choices, now = request.request_id, request.params.num_sequences, self._clock()
        index, known = self._requests.get(name), None
        if index is None:
            index, self._num_requests = self._num_requests, self._num_requests + 1
            self._requests[name] = index
            if len(self._requests) > MAX_OPEN:  # ends of refused requests are not known
                del self._requests[next(iter(self._requests))]
            known = PromptRecord(
                b"".join(prompt.keys), prompt.prompt_tokens, prompt.session, prompt.tenant, num_choices,
                digest_of(name), max(0.0, now - request.arrival),
            )  # fmt: skip
        seen = {target.number: (target.number, target.load, target.num_open) for target in targets}
        changed = tuple(target for target in seen.values() if self._targets.get(target[0]) != target)
        gone = tuple(target for target in self._targets if target not in seen)
        self._targets = seen
        self._add(ChoiceRecord(now - self._began, index, known, changed, gone, number))

    def ended(self, name: str, output_tokens: int, first_at: float | None) -> None:
        """Record the end of a request; `first_at` is when the front had its first token, by the log's clock."""
        index = self._requests.pop(name, None)
        if index is not None and not self._end_reason:
            first = None if first_at is None else first_at - self._began
            self._add(EndRecord(self._clock() - self._began, index, output_tokens, first))

    def close(self, reason: str = _CLOSED) -> None:
        """End the log once all queued records are written. Idempotent."""
        self._end_reason = self._end_reason or reason
        self._is_over.set()
        self._thread.join()

    def _add(self, record: RoutingRecord) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self._end_reason = f"the writer had {MAX_QUEUED} records to write; is the disk too slow?"
            self._is_over.set()
        else:
            self._queue.append(record)

    def _digest(self, data: bytes) -> bytes:
        return blake2b(self._secret + data, digest_size=DIGEST_BYTES).digest()

    # --- the writer's thread

    def _run(self) -> None:
        try:
            while not self._is_over.wait(FLUSH_S):
                self._flush()
            self._flush()
            self._write(_pack([LogEndRecord(self._end_reason)]))
        except OSError as error:
            self._end_reason = f"{self.path} cannot be written: {error.strerror or error}"
        if self._end_reason != _CLOSED:
            _LOG.warning("the routing log ended: %s", self._end_reason)
        self._queue.clear()
        self._file.close()

    def _flush(self) -> None:
        """Write a frame of the queued records; end the log if there is no room for it."""
        records = [self._queue.popleft() for _ in range(len(self._queue))]
        frame = _pack(records) if records else b""
        if len(frame) > self._room:
            self._end_reason = "its folder holds its bound of bytes (--record-bytes)"
            self._is_over.set()
        elif frame:
            self._write(frame)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self._room -= len(data)


def digest_of(name: str) -> bytes:
    """Return a digest of a request's id, without the secret: the engine's ids have a random part."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _pack(records: list[RoutingRecord]) -> bytes:
    return pack_frame(msgspec.msgpack.encode(records))


def routing_logs(folder: Path) -> list[Path]:
    """Return the routing logs in a folder, in order; [the file] for one log."""
    return [folder] if folder.suffix == SUFFIX else sorted(folder.glob(f"*{SUFFIX}"))


def read_routing_log(path: Path) -> tuple[RoutingHeader, Iterator[RoutingRecord]]:
    """Return a log's header and its records. Raises RecordingError."""
    records = _frames(path)
    try:
        header = _HEADER.decode(next(records, b""))
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path} has no header that Octavo wrote ({error})") from None
    return header, _records(path, records)


def _frames(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            first = file.read(len(MARK) + _VERSION.size)
            if first != MARK + _VERSION.pack(VERSION):
                raise RecordingError(
                    f"{path} is no routing log of format {VERSION}: read it with the version that wrote it"
                )
            while (body := read_frame(file)) is not None:
                yield body
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None


def _records(path: Path, frames: Iterator[bytes]) -> Iterator[RoutingRecord]:
    for frame in frames:
        try:
            yield from _RECORDS.decode(frame)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{path} holds a record that Octavo did not write ({error})") from None


@dataclass(slots=True)
class LoggedTarget:
    """A replica as a log has it."""

    number: int
    load: int
    num_open: int

    def __str__(self) -> str:
        return f"replica {self.number} ({self.load:,} prompt tokens in {self.num_open} open requests)"


@dataclass(frozen=True, slots=True)
class RoutingReplay:
    """A replay: how many choices were equal, and the first that was not, as text. `end_reason` is "" if cut off."""

    router: str
    num_requests: int
    num_choices: int
    num_equal: int
    difference: str
    end_reason: str

    @property
    def is_equal(self) -> bool:
        """True if every choice is equal."""
        return self.num_equal == self.num_choices


def replay_routing(path: Path) -> RoutingReplay:
    """Let a new router of the same name make every choice of a log again. Raises RecordingError, ConfigError."""
    header, records = read_routing_log(path)
    router = create_router(header.router, header.seed)
    prompts: dict[int, RoutedPrompt] = {}
    targets: dict[int, LoggedTarget] = {}
    num_choices = num_equal = num_requests = 0
    difference = end_reason = ""
    for record in records:
        if isinstance(record, LogEndRecord):
            end_reason = record.reason
        elif isinstance(record, EndRecord):
            prompts.pop(record.request, None)
        else:
            num_choices += 1
            if record.prompt is not None:
                prompts[record.request] = record.prompt.prompt()
                num_requests += 1
            apply_choice(targets, record)
            if record.request not in prompts or record.chosen not in targets:
                raise RecordingError(f"{path} has choice {num_choices} of a request or a replica that it did not name")
            if difference:
                continue
            chosen = router.choose(prompts[record.request], [targets[number] for number in sorted(targets)])
            if chosen.number == record.chosen:
                num_equal += 1
            else:
                difference = (
                    f"choice {num_choices}, {record.time:.3f} s: the fleet chose {targets[record.chosen]}, the replay "
                    f"{targets[chosen.number]}"
                )
    return RoutingReplay(header.router, num_requests, num_choices, num_equal, difference, end_reason)


def apply_choice(targets: dict[int, LoggedTarget], choice: ChoiceRecord) -> None:
    """Bring the targets up to date with a choice."""
    for number in choice.gone:
        targets.pop(number, None)
    targets.update((number, LoggedTarget(number, load, num_open)) for number, load, num_open in choice.changed)

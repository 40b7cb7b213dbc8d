"""Files and batches on disk: a folder with a small record for each of them.

Owns: both record types and their form in OpenAI's API; names; bounds (files, bytes, batches, age); which tenant has
which file; the lock against a second server.
Does not: run batches. All methods except reads from memory wait for the disk: call them off the event loop.
Invariant: a record is written under another name and renamed, so it is whole or absent. A file without a record belongs
to no tenant. It is removed when the folder is opened, unless it is the output of a pending batch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from octavo.config import BatchConfig
from octavo.frontend.journal_files import lock_folder
from octavo.server.api.batches.run import BatchPaths, Counts, write_whole
from octavo.server.http.errors import ApiError, bad_field
from octavo.server.http.keys import KeyInfo
from octavo.server.http.limits import Shares

PENDING = ("validating", "in_progress", "finalizing", "cancelling")


class FileRecord(msgspec.Struct):
    """A file of a tenant. Times are whole Unix seconds. If `expires_at` is None, the server's age bound applies."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return the file as OpenAI's API shows it."""
        made: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }
        return made if self.expires_at is None else {**made, "expires_at": self.expires_at}


class LineError(msgspec.Struct):
    """The error of a batch, or of one line of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct):
    """A batch. `holder` names the key that its requests use; `output_id` and `error_id` are files once it has ended."""

    id: str
    tenant: str
    holder: str
    endpoint: str
    input_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    status: str = "validating"
    total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_keep_s: int | None = None
    metadata: dict[str, str] | None = None
    errors: list[LineError] = []
    times: dict[str, int] = {}
    has_output: bool = False
    has_errors: bool = False
    paused: LineError | None = None  # why the batch waits; None while it runs

    @property
    def is_pending(self) -> bool:
        """True until the batch has ended."""
        return self.status in PENDING

    def count(self, counts: Counts) -> None:
        """Copy the progress of the batch's run."""
        self.num_completed, self.num_failed = counts.num_completed, counts.num_failed

    def shown(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API shows it."""
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        listed = [msgspec.to_builtins(error) for error in (*self.errors, self.paused) if error is not None]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": listed} if listed else None,
            "input_file_id": self.input_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{moment}_at": self.times.get(moment) for moment in moments},
            "request_counts": {"total": self.total, "completed": self.num_completed, "failed": self.num_failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }


MAX_ENDED_BATCHES = 1000  # per tenant; above this, a new batch drops the oldest ended ones, but not their files
_OURS = re.compile(r"(file-|batch_)[0-9a-f]{32}\.(data|new)")  # only files with these names may be removed
R = TypeVar("R", FileRecord, BatchRecord)


class BatchStore:
    """The folder of files and batches. The store draws all ids, so a client's name never becomes a path."""

    def __init__(self, config: BatchConfig, folder: Path, shares: Shares) -> None:
        """Open the folder, take its lock, and read its records. Raises ConfigError."""
        self._config = config
        self._shares = shares
        self._folder = folder
        self._lock_fd = lock_folder(folder, "--batch-dir")
        self._changes = threading.Lock()
        self._new_batches = threading.Lock()
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        for kind in ("files", "batches"):
            (folder / kind).mkdir(mode=0o700, exist_ok=True)
        self.files.update(_read_all(folder / "files", FileRecord))
        self.batches.update(_read_all(folder / "batches", BatchRecord))
        self._clear()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's bytes."""
        return self._folder / "files" / f"{file_id}.data"

    def paths(self, batch: BatchRecord) -> BatchPaths:
        """Return the paths of a batch's files."""
        return BatchPaths(self.path(batch.input_id), self.path(batch.output_id), self.path(batch.error_id))

    def add_file(self, source: IO[bytes], record: FileRecord, holder: KeyInfo) -> None:
        """Store a file that was sent with the key `holder`. Raises ApiError if the tenant has no room."""
        with self._changes:
            self.check_room(holder, record.bytes)
            self.files[record.id] = record
        try:
            with self.path(record.id).open("xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            self._write("files", record)
        except BaseException:
            self.files.pop(record.id, None)
            self.path(record.id).unlink(missing_ok=True)
            raise

    def adopt(self, file_id: str, batch: BatchRecord, name: str) -> bool:
        """Make a batch's output a file of its tenant; return False if the output is empty."""
        path = self.path(file_id)
        if not path.exists() or not path.stat().st_size:
            return False
        now = int(time.time())
        expires = None if batch.output_keep_s is None else now + batch.output_keep_s
        record = FileRecord(file_id, batch.tenant, name, "batch_output", path.stat().st_size, now, expires)
        self._write("files", record)
        self.files[file_id] = record
        return True

    def delete_file(self, record: FileRecord) -> None:
        """Delete a file. Raises ApiError while a pending batch needs it."""
        for batch in self.batches.values():
            if batch.is_pending and record.id == batch.input_id:
                message = f"file {record.id} is the input of {batch.id}, which is {batch.status}; cancel that first"
                raise ApiError(409, message, code="file_in_use")
        self._drop_file(record)

    def save(self, batch: BatchRecord) -> None:
        """Write a batch's record."""
        self._write("batches", msgspec.structs.replace(batch, paused=None))

    def add_batch(self, batch: BatchRecord, holder: KeyInfo) -> None:
        """Add a batch of the key `holder`. On ApiError (too many, or no room) or OSError, nothing was added."""
        with self._new_batches:
            ended = self._check_batches(batch, holder)
            self.save(batch)
            self.batches[batch.id] = batch
        for other in ended[: max(0, len(ended) + 1 - MAX_ENDED_BATCHES)]:
            self._drop_batch(other)

    def _check_batches(self, batch: BatchRecord, holder: KeyInfo) -> list[BatchRecord]:
        """Return the tenant's ended batches. Raises ApiError if too many are pending, or for lack of room."""
        own = [other for other in tuple(self.batches.values()) if other.tenant == batch.tenant]
        pending = sum(other.is_pending for other in own)
        most = min(self._config.max_pending_batches, holder.max_pending_batches or self._config.max_pending_batches)
        if pending >= most:
            message = f"{pending} of your batches are not over, {most} may be; wait for one, or cancel one"
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60)
        self.check_output_room(holder)
        return [other for other in own if not other.is_pending]

    def expire(self, now: float) -> None:
        """Delete files and ended batches that are too old."""
        for file in list(self.files.values()):
            is_old = now >= (file.expires_at or file.created_at + self._config.batch_keep_s)
            if is_old and not any(b.is_pending and file.id == b.input_id for b in self.batches.values()):
                self._drop_file(file)
        for batch in list(self.batches.values()):
            if not batch.is_pending and now >= batch.created_at + self._config.batch_keep_s:
                self._drop_batch(batch)

    def check_room(self, holder: KeyInfo, num_bytes: int) -> None:
        """Raise ApiError if the tenant has no room for a file of `num_bytes`."""
        free_files, reason = self._free_files(holder)
        if free_files < 1:
            raise bad_field("file", f"there is no room for another file: {reason}; delete some", "storage_full")
        free_bytes, reason = self._free_bytes(holder)
        if num_bytes > free_bytes:
            raise bad_field("file", f"the file has {num_bytes} bytes; {reason}; delete some files", "storage_full")

    def check_output_room(self, holder: KeyInfo) -> None:
        """Raise ApiError if the tenant has no room for a batch's answers."""
        for free, reason in (self._free_files(holder), self._free_bytes(holder)):
            if free < 1:
                message = f"there is no room for the answers of a batch: {reason}; delete some files"
                raise bad_field("input_file_id", message, "storage_full")

    def _free_files(self, holder: KeyInfo) -> tuple[int, str]:
        """Return how many files a tenant may add, and a text about its use."""
        used = Counter(file.tenant for file in tuple(self.files.values()))
        free, bound = self._free(holder.tenant, used, ("max_files", self._config.max_files, holder.max_files))
        return free, f"you keep {used[holder.tenant]} files, and have room for {free} more ({bound})"

    def _free_bytes(self, holder: KeyInfo) -> tuple[int, str]:
        """Return how many bytes a tenant may add, and a text about its use, which includes pending batches' answers."""
        used: Counter[str] = Counter()
        for file in tuple(self.files.values()):
            used[file.tenant] += file.bytes
        for batch in tuple(self.batches.values()):
            has_begun = batch.is_pending and batch.status != "validating"
            for file_id in (batch.output_id, batch.error_id) if has_begun else ():
                if file_id not in self.files:
                    with suppress(FileNotFoundError):
                        used[batch.tenant] += self.path(file_id).stat().st_size
        bounds = ("max_storage_bytes", self._config.max_batch_bytes, holder.max_storage_bytes)
        free, bound = self._free(holder.tenant, used, bounds)
        return free, f"you keep {used[holder.tenant]} bytes, and have room for {free} more ({bound})"

    def _free(self, tenant: str, used: Counter[str], bounds: tuple[str, int, int | None]) -> tuple[int, str]:
        """Return how much a tenant may add, and the bound that applies: the server's, or the one of its key."""
        name, bound, own = bounds
        free = self._shares.free(tenant, used, bound)
        if own is None or own - used[tenant] >= free:
            return free, f"your share of the server's {bound}"
        return max(0, own - used[tenant]), f"{name} of your key is {own}"

    def _drop_batch(self, batch: BatchRecord) -> None:
        self.batches.pop(batch.id, None)
        (self._folder / "batches" / f"{batch.id}.json").unlink(missing_ok=True)

    def _drop_file(self, record: FileRecord) -> None:
        self.files.pop(record.id, None)
        (self._folder / "files" / f"{record.id}.json").unlink(missing_ok=True)
        self.path(record.id).unlink(missing_ok=True)

    def _write(self, kind: str, record: FileRecord | BatchRecord) -> None:
        path = self._folder / kind / f"{record.id}.json"
        fresh = path.with_suffix(".new")
        with self._changes:
            try:
                with fresh.open("wb", buffering=0) as file:
                    write_whole(file, msgspec.json.encode(record))
                fresh.replace(path)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise

    def _clear(self) -> None:
        """Delete what a crash left: unfinished records, bytes without a record, records without bytes."""
        kept = {*self.files}
        for batch in self.batches.values():
            if batch.is_pending:
                kept |= {batch.output_id, batch.error_id}
        for path in (self._folder / "files").iterdir():
            is_kept = path.stem in kept or path.with_suffix(".json").exists()  # also a record of a later version
            if _OURS.fullmatch(path.name) and (path.suffix == ".new" or not is_kept):
                path.unlink(missing_ok=True)
        for path in (self._folder / "batches").iterdir():
            if _OURS.fullmatch(path.name) and path.suffix == ".new":
                path.unlink(missing_ok=True)
        for record in [record for record in self.files.values() if not self.path(record.id).exists()]:
            self._drop_file(record)


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed."""
    return kind + secrets.token_hex(16)


def _read_all(folder: Path, record_type: type[R]) -> Iterable[tuple[str, R]]:
    """Return the readable records of a folder, oldest first."""
    decoder: Any = msgspec.json.Decoder(record_type)
    found: list[R] = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if record.id == path.stem:  # else the id would name another record's files
            found.append(record)
    return [(record.id, record) for record in sorted(found, key=lambda record: record.created_at)]

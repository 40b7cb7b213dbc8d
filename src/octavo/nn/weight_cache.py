"""Cache of packed weights in files. A process that runs a model reads the model's file, or maps it if it is large.

Owns: the file format, when a file is valid, and atomic writes of files.
Does not: pack, or know what the sections mean. artifacts/cache_folder.py owns the folder and its bound.
Invariants: an opened file has the requested identity, an undamaged header, sections inside the file, and the first
and last bytes of every section as they were written. A failing file, folder or disk costs time but raises no error.

Format: magic, length and CRC-32 of the header; the header in JSON; sections at multiples of 64 bytes. Only a section's
edges are checked: a crash leaves the edges unwritten, and reading all bytes would defeat the purpose of a mapping.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from octavo import machine
from octavo.artifacts.cache_folder import SUFFIX, UNFINISHED, cache_folder, make_room, touch
from octavo.config import ModelConfig

Bytes = npt.NDArray[np.uint8]
Sections = Mapping[str, Bytes]

_MAGIC = b"OCTWGT\x002"
_PREAMBLE = struct.Struct("<8sQI")
_MAX_HEADER = 1 << 26
_ALIGNMENT = 64
_PAGE = 4096
_BLOCKS = 128  # pages of a model's files that are read to identify it; with many files, fewer pages of each
_LEAST_BLOCKS = 8
_START_BYTES = 1 << 16  # read from the start of each file, where headers, names and settings are
_EDGE = 512  # bytes checked at each end of a section
# A file of at most this part of the available memory is read instead of mapped: numpy asks for huge pages, with which a
# step of one row takes 0.9 of the time, because the pages of a file are small and each needs an entry of the TLB.
# Processes share the pages of a mapped file, so that larger ones stay mapped.
_READ_SHARE = 4


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key of a cache file. `file_name` is the file's name; a file is valid only if it has this `identity`.

    `sources` are the files that the weights were made from.
    """

    file_name: str
    identity: str
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[Path], *facts: object) -> CacheKey:
        """Make the key from source files and from `facts` about their conversion (of stable repr). Raises OSError."""
        resolved = [path.resolve() for path in paths]
        file_name = hashlib.sha256(repr(([str(path) for path in resolved], facts)).encode()).hexdigest()[:32]
        num_blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(resolved)))
        states = [(*_state(path), _sample(path, num_blocks)) for path in resolved]
        identity = hashlib.sha256(repr((file_name, states)).encode()).hexdigest()
        return cls(file_name, identity, tuple(map(str, resolved)))


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A file's read-only sections, and `about`, the writer's description of the weights."""

    sections: Sections
    about: Any


class UnfitError(Exception):
    """The file is not valid; the text is the reason."""


class WeightCache:
    """A folder of packed models of at most `max_bytes` in total; models below `min_bytes` are not cached.

    The default folder is the user's cache folder.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = 20 << 30, min_bytes: int = 16 << 20) -> None:
        self.folder = cache_folder(None) if folder is None else folder
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes
        self.notes: list[str] = []  # failures, for the user

    @classmethod
    def of(cls, model: ModelConfig) -> WeightCache | None:
        """Return the cache that the settings describe, or None if they disable it."""
        if not model.weight_cache_bytes:
            return None
        return cls(cache_folder(model.weight_cache_dir), model.weight_cache_bytes)

    def path(self, key: CacheKey) -> Path:
        """Return the path of this key's file, which may not exist."""
        return self.folder / (key.file_name + SUFFIX)

    def open(self, key: CacheKey) -> StoredWeights | None:
        """Read or map the file of this key; return None if there is no valid one."""
        path = self.path(key)
        try:
            stored = _open(path, key.identity)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notes.append(f"cached weights cannot be read: {path}: {error.strerror or error}")
            return None
        except UnfitError as error:
            self.reject(key, error)
            return None
        touch(path)
        return stored

    def reject(self, key: CacheKey, error: UnfitError) -> None:
        """Note why the file of this key is not valid."""
        self.notes.append(f"cached weights are packed again: {self.path(key)}: {error}")

    def write(
        self, key: CacheKey, about: Any, sizes: Mapping[str, int], make: Callable[[], Generator[Bytes, None, None]]
    ) -> StoredWeights | None:
        """Write the sections that `make` yields, in the order of `sizes`, and open them; return None if that failed.

        Each array is written when it is yielded, and not kept. The generator is closed; its other errors propagate.
        """
        header, offsets, total = _lay_out(key, about, sizes)
        if not self.min_bytes <= total <= self.max_bytes:
            return None
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(UNFINISHED, key.file_name + ".", self.folder)
        except OSError as error:
            self.notes.append(f"weights are not cached: {self.folder}: {error.strerror or error}")
            return None
        unfinished = Path(name)
        try:
            _allocate(descriptor, total)
            with contextlib.closing(make()) as arrays:
                pieces = zip(sizes, arrays, offsets, strict=True)
                edges = [_write_section(descriptor, name, array, offset) for name, array, offset in pieces]
            _write_header(descriptor, header, edges)
            os.fsync(descriptor)  # otherwise a crash may leave the name without the contents
            os.replace(unfinished, path)
            make_room(self.folder, self.max_bytes, keep=path)
            return _open(path, key.identity)
        except (OSError, UnfitError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self.notes.append(f"weights are not cached: {path}: {reason}")
            return None
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                unfinished.unlink()


def remove_made_from(folder: Path, sources: Path) -> int:
    """Remove the cache files in `folder` made from files below `sources`; return their bytes."""
    num_bytes = 0
    for path in sorted(folder.glob("*" + SUFFIX)) if folder.is_dir() else ():
        try:
            with path.open("rb") as file:
                made_from = _read_header(file)[0].get("sources", ())
            named = [source for source in made_from if isinstance(source, str)] if isinstance(made_from, list) else []
            if any(Path(source).is_relative_to(sources.resolve()) for source in named):
                size = path.stat().st_size
                path.unlink()
                num_bytes += size
        except (OSError, UnfitError):
            continue  # the file was already deleted, or is of another version, which the folder's bound removes
    return num_bytes


def _lay_out(key: CacheKey, about: Any, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[int], int]:
    """Place the sections after a header without checksums; return header, offsets and file size."""
    sections = {name: [0, nbytes, 0] for name, nbytes in sizes.items()}
    header = {"identity": key.identity, "sources": key.sources, "about": about, "size": 0, "sections": sections}
    room = _PREAMBLE.size + len(json.dumps(header)) + 32 * (len(sections) + 1)  # 32 for each number that is still 0
    position = -(-room // _PAGE) * _PAGE
    for entry in sections.values():
        entry[0] = position
        position += -(-entry[1] // _ALIGNMENT) * _ALIGNMENT
    header["size"] = position
    return header, [entry[0] for entry in sections.values()], position


def _allocate(descriptor: int, size: int) -> None:
    """Allocate the whole file now, so that a full disk is an error here rather than a fault in the mapping."""
    os.ftruncate(descriptor, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot allocate ahead
                raise


def _write_section(descriptor: int, name: str, array: Bytes, offset: int) -> int:
    """Write a section; return the checksum of its edges."""
    view = array.data
    while view:
        written = os.pwrite(descriptor, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written
    return _edges(name, array)


def _write_header(descriptor: int, header: dict[str, Any], edges: list[int]) -> None:
    for entry, edge in zip(header["sections"].values(), edges, strict=True):
        entry[2] = edge
    text = json.dumps(header).encode()
    os.pwrite(descriptor, _PREAMBLE.pack(_MAGIC, len(text), zlib.crc32(text)) + text, 0)


def _edges(name: str, array: Bytes) -> int:
    """Return the checksum of a section's name and edges. The name makes a header that swaps two sections invalid."""
    return zlib.crc32(array[-_EDGE:].data, zlib.crc32(array[:_EDGE].data, zlib.crc32(name.encode())))


def _state(path: Path) -> tuple[int, int, int]:
    """Return a file's size, modification time and change time; no program can set the change time."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sample(path: Path, num_blocks: int) -> str:
    """Return a digest of a file's start, its end and evenly spaced pages."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(os.pread(file.fileno(), _START_BYTES, 0))
        for index in range(num_blocks + 1):
            digest.update(os.pread(file.fileno(), _PAGE, max(0, size - _PAGE) * index // num_blocks))
    return digest.hexdigest()


def _open(path: Path, identity: str) -> StoredWeights:
    """Read or map a file and check it. Raises OSError and UnfitError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnfitError("is no file")
        header, start = _read_header(file)
        if header["identity"] != identity:
            raise UnfitError("the model's files have changed")
        size = os.fstat(file.fileno()).st_size
        whole = _read(file, size) if size * _READ_SHARE <= machine.usable_memory()[1] else _map(file)
    if header["size"] != len(whole):  # the array's size: reading past a mapped file's end would kill the process
        raise UnfitError(f"has {len(whole)} bytes, {header['size']} were written")
    slices = {name: _slice(entry, start, len(whole)) for name, entry in header["sections"].items()}
    sections = {name: whole[part] for name, part in slices.items()}
    for name, section in sections.items():
        if _edges(name, section) != header["sections"][name][2]:
            raise UnfitError(f"section {name} is damaged")
    return StoredWeights(sections, header["about"])


def _read(file: BufferedReader, size: int) -> Bytes:
    """Return the file's bytes, which may be fewer than `size` by now."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    file.seek(0)
    whole = room[start : start + file.readinto(room[start : start + size].data)]
    whole.flags.writeable = False
    return whole


def _map(file: BinaryIO) -> Bytes:
    try:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # truncated to nothing after its header was read
        raise UnfitError(str(error)) from None
    if hasattr(mmap, "MADV_WILLNEED"):
        data.madvise(mmap.MADV_WILLNEED)  # read ahead instead of page by page in the first step
    return np.frombuffer(data, dtype=np.uint8)


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header and its end. Raises UnfitError for a header that this module did not write."""
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size or preamble[:8] != _MAGIC:
        raise UnfitError("is no file of this cache")
    _, length, checksum = _PREAMBLE.unpack(preamble)
    text = file.read(length) if length <= _MAX_HEADER else b""
    if len(text) < length or zlib.crc32(text) != checksum:
        raise UnfitError("its header is damaged")
    try:
        header = json.loads(text)
        is_whole = {"identity", "about", "size", "sections"} <= header.keys() and isinstance(header["sections"], dict)
    except (ValueError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UnfitError("its header has another form")
    return header, _PREAMBLE.size + length


def _slice(entry: object, start: int, end: int) -> slice:
    """Return a section's slice, which must be between the header and the file's end. Raises UnfitError."""
    if isinstance(entry, list) and len(entry) == 3 and all(type(number) is int for number in entry):
        offset, nbytes, _ = entry
        if start <= offset and 0 <= nbytes <= end - offset:
            return slice(offset, offset + nbytes)
    raise UnfitError("a section lies outside the file")

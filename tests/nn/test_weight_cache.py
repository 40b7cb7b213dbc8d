"""The weight cache: hits and misses, files that do not fit, folders and disks that fail, several processes."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import machine
from octavo.artifacts.cache_folder import cache_folder, used_bytes
from octavo.config import ModelConfig
from octavo.nn import weight_cache
from octavo.nn.weight_cache import _PREAMBLE, Bytes, CacheKey, StoredWeights, WeightCache

ABOUT = {"notes": ["a", "b"], "shapes": {"x": [1, 2]}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", min_bytes=0)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are mapped, as those of large models are."""
    monkeypatch.setattr(weight_cache, "_READ_SHARE", 1 << 60)


def arrays(seed: int = 0) -> dict[str, Bytes]:
    rng = np.random.default_rng(seed)
    sizes = {"first": 100_000, "empty": 0, "tiny": 3, "odd": 4097}
    return {name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}


def write(cache: WeightCache, key: CacheKey, seed: int = 0) -> StoredWeights | None:
    made = arrays(seed)
    sizes = {name: array.nbytes for name, array in made.items()}
    return cache.write(key, ABOUT, sizes, lambda: (array for array in made.values()))


def check(stored: StoredWeights | None, seed: int = 0) -> None:
    assert stored is not None and stored.about == ABOUT
    for name, array in arrays(seed).items():
        found = stored.sections[name]
        np.testing.assert_array_equal(found, array)
        assert not found.flags.writeable
        assert found.ctypes.data % 64 == 0 or not len(found)


@pytest.mark.parametrize("share", [1, 1 << 60], ids=["read", "mapped"])
def test_what_was_written_is_opened_again(
    cache: WeightCache, source: Path, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_READ_SHARE", share)
    key = CacheKey.of([source], "facts", 1)
    assert cache.open(key) is None
    check(write(cache, key))
    check(cache.open(key))
    assert cache.notes == []
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(key).name]
    assert used_bytes(cache.folder) == cache.path(key).stat().st_size


def test_a_file_is_read_if_it_is_small_beside_the_available_memory(
    cache: WeightCache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = CacheKey.of([source])
    write(cache, key)
    size = cache.path(key).stat().st_size
    opened = []
    for name in ("_read", "_map"):
        real = getattr(weight_cache, name)
        monkeypatch.setattr(weight_cache, name, lambda *a, name=name, real=real: (opened.append(name), real(*a))[1])
    for available in (4 * size, 4 * size - 1):
        monkeypatch.setattr(machine, "usable_memory", lambda available=available: (1 << 40, available))
        check(cache.open(key))
    assert opened == ["_read", "_map"]


def test_other_facts_or_files_have_a_place_of_their_own(source: Path) -> None:
    other = source.with_name("other.gguf")
    other.write_bytes(b"weights")
    keys = [
        CacheKey.of(paths, *facts)
        for paths in ([source], [other], [source, other])
        for facts in ((), ("int8",), ("int4",))
    ]
    assert len({key.file_name for key in keys}) == len({key.identity for key in keys}) == 9


@pytest.mark.parametrize("content, seconds", [(b"weights of more bytes", 0), (b"weights", 5)])
def test_a_stale_file_is_replaced(cache: WeightCache, source: Path, content: bytes, seconds: int) -> None:
    """The source has another size, or another time: its old packed form does not fit, and makes way for the new."""
    old = CacheKey.of([source])
    write(cache, old)
    source.write_bytes(content)
    os.utime(source, (time.time() + seconds,) * 2)
    key = CacheKey.of([source])
    assert key.file_name == old.file_name and key.identity != old.identity
    assert cache.open(key) is None
    assert "changed" in cache.notes[0]
    check(write(cache, key, seed=1), seed=1)
    assert cache.open(old) is None
    assert len(list(cache.folder.iterdir())) == 1


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def _grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def _blank_section(path: Path) -> None:
    """What a crash may leave: the header is there, pages of a section were never written."""
    data = bytearray(path.read_bytes())
    data[4096 : 4096 + 8192] = bytes(8192)
    path.write_bytes(data)


def _relabel(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Another header, of the right checksum: what only a bug or somebody else can have written."""

    def relabel(path: Path) -> None:
        data = bytearray(path.read_bytes())
        magic, length, _ = _PREAMBLE.unpack(data[: _PREAMBLE.size])
        header = json.loads(data[_PREAMBLE.size : _PREAMBLE.size + length])
        text = json.dumps(change(header)).encode().ljust(length)[:length]
        data[: _PREAMBLE.size + length] = _PREAMBLE.pack(magic, length, zlib.crc32(text)) + text
        path.write_bytes(data)

    return relabel


def _moved(offset: int, nbytes: int) -> Callable[[Any], Any]:
    def move(header: Any) -> Any:
        header["sections"]["first"][:2] = offset, nbytes
        return header

    return move


DAMAGES = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut at a page": lambda path: os.truncate(path, 4096),
    "a list for a header": _relabel(lambda header: [1]),
    "a header without sections": _relabel(lambda header: {**header, "sections": None}),
    "a section of words": _relabel(lambda header: {**header, "sections": {"first": "x"}}),
    "a section behind the end": _relabel(_moved(1 << 20, 100)),
    "a section over the end": _relabel(_moved(4096, 1 << 20)),
    "a section before the file": _relabel(_moved(-4096, 100)),
    "a section in the header": _relabel(_moved(0, 100)),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes(b"GGUF" + bytes(100_000)),
    "half a preamble": lambda path: os.truncate(path, 10),
    "half a header": lambda path: os.truncate(path, 60),
    "truncated": _truncate,
    "grown": _grow,
    "magic": _flip(3),
    "huge header": _flip(15),
    "checksum": _flip(17),
    "header": _flip(80),
    "blank section": _blank_section,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(cache: WeightCache, source: Path, damage: str) -> None:
    key = CacheKey.of([source])
    write(cache, key)
    DAMAGES[damage](cache.path(key))
    assert cache.open(key) is None
    assert len(cache.notes) == 1 and str(cache.path(key)) in cache.notes[0]
    check(write(cache, key))
    check(cache.open(key))


@pytest.mark.parametrize("left", [8192, 0])
def test_a_file_cut_between_its_header_and_its_reading_is_refused(
    cache: WeightCache, source: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = CacheKey.of([source])
    write(cache, key)
    real = weight_cache._read

    def cut_first(*args: Any) -> Bytes:
        os.truncate(cache.path(key), left)
        return real(*args)

    monkeypatch.setattr(weight_cache, "_read", cut_first)
    assert cache.open(key) is None
    assert "bytes, " in cache.notes[0] and "were written" in cache.notes[0]


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize(("left", "words"), [(8192, "has 8192 bytes"), (0, "empty file")])
def test_a_file_cut_between_its_header_and_its_mapping_is_refused(
    cache: WeightCache, source: Path, left: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading behind the end of a mapped file is a SIGBUS: the mapping's own length is what counts."""
    key = CacheKey.of([source])
    write(cache, key)
    real = mmap.mmap

    def cut_first(descriptor: int, *args: Any, **options: Any) -> mmap.mmap:
        os.truncate(cache.path(key), left)
        return real(descriptor, *args, **options)

    monkeypatch.setattr(mmap, "mmap", cut_first)
    assert cache.open(key) is None
    assert words in cache.notes[0]


def test_a_file_that_cannot_be_read_is_said(cache: WeightCache, source: Path) -> None:
    key = CacheKey.of([source])
    cache.path(key).mkdir(parents=True)
    assert cache.open(key) is None
    assert "cannot be read" in cache.notes[0]


def test_a_folder_that_cannot_be_made_costs_a_note(tmp_path: Path, source: Path) -> None:
    cache = WeightCache(source / "below a file", min_bytes=0)
    key = CacheKey.of([source])
    assert cache.open(key) is None and write(cache, key) is None
    assert "weights are not cached" in cache.notes[-1]


@pytest.mark.parametrize("function", ["posix_fallocate", "pwrite", "fsync", "replace"])
def test_a_full_disk_costs_a_note_and_leaves_nothing(
    cache: WeightCache, source: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, fail)
    assert write(cache, CacheKey.of([source])) is None
    assert "No space left" in cache.notes[0]
    assert list(cache.folder.iterdir()) == []


def test_where_space_cannot_be_taken_ahead_the_file_is_written_all_the_same(
    cache: WeightCache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    check(write(cache, CacheKey.of([source])))


def test_what_making_raises_passes_and_leaves_nothing(cache: WeightCache, source: Path) -> None:
    def make() -> Generator[Bytes, None, None]:
        yield np.zeros(5, np.uint8)
        raise ValueError("no codes")

    with pytest.raises(ValueError, match="no codes"):
        cache.write(CacheKey.of([source]), {}, {"a": 5, "b": 5}, make)
    assert list(cache.folder.iterdir()) == []


def test_models_too_small_or_too_large_have_no_file(tmp_path: Path, source: Path) -> None:
    for cache in (WeightCache(tmp_path / "c"), WeightCache(tmp_path / "c", max_bytes=50_000, min_bytes=0)):
        assert write(cache, CacheKey.of([source])) is None
        assert not cache.folder.exists()


def test_the_least_recently_used_leave_first(cache: WeightCache, source: Path) -> None:
    keys = [CacheKey.of([source], index) for index in range(4)]
    for age, key in enumerate(keys[:3]):
        write(cache, key)
        os.utime(cache.path(key), (time.time() - 100 + age,) * 2)
    foreign = cache.folder / "notes.txt"
    foreign.write_bytes(bytes(1_000_000))
    check(cache.open(keys[0]))  # used now
    cache.max_bytes = 3 * cache.path(keys[0]).stat().st_size
    mapped = cache.open(keys[2])
    os.utime(cache.path(keys[2]), (time.time() - 50,) * 2)
    check(write(cache, keys[3]))
    assert [cache.path(key).exists() for key in keys] == [True, False, True, True]
    cache.max_bytes = 2 * cache.path(keys[0]).stat().st_size
    check(write(cache, keys[3]))
    assert [cache.path(key).exists() for key in keys] == [True, False, False, True]
    check(mapped)  # removing disturbs nobody
    assert foreign.exists()


def test_what_a_dead_writer_left_goes_after_an_hour(cache: WeightCache, source: Path) -> None:
    cache.folder.mkdir()
    dead, alive = (cache.folder / f"{'a' * 32}.{name}.unfinished" for name in ("ab12cd_9", "ab12cd_8"))
    for path, age in ((dead, 7200), (alive, 60)):
        path.write_bytes(bytes(10))
        os.utime(path, (time.time() - age,) * 2)
    check(write(cache, CacheKey.of([source])))
    assert alive.exists() and not dead.exists()


def test_files_of_others_neither_count_nor_leave(cache: WeightCache, source: Path) -> None:
    cache.folder.mkdir()
    others = [cache.folder / name for name in ("thesis.octavo", "thesis.unfinished", "a.b.unfinished", "thesis")]
    for path in others:
        path.write_bytes(bytes(1_000_000))
        os.utime(path, (time.time() - 7200,) * 2)
    link = cache.folder / f"{'a' * 32}.octavo"
    link.symlink_to(source)
    key = CacheKey.of([source])
    check(write(cache, key))
    assert used_bytes(cache.folder) == cache.path(key).stat().st_size
    cache.max_bytes = used_bytes(cache.folder)
    check(write(cache, CacheKey.of([source], "other")))
    assert not cache.path(key).exists()
    assert all(path.stat().st_size == 1_000_000 for path in others) and link.is_symlink()


def test_writers_at_once_all_get_whole_files(cache: WeightCache, source: Path) -> None:
    key, barrier = CacheKey.of([source]), threading.Barrier(4)
    results: list[StoredWeights | None] = []

    def run() -> None:
        def make() -> Generator[Bytes, None, None]:
            for array in arrays().values():
                barrier.wait(60)
                yield array

        own = WeightCache(cache.folder, min_bytes=0)
        sizes = {name: array.nbytes for name, array in arrays().items()}
        results.append(own.write(key, ABOUT, sizes, make))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for stored in results:
        check(stored)
    assert len(list(cache.folder.iterdir())) == 1


_SHARER = """
import sys
from pathlib import Path
from octavo.nn import weight_cache
from octavo.nn.weight_cache import CacheKey, WeightCache
weight_cache._READ_SHARE = 1 << 60
stored = WeightCache(Path(sys.argv[1]), min_bytes=0).open(CacheKey(sys.argv[2], sys.argv[3]))
print(sum(int(section.sum()) for section in stored.sections.values()), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("mapped")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say which pages are shared")
def test_two_processes_map_the_same_pages(cache: WeightCache, source: Path) -> None:
    key, size = CacheKey.of([source]), 4 << 20
    stored = cache.write(key, ABOUT, {"x": size}, lambda: (np.ones(size, np.uint8) for _ in "x"))
    assert stored is not None and int(stored.sections["x"].sum()) == size
    arguments = [sys.executable, "-c", _SHARER, str(cache.folder), key.file_name, key.identity]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and int(other.stdout.readline()) == size
        entries = Path("/proc/self/smaps").read_text().split(str(cache.path(key)))[1]
        other.communicate()
    fields = dict(line.split(":")[:2] for line in entries.splitlines()[1:15])
    kilobytes = {name: int(value.split()[0]) for name, value in fields.items() if value.endswith("kB")}
    assert kilobytes["Rss"] * 1024 >= size
    assert kilobytes["Private_Clean"] + kilobytes["Private_Dirty"] == 0
    assert kilobytes["Pss"] <= kilobytes["Rss"] * 0.51


def test_the_folder_is_the_one_given_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "octavo" / "weights"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder(None) == tmp_path / "own" == WeightCache().folder
    assert cache_folder("~/x") == Path.home() / "x"
    given = WeightCache.of(ModelConfig(weight_cache_dir=str(tmp_path), weight_cache_bytes=1 << 30))
    assert given is not None and (given.folder, given.max_bytes) == (tmp_path, 1 << 30)
    assert WeightCache.of(ModelConfig(weight_cache_bytes=0)) is None


@pytest.mark.parametrize("at", [0, 70_000, 999_999], ids=["start", "middle", "end"])
def test_another_file_of_equal_size_and_time_is_noticed(cache: WeightCache, source: Path, at: int) -> None:
    """As cp -p and archives of fixed times make them: size and time of modification are the same."""
    source.write_bytes(bytes(1_000_000))
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    old = CacheKey.of([source])
    write(cache, old)
    assert CacheKey.of([source]) == old
    data = bytearray(1_000_000)
    data[at] = 1
    source.write_bytes(data)
    os.utime(source, ns=times)
    key = CacheKey.of([source])
    assert key.file_name == old.file_name and cache.open(key) is None
    check(write(cache, key, seed=1), seed=1)


@pytest.mark.parametrize("num_files", [1, 40])
def test_another_file_is_noticed_by_what_it_holds_alone(
    source: Path, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights differ in every block; where the system gives no time of change, that must do."""
    monkeypatch.setattr(weight_cache, "_state", lambda path: (0, 0, 0))
    paths = [source.with_name(f"{number}.gguf") for number in range(num_files)]
    start = bytes(weight_cache._START_BYTES)  # the headers may be equal
    for path in paths:
        path.write_bytes(start + b"one" * 300_000)
    old = CacheKey.of(paths)
    for path in (paths[0], paths[-1]):
        path.write_bytes(start + b"two" * 300_000)
        assert CacheKey.of(paths).identity != old.identity
        path.write_bytes(start + b"one" * 300_000)
    assert CacheKey.of(paths) == old


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 70_000])
def test_small_files_have_keys_too(source: Path, size: int) -> None:
    source.write_bytes(bytes(size))
    assert CacheKey.of([source]).file_name == CacheKey.of([source]).file_name


def test_a_pipe_in_the_files_place_is_not_waited_for(cache: WeightCache, source: Path) -> None:
    key = CacheKey.of([source])
    cache.folder.mkdir()
    os.mkfifo(cache.path(key))
    assert cache.open(key) is None and "is no file" in cache.notes[0]
    check(write(cache, key))
    check(cache.open(key))

"""What the machine reader makes of affinity, cgroups of both versions, /proc and /sys."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo import machine
from octavo.errors import CapacityError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and /sys")


def _tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def test_this_machine_is_read() -> None:
    here = machine.look()
    assert 1 <= here.num_cores <= here.num_logical_cores <= (os.cpu_count() or 1)
    assert 2**20 < here.available_bytes <= here.memory_bytes


def test_cores_are_those_of_the_affinity_without_files(tmp_path, four_cores) -> None:
    assert machine.usable_cores(tmp_path) == 4


def test_hyperthreads_count_once(tmp_path, four_cores) -> None:
    pairs = ["0,2", "1,3", "0,2", "1,3"]
    files = {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": pair for i, pair in enumerate(pairs)}
    assert machine.usable_cores(_tree(tmp_path, files)) == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)])
def test_quota_of_cgroup_v2(tmp_path, four_cores, quota, cores) -> None:
    files = {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": quota, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    assert machine.usable_cores(_tree(tmp_path, files)) == cores


def test_quota_of_cgroup_v1(tmp_path, four_cores) -> None:
    folder = "sys/fs/cgroup/cpu/a"
    files = {
        "proc/self/cgroup": "4:cpu:/a\n0::/",
        f"{folder}/cpu.cfs_quota_us": "300000",
        f"{folder}/cpu.cfs_period_us": "100000",
    }
    assert machine.usable_cores(_tree(tmp_path, files)) == 3


@linux
def test_memory_is_the_tightest_cgroup(tmp_path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       8000 kB\nMemAvailable:   6000 kB\n",
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/memory.max": "4096000",
        "sys/fs/cgroup/a/memory.current": "1024000",
        "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 24000\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
    }
    assert machine.usable_memory(_tree(tmp_path, files)) == (4096000, 4096000 - 1024000 + 24000)


@linux
def test_memory_without_cgroup(tmp_path) -> None:
    files = {"proc/meminfo": "MemTotal:       8000 kB\nMemAvailable:   6000 kB\n"}
    assert machine.usable_memory(_tree(tmp_path, files)) == (8000 * 1024, 6000 * 1024)


@linux
def test_features_and_caches(tmp_path) -> None:
    files = {
        "proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n\nmodel name: other\n",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "48K",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "32768K",
    }
    seen = machine.look(_tree(tmp_path, files))
    assert (seen.cpu_name, seen.features, seen.cache_bytes) == ("Some CPU", ("avx2", "fma", "avx512f"), 32 * 2**20)


def test_machine_and_settings_load_no_torch() -> None:
    code = (
        "import sys, octavo.machine, octavo.config.sources; sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "src"}).returncode == 0


def test_a_limit_of_addresses_bounds_the_memory(tmp_path) -> None:
    limits = "Limit                     Soft Limit           Hard Limit           Units\n"
    files = {
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB",
        "proc/self/limits": f"{limits}Max address space         1536000000           unlimited            bytes\n",
        "proc/self/statm": "1000 500 100 1 0 300 0",
    }
    used = 1000 * os.sysconf("SC_PAGE_SIZE")
    assert machine.usable_memory(_tree(tmp_path, files)) == (1536000000, 1536000000 - used)
    files["proc/self/limits"] = f"{limits}Max address space         unlimited            unlimited            bytes\n"
    assert machine.usable_memory(_tree(tmp_path, files)) == (9000000 * 1024, 8000000 * 1024)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1.41 GiB"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_lack_of_memory_is_told_with_sizes_and_remedy(error) -> None:
    told = r"^tiny needs about 2\.9 GiB of memory and a KV cache, and \d+\.\d GiB were free to this process; "
    with pytest.raises(CapacityError, match=told), machine.needing_memory("tiny", 2 << 30):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(OSError, match="No such file"), machine.needing_memory("tiny", 0):
        raise FileNotFoundError(2, "No such file")
    with pytest.raises(ModuleNotFoundError, match="numpie"), machine.needing_torch():
        raise ModuleNotFoundError("No module named 'numpie'", name="numpie")

"""What every test stands on: one thread, no network, no colours, no trace in the user's cache.

Set before torch or tokenizers are loaded by any test module: two OpenMP threads on a shared machine stall
for milliseconds, and tokenizers warns after a fork.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["NO_COLOR"] = "1"
# Kernels for CUDA run on CPU tensors; to compile them takes another process. tools.gpu_check gives 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
_CACHE = tempfile.TemporaryDirectory(prefix="octavo-weights-")  # removed when the run ends
os.environ["OCTAVO_CACHE_DIR"] = _CACHE.name
os.environ["OCTAVO_FLIGHT_RECORDINGS"] = os.path.join(_CACHE.name, "recordings")
_RUN = tempfile.TemporaryDirectory(prefix="octavo-run-")
os.environ["OCTAVO_RUN_DIR"] = _RUN.name

# A run in the background, or under nohup, ignores these, and so would every process that tests start and signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Let the collector skip what is loaded by now: else each closed executor costs seconds (free_memory)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same after each file: its tests may have loaded transformers, or have parsed all of the source."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def patched_once() -> Iterator[None]:
    """Triton's interpreter without work that changes no result: three times as fast.

    Its language is patched once, not at each call of a function. Overflows of 32-bit integers are not looked for: each
    sum was computed twice, and the finding dropped, because only Triton's debug mode reports it. NumPy's type of a
    type of Triton's is looked up by name; the interpreter builds a table of all types at each question.
    """
    from triton import language
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    options = interpreter.interpreter_builder.options
    assert not options.debug
    find_type, types = interpreter._get_np_dtype, {}

    def known_type(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = find_type(of)
        return types[of.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        yield
    scope.restore()

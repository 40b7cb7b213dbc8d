"""vLLM: its engine in its own Python, with the libraries that its CPU build needs preloaded if they are found."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.bench.peers.engine_peer import EnginePeer
from octavo.bench.peers.peer import PeerSetup

_TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
)


def make(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return the peer; `python` is that of an environment with vLLM, `weights` a folder of safetensors."""
    environment = Path(python).absolute().parent.parent
    found = [path for path in _TCMALLOC if Path(path).exists()][:1]
    found += [str(path) for path in sorted(environment.glob("lib/libiomp5.so"))]
    preload = [*found, *filter(None, [os.environ.get("LD_PRELOAD")])]
    env = {"LD_PRELOAD": ":".join(preload), "PATH": f"{environment / 'bin'}:{os.environ.get('PATH', '')}"}
    options = {
        "model": str(Path(weights).absolute()),
        "threads": setup.threads,
        "at_once": setup.at_once,
        "max_len": setup.max_len,
        "dtype": setup.dtype,
    }
    return EnginePeer("vllm", python, "vllm_engine.py", options, env, setup.timeout_s)

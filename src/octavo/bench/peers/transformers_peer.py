"""transformers' continuous batching, in a Python that has it."""

from __future__ import annotations

from pathlib import Path

from octavo.bench.peers.engine_peer import EnginePeer
from octavo.bench.peers.peer import PeerSetup


def make(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return the peer; `weights` is a folder of safetensors, or a GGUF file."""
    options = {
        "model": str(Path(weights).absolute()),
        "threads": setup.threads,
        "at_once": setup.at_once,
        "max_len": setup.max_len,
        "dtype": setup.dtype,
    }
    env = {"OMP_NUM_THREADS": str(setup.threads)}
    return EnginePeer("transformers", python, "transformers_engine.py", options, env, setup.timeout_s)

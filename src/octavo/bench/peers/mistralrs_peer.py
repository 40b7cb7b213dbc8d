"""mistral.rs: its wheel, in a Python that has it."""

from __future__ import annotations

from pathlib import Path

from octavo.bench.peers.engine_peer import EnginePeer
from octavo.bench.peers.peer import PeerSetup


def make(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return the peer; `weights` is a GGUF file, or a folder of safetensors."""
    options = {"model": str(Path(weights).absolute()), "threads": setup.threads, "at_once": setup.at_once}
    return EnginePeer("mistral.rs", python, "mistralrs_engine.py", options, timeout_s=setup.timeout_s)

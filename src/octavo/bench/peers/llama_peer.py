"""llama.cpp's server."""

from __future__ import annotations

from octavo.bench.peers.peer import PeerSetup
from octavo.bench.peers.server_peer import ServerPeer

_SPARE_HTTP_THREADS = 4


def make(binary: str, gguf: str, setup: PeerSetup) -> ServerPeer:
    """Return the peer of `binary`, a llama-server, with `gguf` weights. Its context is divided among the slots."""
    threads, slots = str(setup.threads), setup.at_once
    command = [binary, "-m", gguf, "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(setup.max_len * slots)]
    command += ["-b", "2048", "-ub", "512", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads-http", str(slots + _SPARE_HTTP_THREADS), "--no-webui"]
    return ServerPeer("llama.cpp", command, {"top_k": 1, "samplers": ["top_k"]}, timeout_s=setup.timeout_s)

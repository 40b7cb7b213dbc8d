"""This engine as one of the compared peers: in a process of its own, and as a server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from octavo.bench.peers.engine_peer import EnginePeer
from octavo.bench.peers.peer import PeerSetup
from octavo.bench.peers.server_peer import ServerPeer

ENGINE, SERVER = "octavo", "octavo server"


def engine(model: str, settings: Mapping[str, object], setup: PeerSetup) -> EnginePeer:
    """Return this engine without a server, to compare with other engines without one."""
    options = {"model": model, "at_once": setup.at_once, "settings": {"threads": setup.threads, **settings}}
    return EnginePeer(ENGINE, sys.executable, "octavo_engine.py", options, timeout_s=setup.timeout_s)


def server(model: str, words: Sequence[str], setup: PeerSetup) -> ServerPeer:
    """Return this engine's server, to compare with other servers. `words` are further flags of serve."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads", str(setup.threads), "--max-num-seqs", str(setup.at_once), *words]
    return ServerPeer(SERVER, command, timeout_s=setup.timeout_s)

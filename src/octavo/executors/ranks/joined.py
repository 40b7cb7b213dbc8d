"""The ranks of one epoch on torch.distributed: where they meet, and each rank's executor.

Owns: the store through which they find each other, the interface that gloo listens on, and a rank's device and threads.
Does not: send plans. The only module of this package that loads torch.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store, TCPStore

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ConfigError
from octavo.executors.loading import choose_device
from octavo.executors.ranks.frames import Begin
from octavo.executors.ranks.process import OwnRank


def serve_store(host: str, device: str) -> tuple[str, Store, int]:
    """Serve a new store on a free port of this address; return the kind of the configured device, store and port."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return choose_device(device).type, store, store.port


def join_rank(begin: Begin, files: ModelFiles, spec: ModelSpec, store: Store | None) -> OwnRank:
    """Return this rank's executor, joined with those of the other ranks. Raises ConfigError."""
    raise ConfigError("this version runs the ranks of scripted models only; leave out --tensor-parallel-size")

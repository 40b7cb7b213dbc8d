"""The ranks of one epoch on torch.distributed: where they meet, and each rank's executor.

Owns: the store through which they find each other, the interface that gloo listens on, and a rank's device and threads.
Does not: send plans. The only module of this package that loads torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import replace

import torch
from torch._C._distributed_c10d import Store, TCPStore

from octavo import machine
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import Config
from octavo.errors import ConfigError
from octavo.executors.device_choice import choose_device
from octavo.executors.protocol import Executor
from octavo.executors.ranks.frames import Begin
from octavo.executors.ranks.process import OwnRank
from octavo.executors.torch_executor import TorchExecutor
from octavo.nn.parallel import Parallel, ShardSpec, join_ranks

JOIN_LIMIT_S = 600.0  # as long as an engine may take to open; a rank that is lost is noticed earlier (see group)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def serve_store(host: str, device: str) -> tuple[str, Store, int]:
    """Serve a new store on a free port of this address; return the kind of the configured device, store and port."""
    listener = socket.create_server((host, 0))  # a TCPStore by itself listens on every address
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return choose_device(device).type, store, port


def run_alone(config: Config, files: ModelFiles, spec: ModelSpec) -> tuple[Executor, str]:
    """Return the executor of one rank with the arithmetic of several (--tp-invariant), and the device's kind."""
    executor = TorchExecutor(files, spec, config.execution, config.model, Parallel())
    return executor, choose_device(config.execution.device).type


def join_rank(begin: Begin, files: ModelFiles, spec: ModelSpec, store: Store | None) -> OwnRank:
    """Return this rank's executor, once all ranks have joined. Raises ConfigError.

    `store` is the one that this process serves; None = connect to rank 0's.
    """
    sizes, execution = begin.config.parallel, begin.config.execution
    shard = ShardSpec.of(begin.rank, sizes.tensor_parallel_size, sizes.pipeline_parallel_size)
    if execution.device == "cuda":  # before it is checked
        torch.cuda.set_device(begin.rank % begin.num_local % torch.cuda.device_count())
    device = choose_device(execution.device).type
    if device == "cpu":
        threads = max(1, (execution.threads or machine.usable_cores()) // begin.num_local)
        execution = replace(execution, threads=threads)
    if _INTERFACE not in os.environ:
        os.environ[_INTERFACE] = _interface_to(begin.store_host)
    if store is None:
        store = TCPStore(begin.store_host, begin.store_port, is_master=False)
    has_own_device = device != "cpu" and torch.cuda.device_count() >= begin.num_local
    parallel = join_ranks(shard, store, JOIN_LIMIT_S, "nccl" if has_own_device else "gloo", device)
    parallel = replace(parallel, host_ranks=begin.num_local)
    executor = TorchExecutor(files, spec, execution, begin.config.model, parallel)
    # the vote is one stage's, so with several stages a step that fails in one ends the epoch
    has_voted = (lambda: executor.has_voted_failure) if shard.num_stages == 1 else (lambda: False)
    return OwnRank(executor, has_voted, parallel.collective.close)


def _interface_to(host: str) -> str:
    """Return the name of the network interface from which `host` is reached. Raises ConfigError."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses a route and sends nothing
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        if own == "::1" or own.startswith("127."):
            return next(name for name in names if name.startswith("lo"))
        for name in names:
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    raise ConfigError(f"the network interface of {own} is not known; name the one to {host} in {_INTERFACE}")

"""Processes that are the ranks of one model, for tests: gloo on loopback, one thread each.

Owns: their start, their end and the exchange of calls and results. Does not: load models.
A group is started once and makes many calls, because a process needs seconds to import torch.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from octavo.nn.parallel import Parallel, ShardSpec, join_ranks

WAIT_S = 120.0


class RankGroup:
    """Ranks of `tensor_size` * `num_stages`. Close it, or use it as a context."""

    def __init__(self, folder: Path, tensor_size: int, num_stages: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        store = folder / f"store_{tensor_size}_{num_stages}"
        self.shards = [ShardSpec.of(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
        self._ends: list[Connection] = []
        self._processes = []
        for shard in self.shards:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(shard, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call function(parallel, *arguments) in every rank at once; return the results in rank order."""
        for end in self._ends:
            end.send((function, arguments))
        return [self._result(rank, end) for rank, end in enumerate(self._ends)]

    def _result(self, rank: int, end: Connection) -> Any:
        assert end.poll(WAIT_S), f"rank {rank} does not answer"
        is_good, value = end.recv()
        assert is_good, f"rank {rank}: {value}"
        return value

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(shard: ShardSpec, store: str, end: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    parallel = join_ranks(shard, dist.FileStore(store, shard.num_ranks), WAIT_S)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        end.send(_attempt(function, parallel, arguments))
    os._exit(0)  # destroying a group would wait for ranks that ended already


def _attempt(function: Callable[..., Any], parallel: Parallel, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        with torch.inference_mode():
            return True, function(parallel, *arguments)
    except Exception as error:
        return False, repr(error)

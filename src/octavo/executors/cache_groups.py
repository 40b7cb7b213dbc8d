"""The cache groups of a model: the memory, attention and block copies of each.

Owns: which layers share a group, one pool and one attention backend per group, the host tier, and the mapping from a
model's layers to their groups'. Does not: decide about blocks (core does) or keep tables (slots do).
Invariants: the full group, if there is one, is the first; sliding groups follow, the widest first. A group's pool holds
only its own layers and has its own block numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from octavo.artifacts.model_spec import ModelSpec
from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import StepPlan
from octavo.errors import EngineError
from octavo.executors.columns import from_packed
from octavo.executors.host_pool import HostPool
from octavo.ops.attention import AttentionBackend, AttentionBatch, GroupedAttention
from octavo.ops.attention_pool import KVPool, PoolShape
from octavo.sampling.columns import Ints, upload

MakeAttention = Callable[[KVPool, int | None], AttentionBackend]  # of a pool and its layers' window


def group_layers(windows: Sequence[int | None], block: PoolShape) -> tuple[GroupSpec, ...]:
    """Group layers by their window (None = full attention). `block` is the shape of one layer's pool."""
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window or 0, []).append(layer)
    return tuple(
        GroupSpec(
            GroupKind.SLIDING if window else GroupKind.FULL,
            window,
            replace(block, num_layers=len(by_window[window])).block_bytes,
            tuple(by_window[window]),
        )
        for window in sorted(by_window, key=lambda window: (window > 0, -window))
    )


def layer_windows(model: ModelSpec) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention."""
    return tuple(model.window_of(layer) for layer in range(model.num_layers))


def within(windows: Sequence[int | None], max_model_len: int) -> tuple[int | None, ...]:
    """Return the effective windows at this length: a window as long as the longest context is full attention."""
    return tuple(None if window is None or window >= max_model_len else window for window in windows)


class CacheGroups:
    """Pools, host pools and attention of all groups. `attention` is the argument of the model's forward pass."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pools: Sequence[KVPool],
        host_blocks: Sequence[int],
        make_attention: MakeAttention,
    ) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self._hosts = tuple(HostPool(pool, count) for pool, count in zip(pools, host_blocks, strict=False))
        backends = [make_attention(pool, group.window or None) for pool, group in zip(pools, groups, strict=True)]
        self._backends = backends
        self.reads_unwritten = any(backend.reads_unwritten for backend in backends)
        # a single group has all layers: use the backend itself, at no cost per layer
        self.attention = backends[0] if len(backends) == 1 else _by_layer(groups, backends)

    def begin(self, batches: Sequence[AttentionBatch]) -> None:
        """Begin the step in each group's attention."""
        for backend, batch in zip(self._backends, batches, strict=True):
            backend.begin(batch)

    def clear(self, blocks_by_group: Sequence[Ints]) -> None:
        """Zero blocks of each group; needed if attention `reads_unwritten` positions."""
        for pool, blocks in zip(self.pools, blocks_by_group, strict=True):
            if len(blocks):
                pool.clear_blocks(upload(pool.device, blocks)[0])

    def move_blocks(self, plan: StepPlan) -> None:
        """Apply the plan's swap-outs, host loads and copies, in this order. Raises EngineError without a host tier."""
        if plan.swap_outs or plan.host_loads:
            if not self._hosts:
                raise EngineError("this executor has no host tier; it cannot swap blocks or load them back")
            for group, (sources, destinations) in self._pairs(plan.swap_outs):
                self._hosts[group].put(sources, destinations)
            for group, (sources, destinations) in self._pairs(plan.host_loads):
                self._hosts[group].get(sources, destinations)
        for group, (sources, destinations) in self._pairs(plan.copies):
            pool = self.pools[group]
            pool.copy_blocks(*upload(pool.device, sources, destinations))

    def _pairs(self, column: array[int]) -> list[tuple[int, tuple[Ints, Ints]]]:
        """Return the (source, destination) columns of each group in a flat column."""
        if not column:
            return []
        entries = from_packed(column).reshape(-1, 3)
        assert 0 <= entries[:, 0].min() <= entries[:, 0].max() < len(self.pools), "an effect names an unknown group"
        parts = [(group, entries[entries[:, 0] == group]) for group in range(len(self.pools))]
        return [(group, (part[:, 1], part[:, 2])) for group, part in parts if len(part)]


def _by_layer(groups: Sequence[GroupSpec], backends: Sequence[AttentionBackend]) -> GroupedAttention:
    """Map each of the model's layers to its group's backend and its index there."""
    places = {
        layer: (backend, local)
        for group, backend in zip(groups, backends, strict=True)
        for local, layer in enumerate(group.layers)
    }
    return GroupedAttention([places[layer] for layer in range(len(places))])


def allocate(
    groups: Sequence[GroupSpec], num_blocks: Sequence[int], block: PoolShape, device: torch.device
) -> list[KVPool]:
    """Allocate the pool of each group."""
    return [
        KVPool(replace(block, num_layers=len(group.layers), num_blocks=count), device)
        for group, count in zip(groups, num_blocks, strict=True)
    ]

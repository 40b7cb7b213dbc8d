"""Check that a transformers model gives the same logits over paged steps as with its own attention.

Owns: two short sequences, cut into steps that mix their tokens, and the comparison. It finds models whose layers keep a
state, mix the rows of a step, or count positions by themselves. Does not: compare windows longer than the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.models.transformers_probe import UnfitModelError
from octavo.ops.attention import (
    AttentionBackend,
    AttentionBatch,
    GroupedAttention,
    KVPool,
    LayerAttention,
    PoolShape,
    ReferenceAttention,
)

LENGTHS = (12, 6)  # of the compared sequence, and of the one beside it
# One step a line: (sequence, first position, tokens); rows of one token are first.
STEPS = (
    ((1, 0, 4), (0, 0, 6)),
    ((1, 4, 1), (0, 6, 3)),
    ((0, 9, 1), (1, 5, 1)),
    ((0, 10, 1),),
    ((0, 11, 1),),
)
_BLOCK = 4

MakeAttention = Callable[[KVPool, Sequence[LayerAttention]], AttentionBackend]
Forward = Callable[[Tensor, Tensor, AttentionBackend], Tensor]


def compared_ids(vocab_size: int) -> Tensor:
    """Return the sequence [1, T] of which `check_steps` needs the expected logits."""
    return _sequences(vocab_size)[0][None]


def check_steps(
    expected_TV: Tensor,
    steps: tuple[Forward, Callable[[Tensor], Tensor]],
    attention: Sequence[LayerAttention],
    vocab_size: int,
    tolerance: float,
    make_attention: MakeAttention = ReferenceAttention,
) -> None:
    """Compare the expected logits with those of `steps`, a decoder's forward and logits.

    Raises UnfitModelError if the median of the positions' relative differences exceeds `tolerance`.
    """
    forward, logits = steps
    sequences, device = _sequences(vocab_size), expected_TV.device
    grouped, backends = _attention(attention, device, make_attention)
    found = []
    for rows in STEPS:
        batch = _batch(rows, device)
        for backend in backends:
            backend.begin(batch)
        ids_T = torch.cat([sequences[row][start : start + count] for row, start, count in rows]).to(device)
        hidden_TE = forward(ids_T, batch.positions_T, grouped)
        starts = np.cumsum([0, *(count for _, _, count in rows)])
        found += [
            hidden_TE[at : at + count].clone() for (row, _, count), at in zip(rows, starts, strict=False) if not row
        ]
    actual_TV = logits(torch.cat(found)).float()
    if actual_TV.shape != expected_TV.shape:
        raise UnfitModelError(f"its head gives logits of shape {list(actual_TV.shape)}, not {list(expected_TV.shape)}")
    error_T = (actual_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1).clamp_min(1e-20)
    if not float(error_T.median()) <= tolerance:
        raise UnfitModelError(
            f"its logits over mixed rows differ from its own by {float(error_T.median()):.1%}; "
            "a layer keeps a state, or mixes rows"
        )


def _sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(min(3, vocab_size - 1), vocab_size, (size,), generator=generator) for size in LENGTHS]


def _attention(
    attention: Sequence[LayerAttention], device: torch.device, make_attention: MakeAttention
) -> tuple[GroupedAttention, list[AttentionBackend]]:
    """Return attention over one small pool a layer."""
    num_blocks = sum(-(-size // _BLOCK) for size in LENGTHS)
    backends = []
    for layer in attention:
        shape = PoolShape(1, num_blocks, _BLOCK, layer.num_kv_heads, layer.head_dim, layer.value_dim, torch.float32)
        backends.append(make_attention(KVPool(shape, device), (layer,)))
    return GroupedAttention({index: (backend, 0) for index, backend in enumerate(backends)}), backends


def _batch(rows: Sequence[tuple[int, int, int]], device: torch.device) -> AttentionBatch:
    width = -(-max(LENGTHS) // _BLOCK)
    tables = np.arange(len(LENGTHS) * width).reshape(len(LENGTHS), width) % sum(-(-size // _BLOCK) for size in LENGTHS)
    counts = np.array([count for _, _, count in rows])
    contexts = np.array([start + count for _, start, count in rows])
    of_T = np.repeat(np.arange(len(rows)), counts)
    positions_T = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
    table_NM = tables[[row for row, _, _ in rows]]
    slots_T = table_NM[of_T, positions_T // _BLOCK] * _BLOCK + positions_T % _BLOCK
    on_device = [
        torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in (positions_T, slots_T, table_NM)
    ]
    return AttentionBatch(
        num_tokens=int(counts.sum()),
        num_rows=len(rows),
        num_decodes=int((counts == 1).sum()),
        positions_T=on_device[0],
        slot_mapping_T=on_device[1],
        block_table_NM=on_device[2],
        counts=counts,
        contexts=contexts,
    )

"""The features of a step: numbers whose weighted sum is its time.

Owns: the features and their names. Does not: fit them (fitted does).
Tokens are split into ranges with a price each, so that a step may cost little more for the second token than for the
first, and in proportion from the hundredth on.
"""

from __future__ import annotations

from octavo.simulator.cost_model import StepShape

KNOTS = (0, 2, 8, 32, 128, 512)  # tokens where a range begins; the last one has no end
NAMES = (
    "step",
    *(f"token from {low}" for low in KNOTS),
    "decode row",
    "decode position read",
    "chunk",
    "chunk position pair",
    "sample",
    "block copied",
    "block moved to or from the host",
)
HOST_NAMES = ("step", "row", "sample")


def features(shape: StepShape) -> list[float]:
    """Return one number for each of NAMES."""
    pairs = sum(count * before + count * (count + 1) // 2 for count, before in shape.prefills)
    return [
        *_tokens(shape.num_tokens),
        len(shape.decode_kv),
        sum(shape.decode_kv),
        len(shape.prefills),
        pairs,
        shape.num_samples,
        shape.copied_blocks,
        shape.swapped_out_blocks + shape.loaded_blocks,
    ]


def decode_features(num_rows: int, kv_sum: int) -> list[float]:
    """Return the features of a step of decode rows only."""
    return [*_tokens(num_rows), num_rows, kv_sum, 0, 0, num_rows, 0, 0]


def host_features(shape: StepShape) -> list[float]:
    """Return one number for each of HOST_NAMES."""
    return [1.0, len(shape.decode_kv) + len(shape.prefills), shape.num_samples]


def _tokens(count: int) -> list[float]:
    """Return 1, and the number of tokens in each range."""
    ends = (*KNOTS[1:], count)
    return [1.0, *(float(max(0, min(count, end) - low)) for low, end in zip(KNOTS, ends, strict=True))]

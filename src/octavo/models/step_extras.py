"""What some rows of a step have beside token ids and positions.

Owns: StepExtras. Does not: compute. A step without such rows has None instead, and costs nothing more.
Shapes: T tokens of the step, M media rows, E hidden size, D = 3 dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, eq=False)
class StepExtras:
    """See the module. A field is None if no row of the step has it.

    `media_rows_M` (int64, ascending) are the rows whose embeddings are those of `media_ME` (float32), which include the
    family's scale of embeddings, instead of their token ids'. `rope_positions_DT` (int64) are the temporal, height and
    width positions of Qwen2-VL's rope; attention still sees each row at its place in the sequence. `adapters_T` (int32,
    on the CPU) has the decoder's number of each row's adapter, -1 for none.
    """

    media_rows_M: Tensor | None = None
    media_ME: Tensor | None = None
    rope_positions_DT: Tensor | None = None
    adapters_T: Tensor | None = None

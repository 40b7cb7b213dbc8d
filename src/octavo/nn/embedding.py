"""The token embedding.

Owns: the table, by rows of token ids. Shapes: T tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Embedding:
    """Lookup of a table's rows. Ids must be in [0, V): the engine refuses others earlier."""

    __slots__ = ("weight_VE",)

    def __init__(self, weight_VE: Tensor) -> None:
        self.weight_VE = weight_VE

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows as a new tensor [T, E]."""
        return functional.embedding(token_ids_T, self.weight_VE)


class ScaledEmbedding(Embedding):
    """Lookup of rows, scaled by a number; number and products are rounded to the table's dtype, as in transformers."""

    __slots__ = ("scale",)

    def __init__(self, weight_VE: Tensor, scale: float) -> None:
        super().__init__(weight_VE)
        self.scale = float(torch.tensor(scale, dtype=weight_VE.dtype))

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the scaled rows as a new tensor [T, E]."""
        return super().__call__(token_ids_T).mul_(self.scale)

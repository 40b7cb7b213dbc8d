"""Load a decoder from a model's files.

Owns: the choice of the class for a specification, and loading.
Does not: choose dtype or device, or own KV memory.
"""

from __future__ import annotations

import torch

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.models.decoder import Decoder
from octavo.nn.weights import open_weights


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> Decoder:
    """Read the weights into a new decoder. Raises ModelFileError naming the file, the tensor and the reason.

    Every supported family is Llama-like; the class of another kind would be chosen here.
    """
    decoder = Decoder(spec, dtype, device, max_model_len)
    with torch.no_grad():
        decoder.load(open_weights(files, spec))
    return decoder

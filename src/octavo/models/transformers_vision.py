"""A model's vision tower and projector, which make embeddings of images, run by transformers' own modules.

Owns: loading these parts without the language model, normalising pixels, and the call of each kind of model.
Does not: decode or resize images (octavo.media does), or keep embeddings (executors.media_rows does).
Invariants: an embedding depends on its item alone: items are encoded one at a time. No code of a model's repository
runs. Shapes: N tiles, C colours, H height, W width, M tokens of the item, E hidden size.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.artifacts.resolve import ModelFiles
from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import ConfigError, ModelFileError

_LANGUAGE = ("language_model", "text_model")  # the part of the model that Octavo's decoder runs
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


class VisionTower:
    """Encodes items of one model. Raises ModelFileError, and ConfigError if transformers is missing."""

    def __init__(self, files: ModelFiles, spec: VisionSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._model = _load(files, dtype).to(device)
        scale = torch.tensor(spec.rescale_factor, dtype=torch.float32)
        std_C = torch.tensor(spec.std, dtype=torch.float32)
        self._mean_C11 = (torch.tensor(spec.mean, dtype=torch.float32) / scale)[:, None, None]
        self._std_C11 = (std_C / scale)[:, None, None]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.nbytes for part in self._model.parameters())

    @torch.inference_mode()
    def encode(self, pixels_NHWC: NDArray[np.uint8], grid: tuple[int, int, int], size: tuple[int, int]) -> Tensor:
        """Return the embeddings of one item, float32 [M, E] on the device. `grid` and `size` are MediaItem's."""
        pixels_NCHW = torch.from_numpy(pixels_NHWC.astype(np.float32)).permute(0, 3, 1, 2)
        pixels_NCHW = ((pixels_NCHW - self._mean_C11) / self._std_C11).to(self._device, self._dtype)
        encode = getattr(self, f"_encode_{self._spec.kind}")
        states: Tensor = encode(pixels_NCHW, grid, size)
        return states.float().contiguous()

    def _encode_llava(self, pixels_NCHW: Tensor, grid: tuple[int, int, int], size: tuple[int, int]) -> Any:
        return self._features(pixel_values=pixels_NCHW)

    def _encode_llava_next(self, pixels_NCHW: Tensor, grid: tuple[int, int, int], size: tuple[int, int]) -> Any:
        return self._features(pixel_values=pixels_NCHW[None], image_sizes=torch.tensor([size]))

    def _encode_idefics3(self, pixels_NCHW: Tensor, grid: tuple[int, int, int], size: tuple[int, int]) -> Any:
        return self._features(pixel_values=pixels_NCHW[None])

    def _encode_gemma3(self, pixels_NCHW: Tensor, grid: tuple[int, int, int], size: tuple[int, int]) -> Any:
        return self._features(pixel_values=pixels_NCHW)

    def _encode_qwen2_vl(self, pixels_NCHW: Tensor, grid: tuple[int, int, int], size: tuple[int, int]) -> Any:
        """Cut merged patches row by row, each of its patches twice in time, as the processor does."""
        patch, merge = self._spec.patch_size, self._spec.merge_size
        _, colours, height, width = pixels_NCHW.shape
        rows, columns = height // (patch * merge), width // (patch * merge)
        cut = pixels_NCHW.view(colours, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
        twice = cut.unsqueeze(5).expand(*cut.shape[:5], 2, patch, patch)
        patches_PX = twice.reshape(-1, colours * 2 * patch * patch)
        return self._features(pixel_values=patches_PX, image_grid_thw=torch.tensor([grid], device=self._device))

    def _features(self, **inputs: Any) -> Any:
        """Return the embeddings [M, E] of the only item of a call."""
        return self._model.get_image_features(**inputs, return_dict=True).pooler_output[0]


def _load(files: ModelFiles, dtype: torch.dtype) -> Any:
    """Load the model without the weights of its language model."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"the model's vision tower runs through transformers, which cannot be imported ({error}); "
            "pip install 'octavo[transformers]'"
        ) from None
    library.utils.logging.disable_progress_bar()
    verbosity = library.utils.logging.get_verbosity()
    library.utils.logging.set_verbosity_error()  # otherwise it reports each weight of the language model
    try:
        config = library.AutoConfig.from_pretrained(files.root, local_files_only=True, trust_remote_code=False)
        _shrink(config.text_config)
        model, report = library.AutoModel.from_pretrained(
            files.root,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelFileError(files.root / "config.json", f"its vision tower cannot be loaded: {reason}") from error
    finally:
        library.utils.logging.set_verbosity(verbosity)
    for kind in ("missing_keys", "mismatched_keys"):
        names = (name if isinstance(name, str) else name[0] for name in report[kind])
        if wrong := sorted(name for name in names if not name.startswith(_LANGUAGE)):
            reason = "is missing" if kind == "missing_keys" else "has another shape than the configuration needs"
            raise ModelFileError(files.root, reason, wrong[0])
    for name in _LANGUAGE:
        if hasattr(model, name):
            delattr(model, name)
    return model.eval().requires_grad_(False)


def _shrink(config: Any) -> None:
    """Leave a language model of one token and no layers, whose weights are not read."""
    config.vocab_size = 1
    config.pad_token_id = None
    config.num_hidden_layers = 0
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = []

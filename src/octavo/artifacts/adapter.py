"""The files of a low-rank adapter (LoRA): PEFT's folders, and the GGUF adapters of llama.cpp.

Owns: finding the files, their settings, and the id of their contents. Does not: read tensors (nn/lora.py does).
Invariants: equal contents have equal ids, and different ones different ids, up to a collision of 48 bits of BLAKE2b. A
setting that would change the arithmetic, and is not supported, is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.artifacts.json_file import read_json
from octavo.errors import ModelFileError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_READ_BYTES = 1 << 20
_MAX_PATTERN = 256  # characters of a pattern's regular expression
# Settings of PEFT that change the arithmetic, the values with which they do not, and what they stand for.
_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_dora": ((False, None), "DoRA (use_dora)"),
    "bias": (("none", None), "trained biases (bias)"),
    "lora_bias": ((False, None), "biases of lora_B (lora_bias)"),
    "modules_to_save": ((None, [], ()), "whole trained modules (modules_to_save)"),
    "trainable_token_indices": ((None, [], {}), "trained tokens (trainable_token_indices)"),
    "target_parameters": ((None, [], ()), "adapters of experts (target_parameters)"),
    "alora_invocation_tokens": ((None, [], ()), "activated adapters (alora_invocation_tokens)"),
    "layer_replication": ((None, [], ()), "replicated layers (layer_replication)"),
    "use_qalora": ((False, None), "QALoRA (use_qalora)"),
    "arrow_config": ((None,), "routed adapters (arrow_config)"),
    "fan_in_fan_out": ((False, None), "transposed weights (fan_in_fan_out)"),
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter. `config` is PEFT's; a GGUF file has its settings in its metadata."""

    path: Path
    kind: Literal["peft", "gguf"]
    weights: Path
    config: Mapping[str, Any] = field(default_factory=dict)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B A of a module whose A has `rank` rows (PEFT only). Raises ModelFileError."""
        if rank != (expected := self._pattern("rank_pattern", module, self.config.get("r", 8))):
            raise self.error(f"gives {module} rank {expected}; its weights have rank {rank}")
        alpha = self._pattern("alpha_pattern", module, self.config.get("lora_alpha", 8))
        divisor = math.sqrt(rank) if self.config.get("use_rslora") else rank
        return float(alpha) / divisor

    def error(self, reason: str) -> ModelFileError:
        """Return an error that names the settings' file."""
        return ModelFileError(self.path / CONFIG_FILE if self.kind == "peft" else self.path, reason)

    def _pattern(self, name: str, module: str, default: object) -> Any:
        """Return the value of the first pattern that matches the end of the module's name, as PEFT does."""
        patterns = self.config.get(name) or {}
        if not isinstance(patterns, dict):
            raise self.error(f"{name} is no object")
        found: object = default
        for pattern, value in patterns.items():
            try:
                is_match = len(pattern) <= _MAX_PATTERN and re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
            except re.error as error:
                raise self.error(f"{name} has the pattern {pattern!r}, which is none ({error})") from None
            if is_match:
                found = value
                break
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found) or found <= 0:
            raise self.error(f"{name.removesuffix('_pattern')} of {module} is {found!r}; a number above 0 is needed")
        return found


def find_adapter(path: str) -> AdapterFiles:
    """Find an adapter's files: a folder of PEFT, or a .gguf file. Raises ModelFileError."""
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return AdapterFiles(place, "gguf", place)
    if not place.is_dir():
        raise ModelFileError(place, f"is no adapter; give a folder with {CONFIG_FILE}, or a .gguf file")
    config, weights = read_json(place / CONFIG_FILE), place / WEIGHTS_FILE
    if not weights.is_file():
        raise ModelFileError(weights, "is missing; an adapter's weights must be safetensors")
    files = AdapterFiles(place, "peft", weights, config)
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise files.error(f"has peft_type {config['peft_type']!r}; LORA is supported")
    for name, (neutral, what) in _UNSUPPORTED.items():
        if config.get(name) not in neutral:
            raise files.error(f"has {what}, which is not supported")
    return files


def adapter_id(files: AdapterFiles) -> int:
    """Return the id of an adapter's contents, over 0: a digest of all its bytes (1 GB a second). Raises ModelFileError.

    Cached keys and values are found by it, so that those of other contents never match, in any process.
    """
    digest = hashlib.blake2b(digest_size=6)
    paths = [files.weights] if files.kind == "gguf" else [files.path / CONFIG_FILE, files.weights]
    for path in paths:
        try:
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "little") or 1

"""Random low-rank adapters for tests: their files, and the models into which they are merged.

Owns: PEFT's and llama.cpp's forms of one random adapter, and W + B A in float32. Does not: share code with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

MODULES = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "c_fc",
    "c_proj", "dense",
)  # fmt: skip


@dataclass
class RandomAdapter:
    """An adapter of a folder's model: A and B by module, and PEFT's settings."""

    halves: dict[str, tuple[Tensor, Tensor]]
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Path, seed: int, rank: int = 4, modules: tuple[str, ...] = MODULES, **config: Any
    ) -> RandomAdapter:
        """Make an adapter that changes every matrix with one of these names."""
        generator = torch.Generator().manual_seed(seed)
        halves = {}
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    parts = name.split(".")
                    if parts[-1] != "weight" or parts[-2] not in modules or "experts" in parts:
                        continue
                    outputs, inputs = tensors.get_slice(name).get_shape()
                    a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                    halves[name.removesuffix(".weight")] = a, torch.randn(outputs, rank, generator=generator) * 0.15
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), **config}
        return cls(halves, settings)

    @property
    def scale(self) -> float:
        rank: int = self.config["r"]
        divisor: float = rank**0.5 if self.config.get("use_rslora") else rank
        return float(self.config["lora_alpha"]) / divisor

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by PEFT's names."""
        return {
            f"base_model.model.{module}.lora_{half}.weight": tensor
            for module, pair in self.halves.items()
            for half, tensor in zip("AB", pair, strict=True)
        }

    def write(self, folder: Path, **tensors: Tensor) -> Path:
        """Write it as PEFT does."""
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file({**self.tensors(), **tensors}, folder / "adapter_model.safetensors")
        return folder

    def write_gguf(self, path: Path, names: Mapping[str, str], heads: tuple[int, int] | None) -> Path:
        """Write it as llama.cpp's converter does. `heads` of queries and keys: their rows are in rotary pairs."""
        writer = GGUFWriter(path, "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(self.config["lora_alpha"]))
        for module, (a, b) in self.halves.items():
            prefix, last = module.rsplit(".", 1)
            layer = prefix.split(".")[2]
            if heads is not None and last in ("q_proj", "k_proj"):
                count = heads[last == "k_proj"]
                b = b.view(count, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)
            stem = f"blk.{layer}.{names[last]}.weight"
            writer.add_tensor(f"{stem}.lora_a", a.contiguous().numpy())
            writer.add_tensor(f"{stem}.lora_b", b.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def merge(self, model: Path, folder: Path) -> Path:
        """Copy the model with W + scale B A in place of each W."""
        shutil.copytree(model, folder)
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            for module, (a, b) in self.halves.items():
                if (name := f"{module}.weight") in tensors:
                    weight = tensors[name]
                    tensors[name] = (weight.double() + self.scale * b.double() @ a.double()).to(weight.dtype)
            save_file(tensors, file, metadata={"format": "pt"})
        return folder

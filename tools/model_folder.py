"""Write a model as a folder of bfloat16 safetensors and as GGUF files of the same weights, which other engines load.

Owns: SHAPES, the shapes of larger models, whose weights are random (normal, 0.02); the conversion of a GGUF model's own
weights. Does not: run a model. A random model has the default model's tokenizer, with further tokens for its other ids.
Each file is written only if it does not exist. MODEL is a key of SHAPES, or a GGUF model without norms of heads.
Usage: python -m tools.model_folder MODEL FOLDER [--gguf Q4_0 BF16]; the files are FOLDER/KIND.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.models.zoo_gguf import convert_folder
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import DEFAULT_MODEL, resolve_model
from octavo.nn.weights import open_weights
from octavo.text.gguf_tokenizer import GGUFVocabulary, build_gguf_backend

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {  # 1.97 billion weights, of which a token takes 0.4
        "model_type": "qwen3_moe", "vocab_size": 49_152, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 4096,
        "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
MAX_LEN = 4096


def shape_config(name: str) -> Any:
    """Return the transformers configuration of a shape."""
    settings = {"max_position_embeddings": MAX_LEN, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    settings |= SHAPES[name]
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def write_random(name: str, folder: Path, seed: int = 0) -> None:
    """Write a model of a shape with random weights and a tokenizer."""
    config = shape_config(name)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = GGUFVocabulary(padded_vocabulary(config.vocab_size), folder)
    names = {f"{kind}_token": vocabulary.tokens[vocabulary.token_id(kind) or 0] for kind in ("bos", "eos")}
    PreTrainedTokenizerFast(tokenizer_object=build_gguf_backend(vocabulary), **names).save_pretrained(folder)


def write_gguf(name: str, folder: Path, path: Path, kind: str) -> None:
    """Write the weights of a random model's folder as one GGUF file."""
    config = shape_config(name)
    vocabulary = padded_vocabulary(config.vocab_size)
    of_config = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
    metadata = {key: value for key, value in vocabulary.items() if key not in of_config}
    part = path.with_suffix(".part")
    convert_folder(folder, config, part, kind, metadata)
    part.rename(path)


def padded_vocabulary(num_ids: int) -> dict[str, Any]:
    """Return the default model's GGUF metadata of its tokenizer, with made-up tokens up to this number of ids."""
    (path,) = resolve_model(DEFAULT_MODEL).weights
    metadata = {key: value for key, value in GGUFFile.open(path).metadata.items() if key.startswith("tokenizer.ggml.")}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    missing = num_ids - len(tokens)
    metadata["tokenizer.ggml.tokens"] = [*tokens, *(f"unused{index}" for index in range(len(tokens), num_ids))]
    metadata["tokenizer.ggml.token_type"] = np.pad(types, (0, missing), constant_values=1)  # ordinary tokens
    return metadata


@torch.inference_mode()
def write_folder(name: str, folder: Path) -> None:
    """Write a Llama-like GGUF model as a folder of bfloat16 weights."""
    files = resolve_model(name)
    spec = read_model_spec(files)
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=spec.max_model_len, rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta, tie_word_embeddings=spec.tie_word_embeddings, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = open_weights(files, spec)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            weights.read_into(tensor_name, tensor)
    model.to(torch.bfloat16).save_pretrained(folder)
    (weights_file,) = files.weights
    tokenizer: Any = AutoTokenizer
    tokenizer.from_pretrained(files.root, gguf_file=weights_file.name).save_pretrained(folder)


def gguf_path(folder: Path, kind: str) -> Path:
    """Return the path of a folder's GGUF file."""
    return folder / f"{kind}.gguf"


def write_model(name: str, folder: Path, kinds: Sequence[str]) -> None:
    """Write the folder and its GGUF files, unless they exist."""
    if not (folder / "config.json").exists():
        (write_random if name in SHAPES else write_folder)(name, folder)
    for kind in kinds:
        if not gguf_path(folder, kind).exists():
            write_gguf(name, folder, gguf_path(folder, kind), kind)


def main() -> None:
    """Write what does not exist yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(SHAPES)}, or a GGUF model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", nargs="+", default=[], metavar="KIND", help="of a shape: types such as Q4_0, BF16")
    options = parser.parse_args()
    if options.gguf and options.model not in SHAPES:
        parser.error(f"{options.model} is a GGUF model; --gguf is for the shapes {', '.join(SHAPES)}")
    write_model(options.model, options.folder, options.gguf)


if __name__ == "__main__":
    main()

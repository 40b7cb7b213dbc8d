"""Small models of every kind of file that is more than plain floats, for faults to be made in.

Owns: `make_bases`, a name for each. Does not: damage them (loading_child.py does).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file

from tests.artifacts.gguf_writing import LLAMA, write_gguf
from tests.models import zoo_gguf
from tests.models.encoders import make_tiny_encoder, write_sentence_transformer
from tests.models.zoo import ROWS
from tests.models.zoo_checks import random_model
from tests.models.zoo_transformers import TRANSFORMERS
from tests.nn.checkpoint_packing import quantise_folder
from tests.nn.test_checkpoint_formats import FORMATS
from tests.nn.test_importance import ENTRIES, write_dat
from tests.nn.test_importance import write_gguf as write_gguf_imatrix
from tests.text.tiny_tokenizers import SPECIAL
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model, write_tensors, write_tiny_tokenizer

CODED = ("gptq", "gptq order", "awq", "fp8 block", "packed zeros", "int", "mxfp4", "nvfp4", "nf4", "bnb int8")
NATIVE = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "gemma2", "phi3 longrope", "llama yarn rope", "smollm3")
BACKEND = ("gpt2", "deepseek_v3", "gemma3n_text")
KINDS = ("Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "IQ1_M", "MXFP4", "NVFP4", "TQ1_0", "IQ3_S", "Q5_1")
BYTE_LEVEL = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", "th", "the", "\u0120", "\u0120the"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "\u2581the", "\u2581cat", "s"]


def make_bases(folder: Path) -> list[Path]:
    """Write the models into an empty folder. A folder's `imatrix` file belongs to its loading."""
    folder.mkdir()
    plain = make_tiny_model("llama2", folder / "plain", num_hidden_layers=1)
    made = [quantised(plain, folder / name.replace(" ", "-"), name) for name in CODED]
    rows = {row.name: row for row in (*ROWS, *TRANSFORMERS)}
    made += [of_row(rows[name], folder / name.replace(" ", "-")) for name in (*NATIVE, *BACKEND)]
    made += [four_bit_experts(folder / "gpt_oss", folder / "gpt_oss-mxfp4")]
    made += [
        encoder(folder / "bert"),
        classifier(folder / "classifier"),
        *ggufs(folder, rows["olmoe"]),
        *tokenizers(folder),
    ]
    for name, write in (("imatrix-dat", write_dat), ("imatrix-gguf", write_gguf_imatrix)):
        made.append(make_tiny_model("llama2", folder / name))
        write(made[-1] / "imatrix", ENTRIES)
    return made


def quantised(plain: Path, target: Path, name: str) -> Path:
    config, pack, _, _ = FORMATS[name]
    quantise_folder(plain, target, pack, config)
    return target


def of_row(row: Any, target: Path) -> Path:
    random_model(row, 0).save_pretrained(target)
    write_tiny_tokenizer(target)
    return target


def four_bit_experts(source: Path, target: Path) -> Path:
    """GPT-OSS as it is published: the experts' codes in neighbouring halves of bytes, and exponents."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2)
        raw = quants.quantize(np.ascontiguousarray(rows.numpy()), GGMLQuantizationType.MXFP4)
        blocks = torch.from_numpy(raw).view(*rows.shape[:2], -1, 17)
        halves = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
        tensors[f"{name}_blocks"] = halves[..., ::2] | halves[..., 1::2] << 4
        tensors[f"{name}_scales"] = blocks[..., 0].clone()
    write_tensors(target, {name: tensor.contiguous() for name, tensor in tensors.items()})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (target / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(target)
    return target


def encoder(target: Path) -> Path:
    make_tiny_encoder("bert", target)
    write_sentence_transformer(target, {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32})
    return target


def classifier(target: Path) -> Path:
    make_tiny_encoder("modernbert", target, num_labels=2)
    return target


def ggufs(folder: Path, experts: Any) -> list[Path]:
    """A mixture, a file in many types, and a split model, named by its first part."""
    model = random_model(experts, 0)
    model.save_pretrained(folder / "experts")
    tiny: Any = SimpleNamespace(row=experts, model=model, folder=folder / "experts")
    zoo_gguf.write_gguf(tiny, folder / "experts.gguf")
    kinds = iter(KINDS * 9)
    make_tiny_gguf("llama2", folder / "types.gguf", lambda _: next(kinds), hidden_size=256, intermediate_size=256)
    (folder / "split").mkdir()
    make_tiny_gguf("llama2", folder / "split" / "model.gguf", "Q8_0", tensors_per_part=8)
    return [folder / "experts.gguf", folder / "types.gguf", min((folder / "split").iterdir())]


def tokenizers(folder: Path) -> list[Path]:
    """Files with a byte-level vocabulary and with word pieces, whose weights are an embedding."""
    byte_level = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": BYTE_LEVEL,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in BYTE_LEVEL],
        "tokenizer.ggml.merges": ["t h", "th e", "\u0120 the"],
    }  # fmt: skip
    words = {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3 if token.startswith("[") else 1 for token in WORDS],
        "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.cls_token_id": 2, "tokenizer.ggml.seperator_token_id": 3,
    }  # fmt: skip
    made = []
    for name, metadata in (("text-bytes", byte_level), ("text-words", words)):
        sizes = {f"llama.{key}": value for key, value in LLAMA.items()}
        tokens: Any = metadata["tokenizer.ggml.tokens"]
        embedding = {"token_embd.weight": np.zeros((len(tokens), LLAMA["embedding_length"]), np.float32)}
        made.append(write_gguf(folder / f"{name}.gguf", sizes | metadata, embedding))
    return made

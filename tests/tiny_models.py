"""Tiny random models of every family, in Hugging Face's layout, for tests of all layers.

Owns: `make_tiny_model` and the families' tiny configurations; about 0.1 s and 1 MB a model.
Does not: need transformers; tests that compare with it load the same folder.
Invariants: equal arguments give equal files. Norm weights, biases and projections are all random, so that
a tensor loaded into the wrong place changes the logits; the logits spread enough for a clear greedy choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 300
BOS_ID, USER_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = "the cat sat on the mat while another hat waited where seven sheep slept under the old oak tree " * 3

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_LLAMA, "num_key_value_heads": 4},
    "llama3": {**_LLAMA, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "smollm2": {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48,
                "rope_theta": 100000.0, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral_window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16,
                       "num_hidden_layers": 3},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
              "sliding_window": 128, "max_window_layers": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "attention_bias": False,
              "use_sliding_window": False, "sliding_window": None, "rope_theta": 1000000.0},
    "qwen2_window": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
                     "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6,
               "hidden_activation": "gelu_pytorch_tanh", "head_dim": 32, "query_pre_attn_scalar": 24,
               "sliding_window": 16, "sliding_window_pattern": 3, "rope_theta": 1000000.0,
               "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
               "tie_word_embeddings": True, "attention_bias": False, "pad_token_id": None},
}  # fmt: skip


def make_tiny_model(
    family: str, folder: Path, *, seed: int = 0, shards: int = 1, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a tiny model of `family` (a key of FAMILIES) into `folder` and return the folder.

    `overrides` replace entries of config.json. With `shards` > 1 the weights are spread over that many files.
    The folder holds config, generation config, weights, and a byte-level BPE tokenizer of VOCAB_SIZE ids.
    """
    config = tiny_config(family, torch_dtype=dtype, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    write_tiny_tokenizer(folder)
    write_tensors(folder, tiny_tensors(config, seed, getattr(torch, dtype)), shards)
    return folder


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The contents of config.json."""
    return {**_BASE, **FAMILIES[family], **overrides}


def tiny_tensors(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of every parameter, by Hugging Face's names, in checkpoint order."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random_parameter(name, shape, generator) for name, shape in parameter_shapes(config).items()}
    if config["model_type"] == "gemma3_text":
        tensors["model.embed_tokens.weight"] *= config["hidden_size"] ** -0.5  # what the model multiplies it by
        for name in tensors:
            tensors[name] -= 1.0 if name.endswith("norm.weight") else 0.0  # what its norms add to their weights
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter that a checkpoint of this configuration holds."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, count in rows.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = (count, hidden)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                shapes[f"{prefix}.self_attn.{name}.bias"] = (count,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.get("attention_bias"):
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config["model_type"] == "gemma3_text":
            shapes[f"{prefix}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_feedforward_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write tensors as one safetensors file, or as shards with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, VOCAB_SIZE ids, a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "unk_token": SPECIAL_TOKENS[BOS_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return 0.4 * noise
    # Strong layers: the input token's own embedding must not win the logits of a tied model every time.
    gain = 3.0 if "lm_head" in name or "o_proj" in name or "down_proj" in name else 1.0
    return noise * gain * shape[-1] ** -0.5


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

"""Model types that run through transformers, or are refused, a row each, as in tests/models/zoo.py.

A type with a native family has its rows there. Those here are then left out: test_zoo_transformers.py runs every native
row through transformers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from tests.models.zoo import MAX_LEN, ROWS, SIZES, VOCAB_SIZE, ModelType

_MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}  # one layer with a window
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {  # DeepSeek's attention: keys and values from a small latent vector
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
_SPARSE_LATER = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN}


def _row(model_type: str, settings: Mapping[str, Any] | None = None, **facts: Any) -> ModelType:
    return ModelType(model_type, settings or {}, path="transformers", has_ranks=False, **facts)


# fmt: off
_DENSE = (
    _row("apertus"),
    _row("arcee"),
    _row("beam", {**_MIXED, "head_dim": 16}, windows=(16,)),
    _row("biogpt"),
    _row("bitnet"),
    _row("cohere"),
    _row("cohere2", _MIXED, windows=(16,)),
    _row("ctrl", {**_GPT, "dff": 96}),
    _row("cwm", {**_MIXED, "head_dim": 16}, windows=(16,)),
    _row("diffllama"),
    _row("ernie4_5", {"head_dim": 16}),
    _row("exaone4", _MIXED, windows=(16,)),
    _row("flint", {"head_dim": 16}),
    _row("gemma", {"head_dim": 16}, embedding=0.05),
    _row("gemma2", {**_MIXED, "head_dim": 16, "query_pre_attn_scalar": 24}, windows=(16,), embedding=0.05),
    _row("gemma3n_text", {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention",
        "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4}, windows=(16,)),
    _row("gemma4_text", {**_MIXED, "head_dim": 16, "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}, windows=(16,)),
    _row("gemma4_unified_text", {**_MIXED, "head_dim": 16}, windows=(16,)),
    _row("glm", {"head_dim": 16}, embedding=3.0),
    _row("glm4", {"head_dim": 16}),
    _row("gpt2", _GPT, embedding=3.0),
    _row("gpt_bigcode", {**_GPT, "multi_query": True}, embedding=3.0),
    _row("gpt_neox", embedding=3.0),
    _row("granite"),
    _row("granite_swa", {"sliding_window": 16}, windows=(16,)),
    _row("helium", {"head_dim": 16}),
    _row("hrm_text", {"head_dim": 16}),
    _row("hunyuan_v1_dense", {"head_dim": 16}),
    _row("hyperclovax"),
    _row("internlm3", {"head_dim": 16}),
    _row("iquestcoder", {"head_dim": 16}),
    _row("jais2", embedding=3.0),
    _row("minicpm3", {**_LATENT, "head_dim": 8}),
    _row("ministral", {**_MIXED, "head_dim": 16}, windows=(16,)),
    _row("ministral3", {"head_dim": 16}),
    _row("modernbert-decoder", {"sliding_window": 16}, windows=(16,)),
    _row("moshi"),
    _row("nanochat"),
    _row("nemotron"),
    _row("olmo"),
    _row("olmo2"),
    _row("olmo3", _MIXED, windows=(16,)),
    _row("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, embedding=3.0),
    _row("persimmon", embedding=3.0),
    _row("phi"),
    _row("phi3", {"sliding_window": 16}, windows=(16,)),
    _row("seed_oss", {"head_dim": 16}),
    _row("smollm3", {"no_rope_layer_interval": 2}),
    _row("stablelm"),
    _row("starcoder2", {"sliding_window": 16}, windows=(16,), embedding=3.0),
    _row("vaultgemma", {**_MIXED, "head_dim": 16}, windows=(16,), embedding=0.05),
    _row("youtu", {**_LATENT, "head_dim": 8}),
)
_MIXTURES = (
    _row("afmoe", {**_EXPERTS, **_MIXED, "head_dim": 16, "num_dense_layers": 1}, windows=(16,), experts=4),
    _row("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, experts=4),
    _row("axk1", {**_LATENT, **_ROUTED, **_GROUPS, **_SPARSE_LATER}, experts=8),
    _row("cohere2_moe", {**_MIXED, **_EXPERTS, "head_dim": 16}, windows=(16,), experts=4),
    _row("dbrx", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_LEN,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}, "ffn_config": {"hidden_size": 64,
        "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}, experts=4),
    _row("deepseek_v2", {**_LATENT, **_ROUTED, **_GROUPS, "topk_method": "group_limited_greedy", "head_dim": 8},
        experts=8),
    _row("deepseek_v3", {**_LATENT, **_ROUTED, **_GROUPS, "first_k_dense_replace": 1}, experts=8),
    _row("dots1", {**_ROUTED, **_MIXED, "first_k_dense_replace": 1, "head_dim": 16}, windows=(16,), experts=8),
    _row("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1, "moe_layer_end_index": 1}, experts=4),
    _row("exaone_moe", {**_EXPERTS, **_MIXED, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
        "n_group": 1, "topk_group": 1}, windows=(16,), experts=4),
    _row("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}, experts=4),
    _row("glm4_moe", {**_ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 16, "use_qk_norm": True,
        "first_k_dense_replace": 1}, experts=8),
    _row("glm4_moe_lite", {**_LATENT, **_ROUTED, **_SPARSE_LATER, "n_group": 1, "topk_group": 1}, experts=8),
    _row("gpt_oss", {**_LOCAL_EXPERTS, **_MIXED, "head_dim": 16}, windows=(16,), experts=4),
    _row("granitemoe", _LOCAL_EXPERTS, experts=4),
    _row("granitemoe_swa", {**_LOCAL_EXPERTS, "sliding_window": 16}, windows=(16,), experts=4),
    _row("granitemoehybrid", {**_LOCAL_EXPERTS, "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 48}, experts=4),
    _row("granitemoeshared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 48}, experts=4),
    _row("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}, experts=4),
    _row("hy_v3", {**_EXPERTS, "head_dim": 16, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        experts=4),
    _row("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, experts=4),
    _row("kolibri1", {**_LOCAL_EXPERTS, **_MIXED, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "head_dim": 16}, windows=(16,), experts=4),
    _row("laguna", {**_EXPERTS, **_MIXED, "shared_expert_intermediate_size": 32, "head_dim": 16,
        "mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [4, 4]}, windows=(16,), experts=4),
    _row("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "attention_chunk_size": MAX_LEN}, experts=4),
    _row("longcat_flash", {**_LATENT, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2,
        "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "head_dim": 8}, experts=4),
    _row("mellum", {**_LOCAL_EXPERTS, **_MIXED, "moe_intermediate_size": 32, "head_dim": 16,
        "mlp_layer_types": ["sparse"] * 2}, windows=(16,), experts=4),
    _row("mimo_v2_flash", {**_ROUTED, **_MIXED, "head_dim": 24, "v_head_dim": 16, "mlp_layer_types": ["dense",
        "sparse"]}, windows=(16,), experts=8),
    _row("minimax_m2", {**_LOCAL_EXPERTS, "intermediate_size": 48, "head_dim": 16}, experts=4),
    _row("minimax_m3_vl_text", {**_LOCAL_EXPERTS, "head_dim": 16}, experts=4),
    _row("mixtral", _LOCAL_EXPERTS, experts=4),
    _row("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, experts=4),
    _row("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=4),
    _row("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}, experts=4),
    _row("qwen3_moe", {**_LOCAL_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
        experts=4),
    _row("solar_open", {**_ROUTED, "head_dim": 16}, experts=8),
)
# fmt: on
_NATIVE = {row.model_type for row in ROWS}
# Before transformers 5.24 their own attention kept them from running.
_SINCE_5_24 = (
    _row("codegen", {**_GPT, "rotary_dim": 8, "n_ctx": MAX_LEN}),
    _row("gptj", {**_GPT, "rotary_dim": 8}),
)
_IS_5_24 = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
if _IS_5_24:
    _DENSE = (*_DENSE, *_SINCE_5_24)
TRANSFORMERS_DENSE = tuple(row for row in _DENSE if row.model_type not in _NATIVE)
TRANSFORMERS_EXPERTS = tuple(row for row in _MIXTURES if row.model_type not in _NATIVE)
TRANSFORMERS = (*TRANSFORMERS_DENSE, *TRANSFORMERS_EXPERTS)

# Types that a model's own attention keeps from running, each with a part of the reason given.
_OWN_ATTENTION = "does not attend through AttentionInterface"
_MASK = "its attention mask is neither causal nor a sliding window"
# fmt: off
REFUSED = {
    ModelType("big_bird"): _OWN_ATTENTION,
    ModelType("bloom", {"n_head": 4, "n_layer": 2}): _OWN_ATTENTION,
    ModelType("cpmant"): _OWN_ATTENTION,
    ModelType("data2vec-text"): _MASK,
    ModelType("doge"): "DogeAttention changes its attention mask",
    ModelType("ernie"): _MASK,
    ModelType("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}): _OWN_ATTENTION,
    ModelType("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}): _OWN_ATTENTION,
    ModelType("gpt_neox_japanese"): _OWN_ATTENTION,
    ModelType("lfm2", {"layer_types": ["conv", "full_attention"]}): "layers of type conv keep a state",
    ModelType("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "attention_chunk_size": 32}, "chunked attention"): _MASK,
    ModelType("megatron-bert"): _OWN_ATTENTION,
    ModelType("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_LEN}): _OWN_ATTENTION,
    ModelType("openai-gpt", _GPT): _OWN_ATTENTION,
    ModelType("rembert"): _OWN_ATTENTION,
    ModelType("roberta-prelayernorm"): _MASK,
    ModelType("roformer"): _OWN_ATTENTION,
    ModelType("roc_bert", {"pronunciation_vocab_size": 8, "shape_vocab_size": 8}): _MASK,
    ModelType("xlnet", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}, without=tuple(SIZES)): _OWN_ATTENTION,
    ModelType("xlstm", {"num_heads": 4}): _OWN_ATTENTION,
    ModelType("xmod", {"default_language": "en_XX"}): _MASK,
    ModelType("trocr"): _OWN_ATTENTION,
    ModelType("xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}): _OWN_ATTENTION,
    ModelType("xlm-roberta-xl"): _MASK,
}
if not _IS_5_24:
    REFUSED |= dict.fromkeys(_SINCE_5_24, _OWN_ATTENTION)
# fmt: on

# Causal types of transformers that no test opens: models with images or audio, whose settings nest those of their text.
UNTESTED = (
    "bert-generation",
    "cohere_compass_text",
    "emu3",
    "fuyu",
    "gemma3n",
    "gemma4",
    "gemma4_assistant",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "git",
    "got_ocr2",
    "llama4",
    "mllama",
    "moss_transcribe_diarize",
    "phi4_multimodal",
)  # fmt: skip

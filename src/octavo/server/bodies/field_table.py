"""The tables of fields that the bodies do not declare: those that change an answer's meaning, and hints.

Owns: the names, for every API and at every depth. Does not: read a body (checks does).
A field is ignored and reported unless it is in MEANINGFUL: then only a neutral value is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaningful:
    """A field whose loss would change what an answer means. `neutral` values change nothing; neither does null."""

    means: str
    neutral: tuple[object, ...] = ()


_ADAPTER = "another model's weights"
_FORM = "a form that the answer must have; give response_format or structured_outputs"
_MEDIA = "this server takes and gives text only"
_STATE = "a conversation kept by the server; send the messages themselves"
MEANINGFUL: Mapping[str, Meaningful] = {
    "adapter": Meaningful(_ADAPTER),
    "adapters": Meaningful(_ADAPTER, ([],)),
    "lora": Meaningful(_ADAPTER, ([],)),
    "lora_request": Meaningful(_ADAPTER),
    "control_vectors": Meaningful("other weights", ([],)),
    "audio": Meaningful(_MEDIA),
    "image": Meaningful(_MEDIA),
    "images": Meaningful(_MEDIA, ([],)),
    "videos": Meaningful(_MEDIA, ([],)),
    "modalities": Meaningful(_MEDIA, (["text"],)),
    "functions": Meaningful("the old form of tools; give tools", ([],)),
    "function_call": Meaningful("the old form of tool_choice and tool_calls; give those", ("none", "auto")),
    "mcp_servers": Meaningful("tools that the server runs; give function tools", ([],)),
    "format": Meaningful(_FORM, ("", "text", {"type": "text"})),
    "grammar": Meaningful(_FORM, ("",)),
    "json_schema": Meaningful(_FORM),
    "ebnf": Meaningful(_FORM),
    "regex": Meaningful(_FORM),
    "structural_tag": Meaningful(_FORM),
    "messages": Meaningful("a conversation; use /v1/chat/completions"),
    "tools": Meaningful("calls of functions; use /v1/chat/completions", ([],)),
    "chat_template": Meaningful("only the model's own template is rendered; start the server with --chat-template"),
    "template": Meaningful("another chat template", ("",)),
    "suffix": Meaningful("text to write up to", ("",)),
    "prefix": Meaningful("a message to go on with; give continue_final_message", (False,)),
    "partial": Meaningful("a message to go on with; give continue_final_message", (False,)),
    "prompt_embeds": Meaningful("a prompt as vectors; give text or token ids"),
    "logits_processors": Meaningful("code that chooses tokens", ([],)),
    "conversation": Meaningful(_STATE),
    "context_management": Meaningful("what is left out of a conversation; leave it out yourself", ([],)),
    "data_sources": Meaningful("documents to search in; give their text in a message", ([],)),
    "moderation": Meaningful("a check of the answer that is not made here"),
}

# Hints: a value listed here changes nothing and is not reported; any other is ignored and reported.
HINTS: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "prediction": (),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "web_search_options": (),
    "prompt_cache_options": (),
    "include_obfuscation": (False,),
    "disable_fallback": (True, False),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    "speed": ("standard",),
    "inference_geo": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "task_budget": (),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}

_SENT = """
    add_special_tokens allowed_callers cache_prompt client_metadata computer_use custom defer_loading detokenize
    dynatemp_exponent dynatemp_range enable_thinking file_search frequency_penalty guided_decoding_backend id_slot
    image_generation keep_alive kv_transfer_params local_shell logit_bias mcp min_keep
    mirostat_eta mirostat_tau mm_processor_kwargs n_keep n_predict n_probs namespace num_batch num_ctx num_gpu num_gqa
    num_keep num_thread options parallel_tool_calls plugins presence_penalty provider provider_specific_fields
    repeat_last_n repeat_penalty request_id return_progress return_token_ids return_tokens_as_token_ids
    rope_frequency_base rope_frequency_scale route safe_prompt samplers seed shell
    temperature think thinking thinking_blocks thread timings_per_token tool_choice tool_search top_a top_k top_p
    transforms truncate_prompt_tokens type typical use_mlock use_mmap vllm_xargs vocab_only web_search
    web_search_preview xtc_probability xtc_threshold
"""
# Names that known clients send: only these become labels of octavo_ignored_fields_total, any other counts as "other".
KNOWN_NAMES = frozenset(HINTS) | frozenset(_SENT.split())

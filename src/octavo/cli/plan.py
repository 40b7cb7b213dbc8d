"""`octavo plan MODEL`: the memory that a model needs, and the tokens and requests that fit. Loads no weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from octavo.cli.flags import add_settings, config_from
from octavo.config.setting import Number
from octavo.errors import ConfigError
from octavo.executors.protocol import TYPICAL_IMAGE, MemoryPlan
from octavo.planning import plan_memory
from octavo.simulator.costs.hardware import device_facts

REFUSED = {"t4": "whose compute capability is 7.5, and 8.0 is needed", "mi300x": "which is no CUDA device"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to plan for [smollm2]")
    parser.add_argument(
        "--tokens", type=Number(int, 1), metavar="N", help="also say how many requests of so many tokens fit"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sections = ("model", "chat", "cache", "scheduling", "speculation", "execution")
    add_settings(parser, sections, without=("device",))
    parser.add_argument(
        "--device", metavar="NAME", help="auto, cpu, cuda, or one to plan for, such as h100 or l4 [auto]"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if the model or a useful pool does not fit."""
    config, total = config_from(args, model=args.model), 0
    if args.device is not None:
        if args.device not in ("auto", "cpu", "cuda", "this"):
            sheet = device_facts(args.device)
            if sheet.name in REFUSED:
                raise ConfigError(f"device is {args.device!r}, {REFUSED[sheet.name]}; octavo simulate knows it alone")
            total = int(sheet.memory_bytes)
        config = replace(config, execution=replace(config.execution, device=args.device))
    plan = plan_memory(config, total)
    if args.json:
        print(json.dumps({"model": config.model.model, **facts(plan, args.tokens)}))
    else:
        for line in lines(config.model.model, plan, args.tokens):
            print(line)
    return 0 if plan.shortfall is None else 1


def facts(plan: MemoryPlan, tokens: int | None) -> dict[str, Any]:
    """Return the plan as plain values."""
    made: dict[str, Any] = {
        "decoder": plan.decoder,
        "decoder_reason": plan.decoder_reason,
        "device": plan.device,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "threads": plan.num_threads,
        "max_model_len": plan.max_model_len,
        "free_bytes": plan.free_bytes,
        "weight_bytes": plan.weight_bytes,
        "step_bytes": plan.step_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_pool_bytes": plan.pool_bytes,
        "kv_pool_tokens": _tokens(plan),
        "num_blocks": list(plan.num_blocks),
        "block_size": plan.block_size,
        "full_length_bytes": plan.sequence_bytes,
        "full_length_requests": round(plan.num_full_length, 2),
        "max_sequences": plan.num_slots,
        "vision": None if plan.vision is None else {**asdict(plan.vision), "typical_image": list(TYPICAL_IMAGE)},
        "vision_note": plan.vision_note,
        "draft": None if plan.draft is None else facts(plan.draft, None),
        "fits": plan.shortfall is None,
        "shortfall": plan.shortfall,
    }
    return made if tokens is None else {**made, "requests_of_tokens": {str(tokens): _fitting(plan, tokens)}}


def lines(model: str, plan: MemoryPlan, tokens: int | None) -> Iterator[str]:
    """Yield the plan as lines of text."""
    types = plan.dtype if plan.quantization == "none" else f"{_code(plan.quantization)} weights, {plan.dtype}"
    threads = f", {plan.num_threads} threads" if plan.device == "cpu" else ""
    yield f"model     {model}, {types}, {plan.device}{threads}"
    yield f"decoder   {plan.decoder}" + (f": {plan.decoder_reason}" if plan.decoder_reason else "")
    yield f"memory    {_size(plan.free_bytes)} free now"
    step = f", and {_size(plan.step_bytes)} for a step" if plan.step_bytes else ""
    yield f"weights   {_size(plan.weight_bytes)}{step}"
    yield from _beside(plan)
    if plan.decoder == "encoder":
        yield f"texts     of at most {plan.max_model_len:,} tokens, {plan.num_slots} at once; nothing is cached"
        if plan.shortfall is not None:
            yield f"          does not fit: {plan.shortfall}"
        return
    yield (
        f"KV        {plan.kv_bytes_per_token:,} bytes a token; {_size(plan.sequence_bytes)} for a request of full "
        f"length ({plan.max_model_len:,} tokens)"
    )
    if plan.shortfall is not None:
        yield f"KV pool   does not fit: {plan.shortfall}"
        return
    full = f"{plan.num_full_length:.1f} requests of full length, {plan.num_slots} running at most"
    yield f"KV pool   {_size(plan.pool_bytes)}: {_tokens(plan):,} tokens, {full}"
    if tokens is not None:
        yield f"          {_fitting(plan, tokens):,} requests of {tokens:,} tokens at once"
    left = plan.free_bytes - plan.total_bytes
    yield f"left      {_size(max(0, left))} (a larger pool: --kv-cache-memory-bytes, --kv-cache-tokens)"


def _beside(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is loaded beside the model: its vision tower, with the tokens of images, and a draft model."""
    if plan.vision_note:
        yield f"vision    {plan.vision_note}"
    if (vision := plan.vision) is not None:
        yield f"vision    {_size(vision.weight_bytes)}, and {_size(vision.cache_bytes)} for cached images"
        height, width = TYPICAL_IMAGE
        typical = "" if vision.typical_tokens is None else f"; {vision.typical_tokens:,} at {width} x {height} pixels"
        yield f"image     at most {vision.max_tokens:,} tokens of a prompt{typical}"
    if (draft := plan.draft) is not None:
        quantization = draft.dtype if draft.quantization == "none" else _code(draft.quantization)
        yield f"draft     {_size(draft.weight_bytes)} of weights ({quantization}), {_size(draft.pool_bytes)} of KV"


def _code(quantization: str) -> str:
    return "quantised" if quantization == "auto" else quantization


def _tokens(plan: MemoryPlan) -> int:
    return plan.num_blocks[0] * plan.block_size


def _fitting(plan: MemoryPlan, tokens: int) -> int:
    """Return the number of requests of `tokens` tokens that fit at once; 0 if `tokens` is above max_model_len."""
    if tokens > plan.max_model_len:
        return 0
    chunk = plan.max_model_len
    needs = [group.peak_blocks(tokens, chunk, plan.block_size) for group in plan.groups]
    return min(plan.num_slots, *(count // need for count, need in zip(plan.num_blocks, needs, strict=True)))


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.1f} MiB"

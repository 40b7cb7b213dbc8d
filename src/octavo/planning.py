"""The memory that a configuration needs, computed from the headers of files: see `octavo plan`.

Owns: the plans of a model, of its draft model, and of what images cost. Does not: load weights or open anything, or
choose sizes (assembly does) and compute them (executors.memory does). Importing this module does not load torch.
"""

from __future__ import annotations

from dataclasses import replace

from octavo import machine
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.assembly import check_ranks, draft_sizes, executor_spec, find_draft_model, find_files, load_text
from octavo.config import Config
from octavo.errors import ConfigError
from octavo.executors import limit_spinning
from octavo.executors.protocol import TYPICAL_IMAGE, MemoryPlan
from octavo.media.placeholders import layout_text, num_tokens_of


def plan_memory(config: Config, absent_bytes: int = 0) -> MemoryPlan:
    """Return the memory that a configuration needs, and the resulting KV pool, without loading weights.

    With `absent_bytes`, plan for a CUDA device with so much memory, which this machine need not have; the configured
    device is then its name. Loads torch. Raises ConfigError, ModelFileError, UnknownModelError.
    """
    files = find_files(config)
    if files.kind == "scripted":
        raise ConfigError("a scripted model has no weights and no KV pool to plan for; name a model")
    limit_spinning()
    with machine.needing_torch():
        from octavo.executors import device_choice, loading, memory

    check_ranks(config, files)
    if absent_bytes:
        device_choice.ABSENT[config.execution.device] = absent_bytes
    device = device_choice.choose_device(config.execution.device).type
    draft = None
    if (found := find_draft_model(config, files)) is not None:
        settings, drafts = found
        spec = read_model_spec(drafts)
        quantization = loading.draft_quantization(drafts, spec, settings.execution, settings.model)
        model = replace(settings.model, quantization=quantization)
        draft = memory.plan_memory(drafts, settings.execution, model, draft_sizes(settings, spec, device))
    made = memory.plan_memory(
        files, config.execution, config.model, executor_spec(config, device), config.parallel, draft
    )
    if made.vision is None:
        return made
    typical, most = _image_tokens(config, files)
    return replace(made, vision=replace(made.vision, typical_tokens=typical, max_tokens=most))


def examine_device() -> tuple[str, str]:
    """Return the kind of the device that `--device auto` takes, and why, as far as there is a choice. Loads torch."""
    limit_spinning()
    with machine.needing_torch():
        from octavo.executors.device_choice import chosen_device

    chosen = chosen_device("auto")
    return chosen.device.type, chosen.note


def _image_tokens(config: Config, files: ModelFiles) -> tuple[int | None, int]:
    """Return the prompt tokens of an image of the typical size, and of the largest; None without Pillow."""
    text = load_text(config, files)
    vision, pieces = text.spec.vision, text.tokenizer
    assert vision is not None
    token = pieces.id_to_piece(vision.image_token_id)

    def cost(counts: tuple[int, ...], grid: tuple[int, int, int]) -> int:
        return len(pieces.encode(layout_text(vision, counts, grid, token), add_special_tokens=False))

    most = cost((vision.max_item_tokens,) * vision.max_items, vision.max_grid)
    try:
        from PIL import Image

        from octavo.media.processors import process_image
    except ImportError:
        return None, most
    height, width = TYPICAL_IMAGE
    items = process_image(Image.new("RGB", (width, height)), vision)
    return cost(num_tokens_of(items, vision), items[0].grid), most

"""The media of an executor's requests: their items, the embeddings that exist, and the rows of a step that get them.

Owns: items by request until the request ends, embeddings by content key until a plan drops them, and the statistics of
both. Does not: choose what to encode or drop (core.encoder does), or compute embeddings (a tower does).
Shapes: T tokens of the step, M media rows, E hidden size, D = 3 dimensions of rope positions, P positions of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.artifacts.vision_spec import VisionSpec
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Span
from octavo.errors import ConfigError, EngineError
from octavo.executors.loading import DecoderChoice
from octavo.executors.step_inputs import StepInputs
from octavo.media.item import MediaItem
from octavo.models.step_extras import StepExtras
from octavo.models.transformers_vision import VisionTower
from octavo.sampling.columns import Ints, upload

_KEPT_ITEMS, _KEPT_BYTES = 8, 512 << 20  # embeddings that are kept: of so many largest items, within so many bytes


@dataclass(frozen=True, slots=True, eq=False)
class _RequestMedia:
    """A request's items and their spans. `rope_DP` has the positions up to the last span's end, if rope has three."""

    spans: tuple[Span, ...]
    items: tuple[MediaItem, ...]
    end: int
    rope_DP: Ints | None


def media_obstacle(spec: ModelSpec, choice: DecoderChoice) -> str:
    """Return why this engine gives a model no images that could get them; "" if it does."""
    if spec.vision is None:
        return ""
    if choice.decoder_name not in ("native", "torch"):
        return f"the model gets no images: its decoder is {choice.decoder_name!r}, and images need native or torch"
    least = min((window for window in spec.layer_windows if window is not None), default=spec.max_model_len)
    if spec.vision.is_both_ways and least < spec.vision.max_item_tokens:
        return f"the model gets no images: its windows of {least} tokens are smaller than an image"
    return ""


def tower_dtype(choice: DecoderChoice) -> torch.dtype:
    """Return the type of a tower's weights."""
    return torch.float32 if choice.device.type == "cpu" else choice.dtype


def encoder_sizes(vision: VisionSpec, hidden_size: int, max_batch_tokens: int, max_model_len: int) -> tuple[int, int]:
    """Return the tokens that a step may encode, and those whose embeddings are kept, of 4 bytes a value."""
    largest = min(vision.max_item_tokens, max_model_len)
    budget = max(max_batch_tokens, largest)
    return budget, max(budget, min(_KEPT_ITEMS * largest, _KEPT_BYTES // (4 * hidden_size)))


class MediaRows:
    """See the module. Plans pass through `apply` and then, if they have rows, through `extras`."""

    def __init__(self, tower: VisionTower | None, spec: ModelSpec, device: torch.device, note: str = "") -> None:
        """Without a `tower`, no request has media, and `note` says why if the model gets images."""
        self._num_encoded = self._num_queries = self._num_hits = 0
        self._encode_s = 0.0
        self.notes = (note,) if note else ()
        self._tower = tower
        self._vision = spec.vision
        self._hidden_size = spec.hidden_size
        self._device = device
        self._requests: dict[str, _RequestMedia] = {}
        self._slots: dict[int, _RequestMedia] = {}  # slots whose sequences have media
        self._outputs: dict[bytes, Tensor] = {}

    @classmethod
    def open(cls, files: ModelFiles, spec: ModelSpec, choice: DecoderChoice) -> MediaRows:
        """Load the tower of a model that gets images, if this engine can run it. Raises ModelFileError."""
        if spec.vision is None or (note := media_obstacle(spec, choice)):
            return cls(None, spec, choice.device, note if spec.vision is not None else "")
        try:
            tower = VisionTower(files, spec.vision, tower_dtype(choice), choice.device)
        except ConfigError as error:
            return cls(None, spec, choice.device, f"the model gets no images: {error}")
        return cls(tower, spec, choice.device)

    def capacity(self, max_batch_tokens: int, max_model_len: int) -> dict[str, Any]:
        """Return the fields of Capacity that are about media."""
        if self._tower is None or self._vision is None:
            return {}
        budget, cache = encoder_sizes(self._vision, self._hidden_size, max_batch_tokens, max_model_len)
        return {
            "media": ("image",),
            "encoder_budget": budget,
            "encoder_cache": cache,
            "whole_span_tokens": min(self._vision.max_item_tokens, max_model_len) if self._vision.is_both_ways else 0,
        }

    def cache_bytes(self, max_batch_tokens: int, max_model_len: int) -> int:
        """Return the bytes of a full cache of embeddings, which the KV pool leaves free."""
        return 4 * self._hidden_size * int(self.capacity(max_batch_tokens, max_model_len).get("encoder_cache", 0))

    @property
    def see_ahead(self) -> bool:
        """True if a step may have tokens that see positions after their own."""
        return bool(self._slots) and self._vision is not None and self._vision.is_both_ways

    def has_rows(self, plan: StepPlan) -> bool:
        """Return True if the plan has rows of sequences with media."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(plan.slots)

    def report(self) -> dict[str, float]:
        """Return totals and the state of the cache, for the engine's statistics.

        A query is an item whose embeddings a step began to use, and a hit if that step did not encode it.
        """
        return {
            "num_encoded": self._num_encoded,
            "encode_s": self._encode_s,
            "num_queries": self._num_queries,
            "num_hits": self._num_hits,
            "num_cached": len(self._outputs),
            "cached_tokens": sum(map(len, self._outputs.values())),
            "cache_bytes": sum(states_ME.nbytes for states_ME in self._outputs.values()),
        }

    def add(self, request: Request, items: Iterable[MediaItem]) -> None:
        """Keep the items of a request's spans; each item is given once."""
        of_key = {item.key: item for item in items}
        spans, in_order = request.spans, tuple(of_key[span.key] for span in request.spans)
        end = max((span.start + span.length for span in spans), default=0)
        rope_DP = self._rope_positions(spans, in_order)
        self._requests[request.request_id] = _RequestMedia(spans, in_order, end, rope_DP)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget the items of ended requests. Idempotent."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def apply(self, plan: StepPlan) -> None:
        """Apply the changes of slots, drop embeddings, and encode. Raises what the tower raises."""
        self._change_slots(plan)
        if self._tower is None and (plan.encode_jobs or plan.encoder_frees):
            raise EngineError("this executor encodes no media; it cannot run encode jobs or free their outputs")
        for key in plan.encoder_frees:
            self._outputs.pop(key, None)
        for job in plan.encode_jobs:
            if job.slot not in self._slots or self._tower is None:
                raise EngineError("a step encodes media of a request that gave none to this executor")
            item = self._slots[job.slot].items[job.span]
            pixels = np.frombuffer(item.data, dtype=np.uint8).reshape(*item.shape, 3)
            started_at = time.perf_counter()
            states_ME = self._tower.encode(pixels, item.grid, item.size)
            self._encode_s += time.perf_counter() - started_at
            if len(states_ME) != job.num_tokens:
                raise EngineError(f"an item of {job.num_tokens} tokens has {len(states_ME)} embeddings")
            self._outputs[job.key] = states_ME
            self._num_encoded += 1

    def _change_slots(self, plan: StepPlan) -> None:
        if self._slots:
            for slot in (*plan.freed_slots, *(new.slot for new in plan.new_sequences)):
                self._slots.pop(slot, None)
        if self._requests:
            for new in plan.new_sequences:
                if (media := self._requests.get(new.request_id)) is not None:
                    self._slots[new.slot] = media

    def extras(self, plan: StepPlan, inputs: StepInputs) -> StepExtras | None:
        """Return what the rows of a step with media have beside ids and positions; None if it has no such row.

        If items are seen both ways, set the `seen_T` of the step's attention.
        """
        if not self._slots:
            return None
        with_media = [row for row, slot in enumerate(plan.slots) if slot in self._slots and plan.counts[row]]
        if not with_media:
            return None
        with_media.sort(key=lambda row: int(inputs.first_token_N[row]))
        assert self._vision is not None, "the model of an executor with media gets images"
        extras = StepExtras()
        if seen := self._seen(plan, inputs, with_media):
            rows = [np.arange(first, first + len(part)) for first, _, part in seen]
            extras.media_rows_M = upload(self._device, np.concatenate(rows))[0]
            extras.media_ME = torch.cat([part for _, _, part in seen])
            if self._vision.is_both_ways:
                seen_T = _places(inputs) + 1
                for rows_S, (_, end, _) in zip(rows, seen, strict=True):
                    seen_T[rows_S] = end
                for batch in inputs.attention:
                    batch.seen_T = seen_T
        if self._vision.has_rope_positions:
            extras.rope_positions_DT = self._positions(plan, inputs, with_media)
        return extras

    def _seen(self, plan: StepPlan, inputs: StepInputs, with_media: list[int]) -> list[tuple[int, int, Tensor]]:
        """Return for each part of an item in these rows: its first token, the item's end, and its embeddings."""
        found, encoded = [], {job.key for job in plan.encode_jobs}
        for row in with_media:
            media, start, end = self._slots[plan.slots[row]], plan.starts[row], plan.starts[row] + plan.counts[row]
            first = int(inputs.first_token_N[row]) - start
            for span in media.spans if start < media.end else ():
                low, high = max(start, span.start), min(end, span.start + span.length)
                if low < high:
                    part_ME = self._outputs[span.key][low - span.start : high - span.start]
                    found.append((first + low, span.start + span.length, part_ME))
                    if low == span.start:
                        self._num_queries += 1
                        self._num_hits += span.key not in encoded
                        encoded.discard(span.key)
        return found

    def _positions(self, plan: StepPlan, inputs: StepInputs, with_media: list[int]) -> Tensor:
        """Return the rope positions of all tokens of a step, [D, T]; those of text are its places in the sequence."""
        positions_DT = np.tile(_places(inputs), (3, 1))
        for row in with_media:
            rope_DP = self._slots[plan.slots[row]].rope_DP
            assert rope_DP is not None, "made for every request of such a model"
            first, start, count = int(inputs.first_token_N[row]), plan.starts[row], plan.counts[row]
            num_known = min(max(0, rope_DP.shape[1] - start), count)
            own_DT = positions_DT[:, first : first + count]
            own_DT[:, num_known:] += int(rope_DP.max(initial=-1)) + 1 - rope_DP.shape[1]
            own_DT[:, :num_known] = rope_DP[:, start : start + num_known]
        return upload(self._device, positions_DT)[0]

    def _rope_positions(self, spans: Sequence[Span], items: Sequence[MediaItem]) -> Ints | None:
        """Return the temporal, height and width positions of a prompt up to its last item's end, as in Qwen2-VL.

        An item's positions begin at the next position of the text, and the text after it goes on from its largest one.
        """
        if self._vision is None or not self._vision.has_rope_positions:
            return None
        parts, at, position = [], 0, 0
        for span, item in zip(spans, items, strict=True):
            text = np.arange(position, position + span.start - at)
            parts.append(np.tile(text, (3, 1)))
            position += span.start - at
            sizes = self._vision.merged_grid(item.grid)
            parts.append(np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij")).reshape(3, -1) + position)
            position += max(sizes)
            at = span.start + span.length
        return np.concatenate(parts, axis=1)


def _places(inputs: StepInputs) -> Ints:
    """Return the place of each token of a step in its sequence."""
    batch = inputs.attention[0]
    row_first_N = np.cumsum(batch.counts) - batch.counts
    places_T: Ints = np.repeat(batch.contexts - batch.counts - row_first_N, batch.counts) + np.arange(batch.num_tokens)
    return places_T

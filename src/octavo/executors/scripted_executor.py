"""The executor of a scripted model: it outputs a script's answers and computes no model. No torch.

Owns: the id at each position of each slot's sequence, embeddings made from a hash, delays and failures.
Does not: hold keys and values (it ignores blocks, copies and swaps), or apply biases and penalties.
Invariant: the id at a position is a function of prompt, choice and position, so resumed requests, forks and drafts
get the same ids.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from octavo.artifacts.script import END_ID, HIDDEN_SIZE, SPECIAL, VOCAB_SIZE, Rule, Script, encode, read_prompt
from octavo.core.limits import GroupSpec
from octavo.core.plan import (
    ROW_BEAM,
    ROW_POOL,
    ROW_SAMPLE,
    ROW_SCORE,
    NewSequence,
    Row,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.core.request import Request
from octavo.errors import EngineError
from octavo.executors.protocol import Capacity, ExecutorSpec, PoolBlocks, Ticket, usable_len
from octavo.grammar.matcher import Masks
from octavo.media.item import MediaItem

IMAGE_BUDGET = 256  # tokens of images that a step encodes, and that are kept
POOL_TOKENS = 262_144  # default size of the pool
TOKEN_BYTES = 64  # nominal size of a cached token, so that sizes in bytes have a meaning
MAX_STEP_S = 4.0  # below the watchdog's limit of 5 s
_SEND_S = 0.2  # wait before a crash, in which the earlier outputs are sent
_SPACE_ID = len(SPECIAL) + 0x20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ScriptedSequence:
    """The scripted output of one slot's sequence. `num_resumed` outputs were known when the sequence started."""

    new: NewSequence
    rule: Rule
    ids: tuple[int, ...]
    num_resumed: int

    def token(self, index: int) -> int:
        """Return the output at this index. END_ID follows the answer.

        While the output must not end (`ignore_eos`, `min_tokens`, a request without EOS ids), the answer repeats.
        """
        if index < len(self.ids):
            return self.ids[index]
        params = self.new.params
        if self.rule.finish == "length" or params.ignore_eos or index < params.min_tokens or not self.new.eos_token_ids:
            return self.ids[index % len(self.ids)] if self.ids else _SPACE_ID
        return END_ID


@dataclass(slots=True)
class _Step:
    """A started step. `rows` maps a sampled position to its row and the index of its id in the result."""

    result: StepResult
    delay_s: float = 0.0
    errors: dict[int, str] = field(default_factory=dict)
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)


class ScriptedExecutor:
    """See executors.protocol.Executor. `can_die`: only the engine uses this process, so a crash may kill it."""

    def __init__(self, script: Script, *, can_die: bool = False) -> None:
        self._script = script
        self._can_die = can_die
        self._slots: dict[int, _ScriptedSequence] = {}
        self._media: dict[str, tuple[MediaItem, ...]] = {}  # by request
        self._num_encoded = 0
        self._spec: ExecutorSpec

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Return the requested capacity; nothing is allocated."""
        return self.allocate(self.load(spec))

    def load(self, spec: ExecutorSpec) -> PoolBlocks:
        """Return the requested blocks."""
        self._spec, size = spec, spec.block_size
        given = [spec.num_blocks, _blocks(spec.pool_bytes, size * TOKEN_BYTES), _blocks(spec.pool_tokens, size)]
        num_blocks = next((count for count in given if count is not None), POOL_TOKENS // size)
        host_blocks = (spec.host_bytes // (size * TOKEN_BYTES),) if spec.host_bytes else ()
        return PoolBlocks((max(1, num_blocks),), host_blocks)

    def allocate(self, blocks: PoolBlocks) -> Capacity:
        """Return the capacity with these blocks; nothing is allocated."""
        spec = self._spec
        max_len = min(spec.max_model_len or self._script.max_model_len, self._script.max_model_len)
        groups = (GroupSpec(block_bytes=spec.block_size * TOKEN_BYTES),)
        return Capacity(
            groups=groups,
            num_blocks=blocks.device,
            block_size=spec.block_size,
            num_slots=spec.max_sequences,
            max_model_len=max_len,
            vocab_size=VOCAB_SIZE,
            device="script",
            dtype="none",
            kv_bytes_per_token=TOKEN_BYTES,
            host_blocks=blocks.host,
            has_masks=True,
            media=("image",) if self._script.images else (),
            encoder_budget=IMAGE_BUDGET if self._script.images else 0,
            encoder_cache=IMAGE_BUDGET if self._script.images else 0,
            usable_len=usable_len(groups, blocks.device, spec, max_len),
        )

    def submit(self, plan: StepPlan) -> Ticket:
        """Update the slots, and compute the outputs of the plan's rows."""
        for slot in plan.freed_slots:
            self._slots.pop(slot, None)
        for new in plan.new_sequences:
            self._slots[new.slot] = self._start(new)
        for job in plan.encode_jobs:
            items = self._media.get(self._slots[job.slot].new.request_id, ())
            if job.key not in {item.key for item in items}:
                raise EngineError(f"image {job.span} of request {self._slots[job.slot].new.request_id} was not sent")
            self._num_encoded += 1
        step = _Step(StepResult(array("i")), self._script.step_ms / 1e3 if plan.slots else 0.0)
        position = 0
        for number, row in enumerate(plan.rows()):
            sequence = self._slots[row.slot]
            if row.flags & ROW_SCORE:
                step.result.scores += ((number, row.start + 1, self._scores(sequence, row)),)
            if row.flags & ROW_POOL:
                step.result.pooled += ((number, _embedding(sequence.new)),)
            if row.flags & ROW_SAMPLE:
                self._sample(step, (number, position), row, sequence)
                position += 1 + len(row.drafts)
        step.delay_s = min(step.delay_s, MAX_STEP_S)
        return step

    def _sample(self, step: _Step, indices: tuple[int, int], row: Row, sequence: _ScriptedSequence) -> None:
        """Add one id for a sampling row, whether or not the row has drafts."""
        number, position = indices
        index = row.start + row.count - len(row.drafts) - sequence.new.num_prompt
        rule = sequence.rule
        delay_ms = rule.delay_ms + (rule.first_delay_ms if index == 0 else 0.0)
        step.delay_s = max(step.delay_s, delay_ms / 1e3)
        if rule.crash_after is not None and index >= rule.crash_after and not sequence.num_resumed:
            self._crash()  # a resumed sequence never makes the engine crash
        if rule.fail_after is not None and index >= rule.fail_after:
            step.errors[number] = "the script says that it fails here"
        result = step.result
        assert result.token_ids is not None
        step.rows[position] = number, len(result.token_ids)
        result.token_ids.append(sequence.token(index))
        params = sequence.new.params
        count = 2 * params.beam_width if row.flags & ROW_BEAM else params.num_logprobs
        if count is not None and result.logprobs is None:
            result.logprobs = [None] * (len(result.token_ids) - 1)
        if result.logprobs is not None:
            entry = None if count is None else self._entry(sequence, sequence.token(index), count)
            result.logprobs.append(entry)

    def supply(self, ticket: Ticket, masks: object) -> None:
        """Fail the rows whose next id their grammar does not allow; the script's answer is never changed."""
        assert isinstance(ticket, _Step) and isinstance(masks, Masks), "a ticket of submit, and masks"
        ids = ticket.result.token_ids
        assert ids is not None
        for position, bits in zip(masks.positions.tolist(), masks.bits_MW, strict=True):
            if position not in ticket.rows:
                continue  # a position after a draft: the script has no id for it
            number, index = ticket.rows[position]
            token = ids[index]
            if not int(bits[token // 32]) >> token % 32 & 1:
                ticket.errors[number] = "the script's answer is not what the grammar allows"
                _log.warning("an answer of the script does not obey the grammar of its request, which fails")

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait as long as the script says, and return the result."""
        assert isinstance(ticket, _Step), "a ticket comes from submit"
        if ticket.delay_s:
            time.sleep(ticket.delay_s)
        ticket.result.errors = tuple(sorted(ticket.errors.items()))
        return ticket.result

    def add_media(self, request: Request, items: tuple[MediaItem, ...]) -> None:
        """See MediaExecutor."""
        self._media[request.request_id] = items

    def drop_media(self, request_ids: Iterable[str]) -> None:
        """See MediaExecutor."""
        for request_id in request_ids:
            del self._media[request_id]

    def media_report(self) -> dict[str, float]:
        """See MediaExecutor. Nothing is encoded, but counted as if it were."""
        return {"num_encoded": self._num_encoded}

    def close(self) -> None:
        """Drop all slots and images."""
        self._slots.clear()
        self._media.clear()

    def _start(self, new: NewSequence) -> _ScriptedSequence:
        assert new.token_ids is not None, f"{new.request_id} has a length but no token ids: only a simulator can run it"
        request = read_prompt(new.token_ids[: new.num_prompt])
        rule = self._script.rule_for(request)
        ids = encode(rule.answer(request, new.choice))
        return _ScriptedSequence(new, rule, tuple(ids), len(new.token_ids) - new.num_prompt)

    def _crash(self) -> None:
        """Kill the process, or raise EngineError if other parts of the server share the process."""
        if self._can_die:
            _log.warning("the script says that the engine crashes here")
            time.sleep(_SEND_S)
            os.kill(os.getpid(), signal.SIGKILL)
        raise EngineError("the script says that the engine crashes here, and it shares this process")

    def _entry(self, sequence: _ScriptedSequence, token_id: int, count: int) -> TokenLogprobs:
        """Return log-probabilities in which this token ranks first and each next token is less likely by 1."""
        best = sequence.rule.logprob if sequence.rule.logprob is not None else self._script.logprob
        others = (other for other in range(_SPACE_ID + 1, VOCAB_SIZE) if other != token_id)
        tops = (token_id, *(other for other, _ in zip(others, range(count - 1), strict=False)))[:count]
        return TokenLogprobs(token_id, best, 1, tops, tuple(best - rank for rank in range(len(tops))))

    def _scores(self, sequence: _ScriptedSequence, row: Row) -> tuple[TokenLogprobs, ...]:
        ids, count = sequence.new.token_ids, sequence.new.params.prompt_logprobs or 0
        assert ids is not None
        end = min(row.start + row.count, sequence.new.num_prompt - 1)
        return tuple(self._entry(sequence, ids[position + 1], count) for position in range(row.start, end))


def _blocks(size: int | None, each: int) -> int | None:
    return None if size is None else size // each


def _embedding(new: NewSequence) -> bytes:
    """Return a vector of length 1: the sum of one hash vector per run of three ids, so that similar texts are close."""
    assert new.token_ids is not None
    ids = new.token_ids[: new.num_prompt].tolist()
    total = np.zeros(HIDDEN_SIZE, dtype=np.float64)
    for run in zip(ids, ids[1:] or ids, ids[2:] or ids, strict=False):
        digest = blake2b(struct.pack("<3i", *run), digest_size=HIDDEN_SIZE).digest()
        total += np.frombuffer(digest, dtype=np.uint8).astype(np.float64) - 127.5
    return (total / np.linalg.norm(total)).astype(np.float32).tobytes()

"""A model whose KV is a chain of hashes, and a short oracle of what it says.

Owns: the cells (`cells_at`, `context_of`), what is sampled behind one (`draw`, `candidates`), `Continuation` (the
slow way to compute cells, from ids alone), `oracle`. Does not: know blocks or plans (see fake_pool).
Invariants: every group's cell at a position depends on cells that all groups' tables must hold: the one before, one
farther back, and of a sliding group the oldest in its window. Nothing else is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from octavo.core.request import SamplingParams, Span

GREEDY = SamplingParams(temperature=0.0)
UNKNOWN_TOKEN = -1  # the id of a request known by length only
HABIT = 1000  # seeds from here on: seven times in eight the next id follows from the last one alone
FULL = (0,)  # the windows of a model with one group of full attention


@cache
def context_of(windows: tuple[int, ...], position: int) -> tuple[tuple[int, int], ...]:
    """(group, position) of the cells that a position reads: all lie inside the group's window."""
    found: list[tuple[int, int]] = []
    for group, window in enumerate(windows):
        first = max(0, position - window + 1) if window else 0
        if first < position:
            found += [(group, position - 1), (group, first + hash((position, group, 3)) % (position - first))]
            if window:
                found.append((group, first))
    return tuple(dict.fromkeys(found))


def cells_at(num_groups: int, context: Sequence[int], token_id: int, position: int, salt: int = 0) -> list[int]:
    """The KV of one position, a number per group."""
    base = (
        hash((UNKNOWN_TOKEN, position, 5)) if token_id == UNKNOWN_TOKEN else hash((token_id, position, salt, *context))
    )
    return [hash((base, group)) | 1 for group in range(num_groups)]


def salt_of(adapter_id: int, spans: Sequence[Span], position: int) -> int:
    """What else the KV of a position depends on: the adapter, and the media item that lies there."""
    salt = adapter_id and hash((adapter_id, 29))
    for span in spans:
        if span.start <= position < span.start + span.length:
            salt = hash((salt, content_of(span.key), position - span.start))
    return salt


def content_of(key: bytes) -> int:
    """The output of the encoder for the item of this key."""
    return hash((int.from_bytes(key[:8], "little"), len(key), 31))


def _banned(params: SamplingParams, num_outputs: int, eos: Sequence[int]) -> tuple[int, ...]:
    """End ids are not sampled before `min_tokens`."""
    if num_outputs >= params.min_tokens:
        return ()
    return params.stop_token_ids if params.ignore_eos else (*eos, *params.stop_token_ids)


def draw(
    cell: int,
    params: SamplingParams,
    num_outputs: int,
    vocab_size: int,
    eos: Sequence[int],
    choice: int = 0,
    last_id: int = UNKNOWN_TOKEN,
) -> int:
    """The token sampled behind a cell by one choice of a request; with a seed from HABIT on, mostly a habit of its."""
    banned, attempt = _banned(params, num_outputs, eos), 0
    if (params.seed or 0) >= HABIT and hash((cell, params.seed, choice, 41)) % 8:
        habitual = hash((last_id, 43)) % vocab_size
        if habitual not in banned:
            return habitual
    while (token_id := (hash((cell, params.seed or 0, attempt, choice)) >> 7) % vocab_size) in banned:
        attempt += 1
    return token_id


def candidates(
    cell: int, params: SamplingParams, num_outputs: int, vocab_size: int, eos: Sequence[int]
) -> list[tuple[float, int]]:
    """(log-probability, a float32; id) of all ids that may come behind a cell, best first."""
    banned = _banned(params, num_outputs, eos)
    scored = [
        (-((hash((cell, token_id, 17)) >> 5) % 2**20) / 2**17, token_id)
        for token_id in range(vocab_size)
        if token_id not in banned
    ]
    return sorted(scored, key=lambda entry: (-entry[0], entry[1]))


class Continuation:
    """Ids and the cells that they make, computed from the ids alone, without any table."""

    def __init__(
        self, ids: Sequence[int], windows: tuple[int, ...] = FULL, adapter_id: int = 0, spans: Sequence[Span] = ()
    ) -> None:
        self.ids, self.windows, self.adapter_id, self.spans = list(ids), windows, adapter_id, spans
        self.cells: list[list[int]] = [[] for _ in windows]

    def branch(self, token_id: int) -> Continuation:
        """A copy with one more id."""
        other = Continuation([*self.ids, token_id], self.windows, self.adapter_id, self.spans)
        other.cells = [column[:] for column in self.cells]
        return other

    def expected(self, end: int) -> list[list[int]]:
        """The cells of positions [0, end) by group, and maybe more."""
        cells = self.cells
        for position in range(len(cells[0]), end):
            context = [cells[group][where] for group, where in context_of(self.windows, position)]
            salt = salt_of(self.adapter_id, self.spans, position) if self.adapter_id or self.spans else 0
            made = cells_at(len(cells), context, self.ids[position], position, salt)
            for column, cell in zip(cells, made, strict=True):
                column.append(cell)
        return cells

    def last_cell(self) -> int:
        """The cell that the next id is sampled behind."""
        return self.expected(len(self.ids))[0][len(self.ids) - 1]


def end_ids(params: SamplingParams, eos: Sequence[int]) -> set[int]:
    """Ids that end a sequence."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos)}


def oracle(
    prompt_ids: Sequence[int],
    num_outputs: int,
    vocab_size: int,
    eos: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    adapter_id: int = 0,
    *,
    windows: tuple[int, ...] = FULL,
    choice: int = 0,
    spans: Sequence[Span] = (),
) -> list[int]:
    """The ids that a choice must give: at most `num_outputs`, up to its first end-of-sequence or stop id."""
    ends = end_ids(params, eos)
    made = Continuation(prompt_ids, windows, adapter_id, spans)
    for produced in range(num_outputs):
        made.ids.append(draw(made.last_cell(), params, produced, vocab_size, eos, choice, made.ids[-1]))
        if made.ids[-1] in ends:
            break
    return made.ids[len(prompt_ids) :]

"""What the fake executor gives back for the rows of a step: sampled ids, candidates of beams, scores, pooled states.

Owns: the StepResult. Does not: write cells.
Invariants: a forked row reads what the nearest row before it with tokens computed, and only if its own table and ids
say the same; a beam's row makes nothing known.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.core.plan import ROW_BEAM, ROW_FORK, ROW_POOL, ROW_SAMPLE, ROW_SCORE, Row, StepResult, TokenLogprobs
from tests.fake_pool import FakeModelError, Slot
from tests.hash_chain import candidates, end_ids

if TYPE_CHECKING:
    from tests.fake_model import FakeExecutor


def sample(executor: FakeExecutor, rows: list[Row]) -> StepResult:
    """Draw behind each sampling row's last cell; score and pool rows that want it."""
    result = StepResult(array("i"), array("i"), [])
    errors, scores, pooled = [], [], []
    for index, row in enumerate(rows):
        state = executor.slots[row.slot]
        if executor.is_baseless(row):
            garbage = executor.faults.rng.randrange(executor.vocab_size)  # which nobody may take
            _give(result, garbage, TokenLogprobs(garbage, -1.0, 1))
            continue
        cell = _cell_behind(executor, rows, index)
        if row.slot in executor.failing:
            errors.append((index, "injected: not finite"))
        if row.flags & ROW_SCORE:
            scores.append((index, row.start + 1, _scores(state, row)))
        if row.flags & ROW_POOL:
            pooled.append((index, (cell % 2**32).to_bytes(4, "little")))
        if row.drafts:
            _verify_row(executor, state, row, result)
        elif row.flags & ROW_SAMPLE:
            _sample_row(executor, state, row, cell, result)
    result.errors, result.scores, result.pooled = tuple(errors), tuple(scores), tuple(pooled)
    return _trimmed(result, executor.durations_only)


def _trimmed(result: StepResult, durations_only: bool) -> StepResult:
    """The columns that say nothing are left out."""
    assert result.num_token_ids is not None and result.logprobs is not None
    if all(count == 1 for count in result.num_token_ids):
        result.num_token_ids = None
    if durations_only:
        result.token_ids = None
    if not any(entry is not None for entry in result.logprobs):
        result.logprobs = None
    return result


def _give(result: StepResult, token_id: int, entry: TokenLogprobs | None) -> None:
    assert result.token_ids is not None and result.num_token_ids is not None and result.logprobs is not None
    result.token_ids.append(token_id)
    result.num_token_ids.append(1)
    result.logprobs.append(entry)


def _sample_row(executor: FakeExecutor, state: Slot, row: Row, cell: int, result: StepResult) -> None:
    """One sampling row: its id, or its candidates, or, by a fault, nothing at all."""
    if executor.faults.hits(executor.faults.zero_tokens, "results without tokens"):
        assert result.num_token_ids is not None
        result.num_token_ids.append(0)
        state.may_repeat = True
        return
    if row.flags & ROW_BEAM:
        best = _best(executor, state, cell)
        _give(result, best[0][1], _entry(best[0], best))
        return
    _draw(executor, state, cell, result)


def _verify_row(executor: FakeExecutor, state: Slot, row: Row, result: StepResult) -> None:
    """A row with drafts: accept them as long as they are what is drawn; what it wrote behind them is void."""
    assert result.num_token_ids is not None
    num_before = len(result.num_token_ids)
    for at, draft in enumerate((*row.drafts, None)):
        last = row.start + at
        cell = executor.pool.cells[0][state.tables[0][last // executor.block_size]][last % executor.block_size]
        if at == 0:
            _sample_row(executor, state, row, cell, result)
            if not result.num_token_ids[-1]:
                break
        else:
            _draw(executor, state, cell, result)
        if state.ids[-1] != draft:
            break
    lengths = result.num_token_ids[num_before:]
    del result.num_token_ids[num_before:]
    result.num_token_ids.append(sum(lengths))
    state.next_start = row.start + max(1, sum(lengths))
    executor.pool.unwrite(state, state.next_start, row.start + row.count)


def _draw(executor: FakeExecutor, state: Slot, cell: int, result: StepResult) -> None:
    """Draw the next id of a slot."""
    params, num_outputs = state.params, len(state.ids) - state.num_prompt
    token_id = executor.draw_next(state, cell)
    state.sampled_in = executor.current.number
    entry = None
    if params.num_logprobs is not None and params.best_of is not None:
        ranked = candidates(cell, params, num_outputs, executor.vocab_size, state.eos)
        own = next(pair for pair in ranked if pair[1] == token_id)
        entry = _entry(own, ranked[: params.num_logprobs], ranked.index(own) + 1)
    _give(result, token_id, entry)


def _best(executor: FakeExecutor, state: Slot, cell: int) -> list[tuple[float, int]]:
    """As many candidates as a beam search of this width looks at."""
    count = max(2, 1 + len(end_ids(state.params, state.eos))) * state.params.beam_width
    num_outputs = len(state.ids) - state.num_prompt
    return candidates(cell, state.params, num_outputs, executor.vocab_size, state.eos)[:count]


def _entry(own: tuple[float, int], top: list[tuple[float, int]], rank: int = 1) -> TokenLogprobs:
    ids, logprobs = tuple(token_id for _, token_id in top), tuple(logprob for logprob, _ in top)
    return TokenLogprobs(own[1], own[0], rank, ids, logprobs)


def _cell_behind(executor: FakeExecutor, rows: list[Row], index: int) -> int:
    """The cell that a row's logits come from."""
    row, size = rows[index], executor.block_size
    state = executor.slots[row.slot]
    if row.flags & ROW_FORK:
        parent = next((before for before in reversed(rows[:index]) if before.count), None)
        if parent is None:
            raise FakeModelError(f"slot {row.slot} is forked, but no row before it has tokens")
        giver, end = executor.slots[parent.slot], parent.start + parent.count
        if giver.request_id != state.request_id or end != row.start or giver.ids[:end] != state.ids:
            raise FakeModelError(
                f"{state.request_id!r} choice {state.choice} at {row.start} is forked from the logits of "
                f"{giver.request_id!r} choice {giver.choice} at {end}"
            )
        if executor.strict and not all(
            [executor.pool.check_context(state, group, row.start) for group in range(len(state.tables))]
        ):
            raise FakeModelError(f"{state.request_id!r} choice {state.choice} is forked without its context")
        state = giver
    last = row.start + row.count - 1
    return executor.pool.cells[0][state.tables[0][last // size]][last % size]


def _scores(state: Slot, row: Row) -> tuple[TokenLogprobs, ...]:
    """One entry per prompt token behind the row's positions, a function of the cell before it."""
    end = min(row.start + row.count + 1, state.num_prompt)
    cells = state.made.expected(row.start + row.count)[0]
    return tuple(TokenLogprobs(state.ids[p], -(cells[p - 1] % 1000) / 100, 1) for p in range(row.start + 1, end))

"""The ledger: append then hand out; no duplicate, no gap, no stale epoch, no growth."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.fakes import make_request
from tests.frontend.ledgers import Begun, SilentLink, begin

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, SamplingParams, Want
from octavo.engine.client import TokenOutput, finished
from octavo.errors import DuplicateRequestError, EngineError, ErrorKind, InvalidRequestError
from octavo.frontend.open_request import OpenRequest

WHY = FinishError(ErrorKind.ENGINE, "why")


def accepts(ledger: Begun, epoch: int, events: Events) -> bool:
    """Whether anything of it was taken."""
    told: list[Events] = []
    ledger._observer = SimpleNamespace(appended=told.append, forgotten=lambda name: None)  # type: ignore[assignment]
    ledger.accept(epoch, events)
    ledger._observer = None
    return bool(told)


def admitted(name: str, queue_s: float, cached_tokens: int) -> Event:
    return Event(EventKind.ADMITTED, name, make_request(name).arrival + queue_s, 1, cached_tokens=cached_tokens)


def tokens(name: str, position: int, *ids: int, end: FinishReason | None = None, choice: int = 0) -> Events:
    count = len(ids)
    return Events(
        1,
        0.0,
        [name] * count,
        array("i", [choice] * count),
        array("i", range(position, position + count)),
        array("i", ids),
        decisions=() if end is None else (finished(name, end, WHY),),
    )


def test_L01_outputs_are_snapshots_and_coalesce() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a"))
    assert not entry.take()
    ledger.accept(0, tokens("a", 0, 7))
    (first,) = entry.take()
    for position in range(1, 4):
        ledger.accept(0, tokens("a", position, 10 + position))
    (second,) = entry.take()
    assert (first.position, list(first.token_ids)) == (0, [7])
    assert (second.position, list(second.token_ids)) == (1, [11, 12, 13])
    ledger.accept(0, tokens("a", 4, 9, end=FinishReason.LENGTH))
    assert list(second.token_ids) == [11, 12, 13]  # bug 8: an alias would have grown
    (last,) = entry.take()
    assert last.finish_reason is FinishReason.LENGTH and last.message == "why" and entry.is_read


def test_an_end_alone_is_an_output_too() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a"))
    ledger.accept(0, tokens("a", 0, end=FinishReason.TIMEOUT))
    (output,) = entry.take()
    assert output == TokenOutput("a", 0, 0, array("i"), finish_reason=FinishReason.TIMEOUT, error=WHY, is_final=True)


def test_duplicates_gaps_and_strangers_are_dropped_and_counted() -> None:
    ledger = Begun(epoch=3)
    entry = ledger.add(make_request("a"))
    assert not accepts(ledger, 2, tokens("a", 0, 5))
    ledger.accept(3, tokens("a", 0, 5, 6))
    assert not accepts(ledger, 3, tokens("a", 1, 6))
    assert not accepts(ledger, 3, tokens("a", 3, 8))
    assert not accepts(ledger, 3, tokens("b", 0, 8, end=FinishReason.STOP))
    ledger.accept(3, tokens("a", 2, 7, end=FinishReason.STOP))
    assert not accepts(ledger, 3, tokens("a", 3, 9, end=FinishReason.STOP))
    assert list(entry.pages[0].ids) == [5, 6, 7]
    counts = ledger.rejections
    assert (counts.stale_epochs, counts.duplicates, counts.gaps, counts.unknown) == (1, 1, 1, 4)


def test_L06_an_id_in_use_is_refused_and_free_after_its_end() -> None:
    ledger = Begun()
    ledger.add(make_request("a"))
    with pytest.raises(DuplicateRequestError):
        ledger.add(make_request("a"))
    ledger.accept(0, tokens("a", 0, end=FinishReason.STOP))
    ledger.add(make_request("a"))


def test_a_request_without_a_seed_cannot_be_repeated_and_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        Begun().add(make_request("a", params=SamplingParams()))


def test_ended_entries_nobody_reads_are_bounded() -> None:
    ledger = Begun(max_unread=3)
    for index in range(10):
        ledger.add(make_request(f"r{index}"))
        ledger.accept(0, tokens(f"r{index}", 0, 1, end=FinishReason.STOP))
    assert [f"r{index}" for index in range(10) if ledger.get(f"r{index}")] == ["r7", "r8", "r9"]
    assert len(ledger) == 0 and ledger.rejections.unread == 7


def test_logprobs_and_prompt_scores_come_once() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a", params=SamplingParams(seed=1, logprobs=1, max_tokens=4)))
    marks = [TokenLogprobs(i, -float(i), 1) for i in range(6)]
    ledger.accept(0, Events(1, 0.0, scores=(("a", 1, (marks[0], marks[1])),)))
    ledger.accept(0, Events(1, 0.0, scores=(("a", 3, (marks[2],)),)))
    assert not entry.take()
    ledger.accept(0, replace_logprobs(tokens("a", 0, 3), [marks[3]]))
    (output,) = entry.take()
    assert output.prompt_logprobs == (1, (marks[0], marks[1], marks[2])) and output.logprobs == (marks[3],)
    ledger.accept(0, replace_logprobs(tokens("a", 1, 4, 5), [marks[4], marks[5]]))
    (output,) = entry.take()
    assert output.prompt_logprobs is None and output.logprobs == (marks[4], marks[5])


def replace_logprobs(events: Events, logprobs: list[TokenLogprobs | None]) -> Events:
    return replace(events, logprobs=logprobs)


def test_a_new_epoch_resumes_behind_what_was_emitted() -> None:
    ledger = Begun(epoch=1)
    old, new = make_request("old"), make_request("new")
    ledger.add(old)
    ledger.add(new)
    ledger.accept(1, tokens("old", 0, 5, 6))
    resumed = begin(ledger, 2)
    assert [request.request_id for request in resumed] == ["old", "new"]
    assert resumed[0] == replace(old, emitted_token_ids=array("i", [5, 6])) and resumed[1] == new
    assert not accepts(ledger, 1, tokens("old", 2, 7))
    assert accepts(ledger, 2, tokens("old", 2, 8))
    entry = ledger.get("old")
    assert entry is not None and [list(output.token_ids) for output in entry.take()] == [[5, 6, 8]]
    with pytest.raises(ValueError, match="follow"):
        ledger.begin_epoch(SilentLink(2))


def test_end_all_ends_everyone_once() -> None:
    ledger = Begun()
    ledger.add(make_request("a"))
    entries = list(ledger)
    ledger.end_all(FinishReason.ERROR, EngineError("why"))
    assert [entry.take()[-1].message for entry in entries] == ["why"]
    ledger.end_all(FinishReason.ERROR, EngineError("why"))
    assert len(ledger) == 0


def several(n: int = 3, **options: object) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=9, n=n, **options)  # type: ignore[arg-type]


def choice_end(choice: int, reason: FinishReason = FinishReason.STOP) -> Events:
    return Events(1, 0.0, decisions=(finished("a", reason, choice=choice, stop_token_id=7),))


def test_P03_each_choice_has_its_own_positions_and_one_end() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a", params=several()))
    ledger.accept(0, tokens("a", 0, 5, choice=2))
    ledger.accept(0, tokens("a", 0, 6, 7))
    assert not accepts(ledger, 0, tokens("a", 1, 9, choice=1))  # its first is missing
    first = entry.take()
    assert [(o.choice, o.position, list(o.token_ids)) for o in first] == [(0, 0, [6, 7]), (2, 0, [5])]
    assert accepts(ledger, 0, choice_end(2))
    assert not accepts(ledger, 0, tokens("a", 1, 8, choice=2)) and not accepts(ledger, 0, choice_end(2))
    assert not accepts(ledger, 0, tokens("a", 0, 8, choice=3)) and not accepts(ledger, 0, choice_end(3))
    (ended,) = entry.take()
    assert (ended.choice, ended.finish_reason) == (2, FinishReason.STOP)
    assert not ended.is_final and not entry.take()
    ledger.accept(0, tokens("a", 2, 8, end=FinishReason.LENGTH))
    rest = entry.take()
    assert [(o.choice, o.finish_reason, o.is_final) for o in rest] == [
        (0, FinishReason.LENGTH, False),
        (1, FinishReason.LENGTH, True),
    ]
    counts = ledger.rejections
    assert (counts.gaps, counts.late, counts.unknown, counts.duplicates) == (1, 3, 1, 0)


def test_P03_a_slow_reader_gets_ids_and_end_of_a_choice_at_once() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a", params=several(2)))
    ledger.accept(0, tokens("a", 0, 5, choice=1))
    ledger.accept(0, choice_end(1))
    (output,) = entry.take()
    assert list(output.token_ids) == [5] and output.finish_reason is FinishReason.STOP


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_bounded_outputs_add_up_to_all(first: int, second: int, most: int, is_ended: bool) -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a", params=several(2, logprobs=1)))
    marks = [TokenLogprobs(i, -1.0, 1) for i in range(40)]
    ledger.accept(0, Events(1, 0.0, scores=(("a", 1, tuple(marks[:2])),)))
    for choice, count in enumerate((first, second)):
        ledger.accept(0, replace_logprobs(tokens("a", 0, *range(count), choice=choice), list(marks[:count])))
    if is_ended:
        ledger.accept(0, tokens("a", 0, end=FinishReason.STOP))
    parts = []
    while outputs := entry.take(most):
        parts += outputs
        assert len({output.choice for output in outputs}) == len(outputs), "one of each choice, so that none waits"
    for choice, count in enumerate((first, second)):
        own = [part for part in parts if part.choice == choice]
        assert [i for part in own for i in part.token_ids] == list(range(count))
        assert [entry for part in own for entry in part.logprobs or ()] == marks[:count]
        assert all(len(part.token_ids) <= most for part in own)
        assert [part.position for part in own] == list(range(0, max(count, is_ended), most))
        ends = [(part.finish_reason, part.message) for part in own]
        assert all(end == (None, None) for end in ends[:-1])
        assert not own or ends[-1] == ((FinishReason.STOP, "why") if is_ended else (None, None))
    assert [part.is_final for part in parts] == [False] * (len(parts) - 1) + [is_ended] * bool(parts)
    scores = [None if part.prompt_logprobs is None else part.prompt_logprobs[0] for part in parts]
    assert scores == ([1] + [None] * (len(parts) - 1) if parts else []) and entry.num_unread == 0


def test_P03_the_last_choice_ends_with_its_request() -> None:
    """So there is always an output left that can be final."""
    ledger = Begun()
    entry = ledger.add(make_request("a", params=several(2)))
    ledger.accept(0, choice_end(0))
    entry.take()
    ledger.accept(0, choice_end(1))
    assert not entry.take() and entry.ended_choices == [0, 1]
    ledger.accept(0, choice_end(1))
    ledger.accept(0, tokens("a", 0, 9, choice=1))
    assert ledger.rejections.late == 2
    ledger.accept(0, tokens("b", 0, end=FinishReason.LENGTH))
    ledger.accept(0, tokens("a", 0, end=FinishReason.LENGTH))
    assert [(o.choice, o.finish_reason, o.is_final) for o in entry.take()] == [(1, FinishReason.STOP, True)]


def test_P04_a_beam_search_gives_the_choices_asked_for() -> None:
    ledger = Begun()
    entry = ledger.add(make_request("a", params=several(2, beam_width=4)))
    ledger.accept(0, tokens("a", 0, end=FinishReason.LENGTH))
    assert [output.choice for output in entry.take()] == [0, 1]


def test_P02_a_request_with_mirostat_starts_anew_in_a_new_epoch() -> None:
    """No engine can compute mirostat's bound from ids; the ids that are known come again and are dropped."""
    ledger = Begun(epoch=1)
    request = make_request("a", params=SamplingParams(mirostat=2, max_tokens=9, seed=1))
    entry = ledger.add(request)
    ledger.accept(1, tokens("a", 0, 5, 6))
    (again,) = begin(ledger, 2)
    assert again.emitted_token_ids is None and again.params == request.params
    ledger.accept(2, tokens("a", 0, 5, 6, 7))
    assert list(entry.pages[0].ids) == [5, 6, 7] and ledger.rejections.duplicates == 2


def test_a_request_of_several_choices_starts_anew_in_a_new_epoch() -> None:
    """Its ids come again from the first; those held are dropped as duplicates, of ended choices too."""
    ledger = Begun(epoch=1)
    request = make_request("a", params=several(2))
    entry = ledger.add(request)
    ledger.accept(1, tokens("a", 0, 5, 6))
    ledger.accept(1, tokens("a", 0, 4, choice=1))
    ledger.accept(1, choice_end(1))
    assert begin(ledger, 2) == [request]
    ledger.accept(2, tokens("a", 0, 5, 6, 7))
    ledger.accept(2, tokens("a", 0, 4, 8, choice=1))
    assert list(entry.pages[0].ids) == [5, 6, 7] and list(entry.pages[1].ids) == [4]
    assert (ledger.rejections.duplicates, ledger.rejections.late) == (3, 1)


def test_what_was_true_at_the_first_admission_stays_true() -> None:
    """A later life finds what was emitted in its cache too: usage tells of the prompt, and of the first admission."""
    ledger = Begun(epoch=1)
    entry = ledger.add(make_request("a", length=6))
    ledger.accept(1, Events(1, 0.0, decisions=(admitted("a", 0.25, 4), admitted("gone", 1.0, 1))))
    begin(ledger, 2)
    ledger.accept(2, Events(1, 0.0, decisions=(admitted("a", 9.0, 40),)))
    ledger.accept(2, Events(1, 0.0, decisions=(replace(finished("a", FinishReason.LENGTH), cached_tokens=40),)))
    (output,) = entry.take()
    assert (output.cached_tokens, output.queue_s) == (4, 0.25)
    late = ledger.add(make_request("b", length=6))
    ledger.accept(2, Events(1, 0.0, decisions=(replace(finished("b", FinishReason.LENGTH), cached_tokens=40),)))
    assert late.take()[0].cached_tokens == 6


def test_a_queue_timeout_does_not_count_again_after_the_first_admission() -> None:
    ledger = Begun(epoch=1)
    ledger.add(make_request("a", queue_timeout=2.0, deadline=9.0))
    ledger.add(make_request("b", queue_timeout=2.0))
    ledger.accept(1, Events(1, 0.0, decisions=(admitted("a", 0.0, 0),)))
    a, b = begin(ledger, 2)
    assert (a.queue_timeout, a.deadline, b.queue_timeout) == (None, 9.0, 2.0)


def test_prompt_scores_are_kept_once_and_asked_for_from_where_they_ended() -> None:
    ledger = Begun(epoch=1)
    entry = ledger.add(make_request("a", length=6, wants=Want.SAMPLE | Want.SCORE))

    def scored(first: int, *positions: int) -> Events:
        return Events(1, 0.0, scores=(("a", first, tuple(TokenLogprobs(p, -p / 10, 1) for p in positions)),))

    ledger.accept(1, scored(1, 1, 2))
    assert begin(ledger, 2)[0].score_from == 3
    ledger.accept(2, scored(1, 1, 2, 3))
    ledger.accept(2, scored(5, 5))  # does not follow: left out
    ledger.accept(2, scored(4, 4, 5))
    ledger.accept(2, tokens("a", 0, 8))
    (output,) = entry.take()
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] == 1
    assert [item.token_id for item in output.prompt_logprobs[1]] == [1, 2, 3, 4, 5]
    (resumed,) = begin(ledger, 3)
    assert resumed.wants == Want.SAMPLE and list(resumed.emitted_token_ids or ()) == [8]
    ledger.accept(3, scored(1, 1, 2))
    ledger.accept(3, tokens("a", 1, 9))
    assert entry.take()[0].prompt_logprobs is None


@pytest.mark.parametrize(
    "ids, end",
    [
        ((5, 6), None),
        ((5, 6, 7), finished("a", FinishReason.LENGTH)),
        ((5, 2), finished("a", FinishReason.STOP)),
        ((5, 40), finished("a", FinishReason.STOP, stop_token_id=40)),
        ((2,), None),  # min_tokens
    ],
)
def test_ids_that_imply_an_end_are_not_resumed(ids: tuple[int, ...], end: Event | None) -> None:
    params = SamplingParams(max_tokens=3, min_tokens=1, seed=1, stop_token_ids=(40,))
    ledger = Begun(epoch=1)
    entry = ledger.add(make_request("a", params=params, eos=(2,)))
    ledger.accept(1, tokens("a", 0, *ids))
    assert entry.implied_end() == end


class Notes:
    """A LedgerObserver that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def opened(self, state: OpenRequest) -> None:
        self.lines.append(("opened", state.request.request_id))

    def appended(self, events: Events) -> None:
        ends = [(e.request_id, e.finish_reason.name) for e in events.decisions if e.kind == EventKind.FINISHED]
        choice_ends = [(e.request_id, e.choice) for e in events.decisions if e.kind == EventKind.CHOICE_FINISHED]
        columns = list(zip(events.request_ids, events.positions, events.token_ids, strict=True))
        self.lines.append(("appended", columns, choice_ends, ends))

    def forgotten(self, request_id: str) -> None:
        self.lines.append(("forgotten", request_id))


def test_an_observer_hears_of_what_was_accepted_and_of_nothing_else() -> None:
    notes = Notes()
    ledger = Begun(1, observer=notes)
    a = ledger.add(make_request("a"))
    ledger.add(make_request("b", params=several(2)))
    ledger.forget("nobody")
    ledger.accept(1, tokens("a", 0, 5, 6))
    ledger.accept(0, tokens("a", 2, 7))
    ledger.accept(1, tokens("a", 1, 6, 7, end=FinishReason.LENGTH))
    ledger.accept(1, tokens("a", 3, 8, end=FinishReason.LENGTH))
    ledger.end("b", FinishReason.STOP, choice=1)
    ledger.end("b", FinishReason.STOP, choice=1)
    ledger.end("b", FinishReason.CANCELLED, choice=0)
    a.take()
    ledger.forget_ended(a)
    assert notes.lines == [
        ("opened", "a"),
        ("opened", "b"),
        ("appended", [("a", 0, 5), ("a", 1, 6)], [], []),
        ("appended", [("a", 2, 7)], [], [("a", "LENGTH")]),
        ("appended", [], [("b", 1)], []),
        ("appended", [], [], [("b", "CANCELLED")]),
        ("forgotten", "a"),
    ]


def test_entries_of_an_earlier_front_end_are_put_back() -> None:
    notes = Notes()
    ledger = Begun(1, observer=notes)
    entry = OpenRequest(make_request("a"))
    entry.pages[0].ids.extend([4, 5])
    ledger.restore(entry)
    with pytest.raises(DuplicateRequestError):
        ledger.restore(OpenRequest(make_request("a")))
    assert notes.lines == [] and list(begin(ledger, 2)[0].emitted_token_ids or ()) == [4, 5]
    assert list(entry.take()[0].token_ids) == [4, 5]  # a new reader gets all of it


def test_an_ended_request_whose_reader_is_gone_is_not_kept() -> None:
    ledger = Begun()
    before, after, kept = (ledger.add(make_request(name)) for name in ("before", "after", "kept"))
    ledger.abandon(before)
    for name in ("before", "after", "kept"):
        ledger.accept(0, tokens(name, 0, 5, end=FinishReason.CANCELLED))
    assert ledger.get("before") is None and ledger.get("after") is after and ledger.get("kept") is kept
    ledger.abandon(after)
    assert ledger.get("after") is None and after.take()[-1].is_final, "who holds it may still read it"
    ledger.abandon(ledger.add(make_request("after")))
    assert ledger.get_open("after") is not None, "what is open stays"


def test_a_queue_timeout_of_zero_ends_a_request_that_no_engine_has_as_the_scheduler_would() -> None:
    ledger = Begun(epoch=1)
    timed = ledger.add(make_request("a", queue_timeout=0.0))
    patient = ledger.add(make_request("b"))
    ledger.lose_engine(())
    ledger.expire(timed.request.arrival)
    assert timed.end is not None and timed.end.finish_reason is FinishReason.TIMEOUT
    assert patient.end is None

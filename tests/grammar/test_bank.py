"""The bank: whose masks a plan needs, drafts among them, and what it lets go of."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
from tests.tiny_models import EOS_ID

from octavo.core.plan import ROW_FORK, ROW_SAMPLE, Event, EventKind, Events, NewSequence, StepPlan
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.errors import InvalidRequestError, RequestError
from octavo.grammar.bank import MAX_KEPT, GrammarBank
from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

CHOICE = compile_grammar("choice", '["yes", "no"]')


@pytest.fixture
def bank(vocabulary: Vocabulary) -> Iterator[GrammarBank]:
    made = GrammarBank(vocabulary)
    yield made
    made.close()


def request(name: str, grammar: str = CHOICE, emitted: list[int] | None = None, n: int = 1) -> Request:
    ids = None if emitted is None else array("i", emitted)
    params = SamplingParams(grammar=grammar, n=n)
    return Request(name, array("i", [5]), params, emitted_token_ids=ids, eos_token_ids=(EOS_ID,))


def prepare(bank: GrammarBank, asked: Request) -> Matcher | RequestError:
    """What the bank answers, from its own thread."""
    told: list[Matcher | RequestError] = []
    done = threading.Event()
    bank.prepare(asked, lambda outcome: (told.append(outcome), done.set()))
    assert done.wait(30) and len(told) == 1
    return told[0]


def open_(bank: GrammarBank, asked: Request) -> None:
    matcher = prepare(bank, asked)
    assert isinstance(matcher, Matcher)
    bank.open(asked.request_id, matcher)


def new(slot: int, name: str, choice: int = 0) -> NewSequence:
    return NewSequence(slot, name, choice, 1, array("i", [5]), SamplingParams())


def plan(*rows: tuple[int, int], entered: tuple[NewSequence, ...] = (), drafts: dict[int, list[int]] | None = None):
    """A plan of (slot, flags) rows; `drafts` by row."""
    drafts = drafts or {}
    counts = array("i", [1 + len(drafts.get(row, [])) for row in range(len(rows))])
    return StepPlan(
        0,
        0.0,
        array("i", [slot for slot, _ in rows]),
        array("i", [0] * len(rows)),
        counts,
        array("i", [flags for _, flags in rows]),
        array("i", [len(drafts.get(row, [])) for row in range(len(rows))]) if drafts else array("i"),
        array("i", [token for row in range(len(rows)) for token in drafts.get(row, [])]),
        new_sequences=entered,
    )


def committed(bank: GrammarBank, name: str, position: int, token: int, choice: int = 0) -> None:
    bank.committed(Events(0, 0.0, [name], array("i", [choice]), array("i", [position]), array("i", [token])))


def finished(bank: GrammarBank, name: str) -> None:
    bank.ended([Event(EventKind.FINISHED, name, 0.0, 0, finish_reason=FinishReason.STOP)])


def ids_of(line: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist())


def test_P06_rows_that_sample_for_a_grammar_have_masks_and_no_others(bank: GrammarBank) -> None:
    assert bank.is_empty
    open_(bank, request("a"))
    open_(bank, request("b"))
    assert not bank.is_empty
    entered = (new(3, "a"), new(1, "plain"), new(2, "b"))
    job = bank.begin(plan((1, ROW_SAMPLE), (3, ROW_SAMPLE), (2, 0), entered=entered))
    assert job is not None
    masks, failures = job.result()
    assert masks.positions.tolist() == [1] and failures == ()
    assert bank.begin(plan((1, ROW_SAMPLE), (2, 0))) is None


def test_P06_drafts_have_masks_behind_each(bank: GrammarBank, tokenizer: Tokenizer) -> None:
    open_(bank, request("a"))
    ids = tokenizer.encode("no", add_special_tokens=False)
    first = bank.begin(plan((0, ROW_SAMPLE), (1, ROW_SAMPLE), entered=(new(1, "a"),), drafts={0: [9, 9], 1: ids}))
    assert first is not None
    masks, _ = first.result()
    assert masks.positions.tolist() == list(range(3, 4 + len(ids)))
    assert ids[0] in ids_of(masks.bits_MW[0]) and ids_of(masks.bits_MW[-1]) == {EOS_ID}


def test_P06_only_what_was_committed_moves_an_output(bank: GrammarBank, tokenizer: Tokenizer) -> None:
    open_(bank, request("a"))
    ids = tokenizer.encode("no", add_special_tokens=False)
    step = plan((0, ROW_SAMPLE), entered=(new(0, "a"),))
    before = bank.begin(step)
    again = bank.begin(step)  # as after a step that failed
    assert before is not None and again is not None
    assert np.array_equal(before.result()[0].bits_MW, again.result()[0].bits_MW)
    for position, token in enumerate(ids):
        committed(bank, "a", position, token)
    after = bank.begin(plan((7, ROW_SAMPLE), entered=(new(7, "a"),)))  # it was preempted, and has another slot now
    assert after is not None and ids_of(after.result()[0].bits_MW[0]) == {EOS_ID}


def test_P06_choices_of_a_request_go_their_own_ways(bank: GrammarBank, tokenizer: Tokenizer) -> None:
    open_(bank, request("a", n=2))
    entered = (new(0, "a", 0), new(1, "a", 1))
    first = bank.begin(plan((0, ROW_SAMPLE), (1, ROW_SAMPLE | ROW_FORK), entered=entered))
    assert first is not None
    bits = first.result()[0].bits_MW
    assert np.array_equal(bits[0], bits[1])
    for position, token in enumerate(tokenizer.encode("no", add_special_tokens=False)):
        committed(bank, "a", position, token, choice=1)
    second = bank.begin(plan((0, ROW_SAMPLE), (1, ROW_SAMPLE)))
    assert second is not None
    now = second.result()[0].bits_MW
    assert np.array_equal(now[0], bits[0]) and ids_of(now[1]) == {EOS_ID}


def test_P06_a_request_that_resumes_has_its_ids_behind_it(bank: GrammarBank, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes", add_special_tokens=False)
    open_(bank, request("a", emitted=ids))
    committed(bank, "a", 0, ids[0])  # told again: nothing
    job = bank.begin(plan((0, ROW_SAMPLE), entered=(new(0, "a"),)))
    assert job is not None and ids_of(job.result()[0].bits_MW[0]) == {EOS_ID}


def test_P06_emitted_ids_that_the_grammar_does_not_know_are_refused(bank: GrammarBank) -> None:
    outcome = prepare(bank, request("a", emitted=[EOS_ID, EOS_ID]))
    assert isinstance(outcome, InvalidRequestError) and "does not obey its grammar" in str(outcome)


def test_P06_a_grammar_that_cannot_be_followed_any_further_names_its_row(bank: GrammarBank) -> None:
    open_(bank, request("a"))
    open_(bank, request("b"))
    committed(bank, "a", 0, EOS_ID)  # no such output can be sampled; another engine's might
    job = bank.begin(plan((0, ROW_SAMPLE), (1, ROW_SAMPLE), entered=(new(0, "a"), new(1, "b"))))
    assert job is not None
    masks, failures = job.result()
    assert [row for row, _ in failures] == [0] and "does not obey its grammar" in failures[0][1].message
    assert (masks.bits_MW[0] == -1).all() and not (masks.bits_MW[1] == -1).all()


def test_P06_what_ended_is_let_go_and_its_slot_and_name_are_free(bank: GrammarBank) -> None:
    open_(bank, request("a"))
    assert bank.begin(plan((0, ROW_SAMPLE), entered=(new(0, "a"),))) is not None
    finished(bank, "a")
    assert bank.is_empty and bank.begin(plan((0, ROW_SAMPLE))) is None
    open_(bank, request("a"))
    assert bank.begin(plan((0, ROW_SAMPLE))) is None, "the slot was given to somebody else meanwhile"
    open_(bank, request("b"))
    assert bank.begin(plan((4, ROW_SAMPLE), entered=(new(4, "b"),))) is not None
    assert bank.begin(plan((4, ROW_SAMPLE), entered=(new(4, "plain"),))) is None


def test_grammars_are_kept_for_the_next_request_up_to_a_bound(bank: GrammarBank) -> None:
    for index in range(MAX_KEPT + 5):
        open_(bank, request(f"r{index}", compile_grammar("choice", f'["{index}"]')))
    assert len(bank._built) == MAX_KEPT
    assert isinstance(prepare(bank, request("again", CHOICE)), Matcher)


def test_P06_a_bank_that_was_closed_refuses(vocabulary: Vocabulary) -> None:
    bank = GrammarBank(vocabulary)
    bank.close()
    bank.close()
    assert isinstance(prepare(bank, request("a")), InvalidRequestError)


class PanicError(BaseException):
    """As a library in Rust raises: no Exception."""


def panic(*_: object) -> None:
    raise PanicError("inside")


def test_a_panic_while_a_grammar_is_built_is_a_refusal(bank: GrammarBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "of", panic)
    outcome = prepare(bank, request("a"))
    assert isinstance(outcome, InvalidRequestError) and outcome.param == "grammar"


def test_a_panic_while_masks_are_made_ends_one_output(bank: GrammarBank, monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = [prepare(bank, request(name)) for name in "ab"]
    assert isinstance(matchers[0], Matcher) and isinstance(matchers[1], Matcher)
    first, fill = matchers[0], Matcher.fill
    monkeypatch.setattr(Matcher, "fill", lambda self, *rest: panic() if self is first else fill(self, *rest))
    work = [(row, matcher, row, array("i")) for row, matcher in enumerate(matchers) if isinstance(matcher, Matcher)]
    masks, [(row, reason)] = bank._fill(work)
    assert row == 0 and "PanicError" in reason.message
    assert (masks.bits_MW[0] == -1).all() and not (masks.bits_MW[1] == -1).all()

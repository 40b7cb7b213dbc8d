"""Segments as bytes: torn tails at every byte, bit flips, and anything else that may stand in a file."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import Event, EventKind, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request, SamplingParams
from octavo.engine.client import finished
from octavo.engine.wire import Submit
from octavo.errors import ErrorKind
from octavo.frontend import journal_files
from octavo.frontend.journal_files import (
    VERSION,
    Began,
    Forgotten,
    Head,
    LoggedEvents,
    Opened,
    Record,
    RecordTooLargeError,
    packed,
    read_records,
)


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def sample() -> list[Record]:
    params = SamplingParams(max_tokens=9, seed=2**64 - 1, n=2, logprobs=2, stop=("é",), logit_bias=((4, -1.5),))
    request = Request("a", array("i", range(40)), params, 12.5, deadline=99.0, cache_salt=b"\xff\0", tenant="t")
    scores = [TokenLogprobs(7, -0.5, 1, (7, 8), (-0.5, float("-inf"))), None]
    admitted = Event(EventKind.ADMITTED, "a", 12.6, 1, cached_tokens=16)
    failed = finished("a", FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, "m"), time=14.0)
    return [
        Head(VERSION, 3, 2, "boot", 10.0, 1e9, "model"),
        Began(1, "t", "key-é", b"h" * 32, b"facts", 1, 12.0),
        Opened(1, 0, 4, Submit.of(0, request)),
        LoggedEvents(13.0, ids(4, 4), ids(0, 1), ids(0, 0), ids(7, 9), scores, (admitted,)),
        LoggedEvents(14.0, decisions=(finished("a", FinishReason.STOP, choice=1, stop_token_id=9), failed)),
        Forgotten(1),
    ]  # fmt: skip


RECORDS = sample()
PACKED = [packed(record) for record in RECORDS]
DATA = b"".join(PACKED)
STARTS = [sum(map(len, PACKED[:count])) for count in range(len(PACKED) + 1)]


def num_whole(num_bytes: int) -> int:
    return sum(start <= num_bytes for start in STARTS[1:])


def test_records_come_back_as_they_were() -> None:
    contents = read_records(DATA)
    assert contents.records == tuple(RECORDS) and contents.damage is None and contents.num_read == len(DATA)


def test_a_tail_torn_at_any_byte_costs_its_own_record_only() -> None:
    for cut in range(len(DATA)):
        contents = read_records(DATA[:cut])
        assert contents.records == tuple(RECORDS[: num_whole(cut)])
        assert contents.num_read == STARTS[num_whole(cut)]
        if cut in STARTS:
            assert contents.damage is None
        else:
            assert contents.damage is not None and contents.is_torn, cut


def test_a_tail_of_zeros_is_torn() -> None:
    for zeros in (1, 7, 8, 9, 4096):
        contents = read_records(DATA + bytes(zeros))
        assert contents.records == tuple(RECORDS) and contents.is_torn


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_stops_the_segment_before_its_record(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    contents = read_records(bytes(data))
    expected = num_whole(bit // 8)
    assert contents.records == tuple(RECORDS[:expected]) and contents.damage is not None
    assert contents.num_read == STARTS[expected]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_whatever_the_bytes_nothing_is_raised(data: bytes, num_before: int) -> None:
    contents = read_records(b"".join(PACKED[:num_before]) + data)
    assert contents.records[:num_before] == tuple(RECORDS[:num_before])


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_a_body_that_is_no_record_stops_the_segment(body: bytes) -> None:
    """With a right checksum: the file of another program, or of a later version."""
    head = len(body).to_bytes(4, "little") + journal_files._checksum(len(body), body).to_bytes(4, "little")
    contents = read_records(PACKED[0] + head + body + PACKED[1])
    if contents.damage is not None:
        assert contents.records == (RECORDS[0],) and not contents.is_torn


def test_sizes_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "MAX_RECORD_BYTES", 64)
    with pytest.raises(RecordTooLargeError, match="Began"):
        packed(Began(1, "t", "k", b"h" * 32, b"f" * 100, 1, 0.0))
    announced = (65).to_bytes(4, "little") + bytes(4)
    contents = read_records(announced + b"x" * 100)
    assert not contents.records and "65 bytes" in (contents.damage or "") and not contents.is_torn

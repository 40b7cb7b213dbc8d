"""Reading JSON under bounds, and the waiting room."""

import time

import pytest

from octavo.errors import QueueFullError
from octavo.server.faults import ApiError
from octavo.server.limits import parse_object
from octavo.server.waiting import WaitingRoom


def test_depth_is_counted_exactly() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        inner = "1" if opening != "[" else ""
        for depth in (63, 64):
            text = '{"a": ' + opening * (depth - 1) + inner + closing * (depth - 1) + "}"
            assert parse_object(text.encode(), 64)
        text = '{"a": ' + opening * 64 + inner + closing * 64 + "}"
        with pytest.raises(ApiError, match="64 deep"):
            parse_object(text.encode(), 64)


def test_brackets_in_strings_and_wide_bodies_are_no_depth() -> None:
    assert parse_object(b'{"a": "' + b"[" * 1000 + b'"}', 64)
    assert parse_object(b'{"a": [' + b",".join([b"[]"] * 1000) + b"]}", 64)


def test_nasty_bodies_cost_time_in_proportion() -> None:
    size = 1024 * 1024
    bodies = [
        b'{"a": [' + b",".join([b"[]"] * (size // 3)) + b"]}",
        b'{"a": [' + b",".join([b'""'] * (size // 3)) + b"]}",
        b'{"a": "' + b"\\ud83d\\ude00" * (size // 12) + b'"}',
        b"[" * size,
    ]
    begun = time.process_time()
    for body in bodies:
        try:
            parse_object(body, 64)
        except ApiError as error:
            assert error.status == 400
    assert time.process_time() - begun < 5


def test_the_waiting_room_bounds_and_gives_seats_back_once() -> None:
    room = WaitingRoom(max_waiting=2, max_running=1)
    seats = [room.enter() for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests wait"):
        room.enter()
    seats[0].leave()
    seats[0].leave()
    assert room.num_waiting == 2
    with pytest.raises(QueueFullError):
        room.enter(2)
    room.enter()
    for seat in seats:
        seat.leave()
    assert room.num_waiting == 1


def test_a_batch_larger_than_the_room_is_taken_when_it_is_alone() -> None:
    room = WaitingRoom(max_waiting=2, max_running=1)
    seat = room.enter(10)
    with pytest.raises(QueueFullError):
        room.enter()
    seat.leave()
    assert room.num_waiting == 0

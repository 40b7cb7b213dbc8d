"""Reading JSON under bounds."""

import pytest

from octavo.server.http.body import parse_object
from octavo.server.http.errors import ApiError
from octavo.server.http.limits import JsonLimits


def test_depth_is_counted_exactly() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        inner = "1" if opening != "[" else ""
        for depth in (63, 64):
            text = '{"a": ' + opening * (depth - 1) + inner + closing * (depth - 1) + "}"
            assert parse_object(text.encode(), JsonLimits())
        text = '{"a": ' + opening * 64 + inner + closing * 64 + "}"
        with pytest.raises(ApiError, match="64 deep"):
            parse_object(text.encode(), JsonLimits())


def test_brackets_in_strings_and_wide_bodies_are_no_depth() -> None:
    assert parse_object(b'{"a": "' + b"[" * 1000 + b'"}', JsonLimits())
    assert parse_object(b'{"a": [' + b",".join([b"[]"] * 1000) + b"]}", JsonLimits())


@pytest.mark.timeout(60)  # a second or so in all; what went over a body for each of its characters would take hours
def test_nasty_bodies_cost_time_in_proportion() -> None:
    size = 1024 * 1024
    bodies = [
        b'{"a": [' + b",".join([b"[]"] * (size // 3)) + b"]}",
        b'{"a": [' + b",".join([b'""'] * (size // 3)) + b"]}",
        b'{"a": "' + b"\\ud83d\\ude00" * (size // 12) + b'"}',
        b"[" * size,
    ]
    for body in bodies:
        try:
            parse_object(body, JsonLimits())
        except ApiError as error:
            assert error.status == 400

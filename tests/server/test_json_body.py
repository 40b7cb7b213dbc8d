"""The two readers of JSON agree, and both keep the rules."""

import json
import random

import pytest

from octavo.server.http.body import PatientReader, _read_quickly, parse_object
from octavo.server.http.errors import ApiError
from octavo.server.http.limits import JsonLimits

_BITS = ["[", "]", "{", "}", ",", ":", '"', " ", "\n", "1", "-", "0", ".5", "e9", "E-3", "true", "null", "NaN",
         "Infinity", '"a"', '"b":', "\\", '"\\ud83d\\ude00"', '"\\ud800"', "é", "1,2,3", "\t", "01",
         "1e999", "\x00", "٣"]  # fmt: skip


def random_value(rng: random.Random, depth: int = 4) -> object:
    kind = rng.randrange(9 if depth else 6)
    if kind < 6:
        return rng.choice([None, True, rng.randrange(-(10**20), 10**20), rng.random() * 1e9, 'é\n"\\猫🙂', ""])
    if kind == 6:
        return [rng.randrange(10**6) for _ in range(rng.choice((0, 5, 40, 300)))]
    if kind == 7:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(6))]
    return {str(i): random_value(rng, depth - 1) for i in range(rng.randrange(6))}


def random_text(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "".join(rng.choice(_BITS) for _ in range(rng.randrange(12)))
    text = json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(_BITS) + text[at + rng.randrange(3) :]
    return text


def outcome(read: object) -> object:
    try:
        return repr(read())  # type: ignore[operator]
    except (ValueError, ApiError):
        return "refused"


@pytest.mark.parametrize("seed", range(4))
def test_both_readers_take_and_refuse_the_same(seed: int) -> None:
    rng, limits = random.Random(seed), JsonLimits(max_depth=5)
    refused = 0
    for _ in range(1500):
        text = random_text(rng)
        quick = outcome(lambda text=text: _read_quickly(text, limits))
        assert quick == outcome(lambda text=text: PatientReader(text, limits).read()), text
        refused += quick == "refused"
    assert 200 < refused < 1400


def test_large_lists_of_numbers_are_read_in_runs() -> None:
    ids = list(range(300_000))
    assert parse_object(json.dumps({"prompt": ids, "x": "y"}).encode(), JsonLimits()) == {"prompt": ids, "x": "y"}
    spaced = json.dumps({"prompt": ids}, indent=1).encode()
    assert parse_object(spaced, JsonLimits()) == {"prompt": ids}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b"[]," * 70_000 + b"1]}",
        b'{"a": [' + b'"",' * 110_000 + b"1]}",
        b'{"a": [' + b"1," * 1_100_000 + b"1]}",
        b"{" + b",".join(b'"%d":1' % i for i in range(110_000)) + b"}",
    ],
    ids=["lists", "strings", "numbers", "keys"],
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="holds more than"):
        parse_object(body, JsonLimits())


def test_text_full_of_brackets_is_no_structure() -> None:
    text = "{[,]}" * 40_000
    assert parse_object(json.dumps({"prompt": text}).encode(), JsonLimits()) == {"prompt": text}


@pytest.mark.parametrize(
    "tail", [b"1]} x", b"1", b"]}", b'"\\ud800"]}', b"NaN]}", b"01]}", b"[[[[]]]]", b'{"a":1,"a":1}]}']
)
def test_the_patient_reader_refuses_what_the_quick_one_does(tail: bytes) -> None:
    body = b'{"a": [' + b"1," * 120_000 + tail
    with pytest.raises(ApiError) as caught:
        parse_object(body, JsonLimits(max_depth=4))
    assert caught.value.code == "invalid_json"

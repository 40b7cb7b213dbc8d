"""A JSON body is read as the standard library reads it, by stricter rules and within bounds."""

import json
import random
from collections.abc import Callable

import pytest

from octavo.server.http.body import parse_object
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


def strictly(text: str, max_depth: int) -> object:
    """What the standard library reads, unless a stricter rule is broken. Raises ValueError."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("repeated")
        return dict(pairs)

    def no_constant(name: str) -> object:
        raise ValueError(name)

    def depth_of(value: object) -> int:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if children is None else 1 + max(map(depth_of, children), default=0)

    value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
    if depth_of(value) > max_depth:
        raise ValueError("deep")
    return value


def outcome(read: Callable[[], object]) -> object:
    try:
        return repr(read())
    except (ValueError, ApiError):
        return "refused"


@pytest.mark.parametrize("seed", range(4))
def test_it_takes_and_refuses_what_the_standard_library_does_by_stricter_rules(seed: int) -> None:
    rng, limits = random.Random(seed), JsonLimits(max_depth=5)
    refused = 0
    for _ in range(1500):
        text = f'{{"a": {random_text(rng)}}}'
        found = outcome(lambda text=text: parse_object(text.encode(), limits))  # type: ignore[misc]
        assert found == outcome(lambda text=text: strictly(text, 5)), text  # type: ignore[misc]
        refused += found == "refused"
    assert 200 < refused < 1400


@pytest.mark.parametrize("seed", range(4))
def test_values_are_counted_exactly(seed: int) -> None:
    rng = random.Random(seed)

    def count(value: object) -> tuple[int, int]:
        """Strings, objects and lists; numbers and constants, empty lists and objects with them."""
        if isinstance(value, dict):
            inner = [count(each) for each in value.values()]
            return 1 + len(value) + sum(parts for parts, _ in inner), sum(n for _, n in inner) + (not value)
        if isinstance(value, list):
            inner = [count(each) for each in value]
            return 1 + sum(parts for parts, _ in inner), sum(n for _, n in inner) + (not value)
        return (1, 0) if isinstance(value, str) else (0, 1)

    for _ in range(300):
        value = {"a": random_value(rng), '\\"[{,:\\\\': random_value(rng)}
        body, (parts, values) = json.dumps(value).encode(), count(value)
        parse_object(body, JsonLimits(max_parts=parts, max_values=values))
        with pytest.raises(ApiError, match="holds more than"):
            parse_object(body, JsonLimits(max_parts=parts - 1, max_values=values))
        if values:
            with pytest.raises(ApiError, match="holds more than"):
                parse_object(body, JsonLimits(max_parts=parts, max_values=values - 1))


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
    "tail",
    [
        b"1]} x",
        b"1" * 400 + b"]}",
        b"0." + b"1" * 400 + b"]}",
        b"1",
        b"]}",
        b'"\\ud800"]}',
        b"NaN]}",
        b"01]}",
        b"[[[[]]]]",
        b'{"a":1,"a":1}]}',
    ],
)
def test_what_is_wrong_behind_many_numbers_is_refused(tail: bytes) -> None:
    body = b'{"a": [' + b"1," * 120_000 + tail
    with pytest.raises(ApiError) as caught:
        parse_object(body, JsonLimits(max_depth=4))
    assert caught.value.code == "invalid_json"

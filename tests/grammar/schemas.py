"""Fifty JSON schemas of growing difficulty, each with what is asked for. Their strings, arrays and numbers are bounded.

Bounded, so that a small or hot model ends by itself: nothing in them can go on for more than a few hundred tokens.
What refers to itself does so to a depth, and names that a schema does not list have a length: both are what small
models go on with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,12}$"}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 24}
LINE: Schema = {"type": "string", "maxLength": 60}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def real(low: float, high: float, step: float = 0.25) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}


def text(pattern: str, **more: object) -> Schema:
    return {"type": "string", "pattern": pattern, **more}


def of(values: list[Any]) -> Schema:
    return {"enum": values}


def listed(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def made(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object of these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def formatted(name: str, **more: object) -> Schema:
    return {"type": "string", "format": name, **more}


def _nested(depth: int) -> Schema:
    inner: Schema = made(leaf=WORD)
    for level in range(depth):
        inner = made(**{f"level{depth - level}": inner, "size": whole(0, 9)})
    return inner


def _levels(depth: int, level: Callable[[Schema], Schema]) -> Schema:
    """A schema that refers to itself, to a depth: each level to the next, the last one to a number."""
    tables = {f"level{number}": level(ref(f"level{number + 1}")) for number in range(depth)}
    return {"$defs": {**tables, f"level{depth}": whole(0, 9)}, "$ref": "#/$defs/level0"}


_ADDRESS = made(street=LINE, number=whole(1, 999), city=NAME, postcode=text("^[0-9]{5}$"))
_CIRCLE = made(shape={"const": "circle"}, radius=real(0, 100))
_SQUARE = made(shape={"const": "square"}, side=real(0, 100))
_MONEY = made(amount=real(0, 10000, 0.01), currency=of(["EUR", "USD", "JPY", "£"]))
_STEP = made(("note",), action=of(["add", "stir", "heat", "wait"]), minutes=whole(0, 120), note=LINE)
_OPERATORS = of(["+", "-", "*", "/"])

SCHEMAS: list[tuple[str, Schema]] = [
    # One value.
    ("yes or no", BOOL),
    ("a month by its number", whole(1, 12)),
    ("a temperature in degrees", real(-40, 60, 0.5)),
    ("one colour of the rainbow", of(["red", "orange", "yellow", "green", "blue", "violet"])),
    ("always the same", {"const": {"version": 2, "tags": ["a", "b"], "ratio": 0.5, "none": None}}),
    ("a short greeting", {"type": "string", "minLength": 3, "maxLength": 40}),
    ("a licence plate", text("^[A-Z]{1,3}-[A-Z]{1,2} [0-9]{1,4}$")),
    ("a number, a word or nothing", either(whole(-99, 99), WORD, NULL)),
    ("three prime numbers", listed(whole(2, 97), 3, 3)),
    ("a greeting in Greek or Japanese", of(["Καλημέρα", "こんにちは", "γεια \"σου\"\n", "👋🏽"])),
    # Formats.
    ("a date in history", formatted("date")),
    ("a time of day", formatted("time")),
    ("a moment in time", formatted("date-time")),
    ("an identifier", formatted("uuid")),
    ("an address in a network", formatted("ipv4")),
    ("an address in a newer network", formatted("ipv6")),
    ("somebody's e-mail", formatted("email", maxLength=40)),
    ("a host's name", formatted("hostname", maxLength=30)),
    ("a hexadecimal colour", text("^#[0-9a-f]{6}$")),
    ("a date of this century", formatted("date", pattern="^20")),
    # Objects.
    ("a person", made(name=NAME, age=whole(0, 120))),
    ("a city", made(("river",), name=NAME, country=NAME, capital=BOOL, river=NAME)),
    ("a book", made(title=LINE, author=NAME, year=whole(1450, 2030), genres=listed(WORD, 1, 3))),
    ("where somebody lives", made(name=NAME, address=_ADDRESS)),
    ("the weather", made(place=NAME, celsius=real(-40, 50, 0.5), sky=of(["clear", "cloudy", "rain", "snow", None]))),
    ("scores by player", {"type": "object", "properties": {"anna": whole(0, 100)}, "required": ["anna"],
                          "patternProperties": {"^[b-z][a-z]{1,9}$": whole(0, 100)}, "additionalProperties": False,
                          "maxProperties": 4}),
    ("settings by name", {"type": "object", "patternProperties": {"^[a-z]{1,8}$": either(BOOL, whole(0, 9))},
                          "additionalProperties": False, "maxProperties": 4}),
    ("a box in a box", _nested(4)),
    ("all optional", made(tuple("abcdefgh"), **{name: whole(0, 9) for name in "abcdefgh"})),
    ("keys that are hard to write", made(**{"a \"b\"": BOOL, "ключ": WORD, "x/y~z": NULL, "": whole(0, 1),
                                           "😀": of(["😀", "\\", "\t"])})),
    # Choices between objects.
    ("a circle or a square", either(_CIRCLE, _SQUARE)),
    ("exactly one of two shapes", {"oneOf": [_CIRCLE, _SQUARE]}),
    ("a reply or an error", {"oneOf": [made(ok={"const": True}, value=WORD),
                                       made(ok={"const": False}, error=LINE, code=whole(400, 599))]}),
    ("a payment", {"$defs": {"Card": made(kind={"const": "card"}, digits=text("^[0-9]{4}$"), until=formatted("date")),
                             "Transfer": made(kind={"const": "transfer"}, iban=text("^[A-Z]{2}[0-9]{6,12}$")),
                             "Cash": made(kind={"const": "cash"}, given=_MONEY)},
                   "oneOf": [ref("Card"), ref("Transfer"), ref("Cash")]}),
    ("a name and more of it", {"allOf": [
        {"type": "object", "properties": {"first": NAME}, "required": ["first"]},
        {"type": "object", "properties": {"last": NAME}, "required": ["last"]},
        {"type": "object", "properties": {"first": True, "last": True}, "additionalProperties": False}]}),
    # Arrays.
    ("points of a line", listed({"type": "array", "prefixItems": [whole(-99, 99), whole(-99, 99)], "items": False,
                                 "minItems": 2}, 2, 4)),
    ("a chess board's corner", listed(listed(of(["", "♟", "♜", "♞"]), 3, 3), 3, 3)),
    ("a mixed list", listed(either(WORD, whole(-9, 9), BOOL, NULL, listed(whole(0, 9), 0, 3)), 2, 6)),
    ("a recipe", made(title=NAME, serves=whole(1, 12), steps=listed(_STEP, 2, 4))),
    ("a bill", made(number=text("^R-[0-9]{4}$"), issued=formatted("date"),
                    lines=listed(made(item=NAME, count=whole(1, 99), price=_MONEY), 1, 3), paid=BOOL)),
    # References and recursion.
    ("two people who know each other", {"$defs": {"person": made(name=NAME, mail=formatted("email", maxLength=30))},
                                        **made(one=ref("person"), other=ref("person"))}),
    ("a sum of three levels", {"$defs": {
        "leaf": whole(0, 99),
        "low": made(left=ref("leaf"), operator=_OPERATORS, right=ref("leaf")),
        "high": made(left=either(ref("low"), ref("leaf")), operator=_OPERATORS, right=either(ref("low"), ref("leaf")))},
        "$ref": "#/$defs/high"}),
    ("a folder of two levels", {"$defs": {
        "file": made(file=WORD, bytes=whole(0, 99999)),
        "inner": made(folder=WORD, files=listed(ref("file"), 0, 2)),
        "outer": made(folder=WORD, content=listed(either(ref("file"), ref("inner")), 0, 3))},
        "$ref": "#/$defs/outer"}),
    ("a chain that may end anywhere", _levels(6, lambda inner: made(("next",), id=whole(0, 9), next=inner))),
    ("a tree of expressions", _levels(3, lambda inner: either(
        whole(0, 99), made(operator=_OPERATORS, of=listed(inner, 2, 2))))),
    # All together.
    ("an event for a calendar", made(("place", "guests"), title=NAME, begins=formatted("date-time"),
                                     minutes=of([15, 30, 45, 60, 90]), place=either(_ADDRESS, NULL),
                                     guests=listed(formatted("email", maxLength=24), 0, 3))),
    ("a log entry", made(("trace",), at=formatted("date-time"), level=of(["debug", "info", "warning", "error"]),
                         source=formatted("ipv4"), trace=formatted("uuid"), message={**LINE, "minLength": 5})),
    ("a patient's record", made(("allergies",), id=formatted("uuid"), born=formatted("date", pattern="^19"),
                                blood=of(["0", "A", "B", "AB"]), height=real(0.5, 2.25), allergies=listed(WORD, 0, 4),
                                visits=listed(made(on=formatted("date"), reason=LINE, cost=_MONEY), 0, 2))),
    ("an order", {"$defs": {"address": _ADDRESS, "money": _MONEY,
                            "line": made(("discount",), sku=text("^[A-Z0-9]{4}-[A-Z0-9]{4}$"), count=whole(1, 20),
                                         price=ref("money"), discount=real(0, 1))},
                  **made(("ship_to",), id=formatted("uuid"), bill_to=ref("address"), ship_to=ref("address"),
                         lines=listed(ref("line"), 1, 2), status=of(["new", "paid", "sent", "closed"]))}),
    ("a configuration", {"$defs": {"port": whole(1, 65535), "host": either(formatted("ipv4"),
                                                                            formatted("hostname", maxLength=20))},
                         **made(("tls", "extra"), listen=listed(made(host=ref("host"), port=ref("port")), 1, 2),
                                tls={"oneOf": [NULL, made(certificate=text("^/[a-z/]{1,20}[.]pem$"),
                                                          versions=listed(of(["1.2", "1.3"]), 1, 2))]},
                                extra={"type": "object", "additionalProperties": False, "maxProperties": 2,
                                       "patternProperties": {"^x-[a-z]{1,8}$": either(WORD, BOOL, whole(0, 9))}})}),
]  # fmt: skip

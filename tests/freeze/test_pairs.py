"""What a server answers is what it answered when the pairs were frozen; pairs has the rules and the command."""

from tests.freeze.pair_cases import groups
from tests.freeze.pairs import differences, read_pairs, run_groups


def test_every_answer_is_the_frozen_one() -> None:
    told = differences(read_pairs(), run_groups(groups()))
    assert not told, "\n".join(told)


def test_a_changed_status_header_field_and_event_are_found() -> None:
    pair = {"status": 200, "headers": {"allow": "GET"}, "body": {"code": None}, "events": {"list": [{"data": "x"}]}}
    changed = {"status": 400, "headers": {}, "body": {"code": "x", "more": 1}, "events": {"list": []}}
    told = differences({"one": pair, "gone": pair}, {"one": changed, "new": pair})
    assert [line.split(" was ")[0] for line in told] == [
        "gone: no longer asked",
        "new: not frozen yet; --write",
        "one: .status",
        "one: .headers.allow",
        "one: .body.code",
        "one: .body.more",
        "one: .events.list",
    ]

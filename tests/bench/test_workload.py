"""Workload files and drawn workloads; percentiles; the floor."""

from __future__ import annotations

import gzip
import json

import pytest

from octavo.bench.offline import StepFloor
from octavo.bench.report import percentile, spread_ms
from octavo.bench.workload import draw_workload, read_workload
from octavo.errors import ConfigError


def _item(*ids, max_tokens=3):
    return {"prompt_token_ids": list(ids), "max_tokens": max_tokens}


def test_a_list_of_requests_is_one_group(tmp_path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([_item(1, 2), _item(3, max_tokens=5)]))
    workload = read_workload(path)
    assert [len(group) for group in workload.groups] == [2]
    assert (workload.num_requests, workload.num_prompt_tokens, workload.num_output_tokens) == (2, 3, 8)
    assert workload.max_len == 6
    assert workload.name == "w.json"


def test_a_file_may_be_compressed(tmp_path) -> None:
    path = tmp_path / "w.json.gz"
    path.write_bytes(gzip.compress(json.dumps([_item(1, 2)]).encode()))
    assert read_workload(path).num_prompt_tokens == 2
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a gzip file"):
        read_workload(path)


def test_lists_of_lists_are_groups(tmp_path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([[_item(1)], [_item(2), _item(3)]]))
    assert [len(group) for group in read_workload(path).groups] == [1, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "JSON"),
        ("{}", r"Expected `array`, got `object` - at `\$\[0\]`"),
        ("[]", r"`array` of length >= 1 - at `\$\[0\]`"),
        ("[1]", r"Expected `object`, got `int` - at `\$\[0\]\[0\]`"),
        ("[[]]", r"`array` of length >= 1 - at `\$\[0\]`"),
        ('[{"prompt_token_ids": [], "max_tokens": 1}]', r"length >= 1 - at `\$\[0\]\[0\].prompt_token_ids`"),
        ('[{"prompt_token_ids": [1, -1], "max_tokens": 1}]', r">= 0 - at `\$\[0\]\[0\].prompt_token_ids\[1\]`"),
        ('[{"prompt_token_ids": [1], "max_tokens": 0}]', r"`int` >= 1 - at `\$\[0\]\[0\].max_tokens`"),
        (
            '[{"prompt_token_ids": [1], "max_token": 5}]',
            "unknown field `max_token`",
        ),
        ('[{"prompt_token_ids": [1], "max_tokens": true}]', "Expected `int`, got `bool`"),
    ],
)
def test_bad_files_name_the_entry(tmp_path, content, reason) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"workload .*w.json is not .*{reason}"):
        read_workload(path)


def test_missing_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "none.json")


def test_drawn_workload_depends_on_the_seed_alone() -> None:
    first, again = draw_workload(2, 4, 5, 100, 7), draw_workload(2, 4, 5, 100, 7)
    assert first == again
    assert first != draw_workload(2, 4, 5, 100, 8)
    assert (first.num_requests, first.num_prompt_tokens, first.num_output_tokens) == (2, 8, 10)
    assert all(0 <= token < 100 for item in first.groups[0] for token in item.prompt_token_ids)


@pytest.mark.parametrize(("point", "value"), [(0, 1), (50, 5), (90, 9), (99, 10), (100, 10)])
def test_percentile_is_nearest_rank(point, value) -> None:
    assert percentile(reversed(range(1, 11)), point) == value


def test_no_values_have_percentile_zero() -> None:
    assert spread_ms([]) == {"p50": 0.0, "p90": 0.0, "p95": 0.0, "p99": 0.0}


def test_floor_is_the_larger_of_memory_and_arithmetic_plus_cache() -> None:
    floor = StepFloor(100.0, 1000.0, 200, 500, 10)
    assert floor.seconds(1, 0) == 2.0
    assert floor.seconds(8, 0) == 4.0
    assert floor.seconds(8, 50) == 9.0

"""tools.paired: the figures it finds, and the interval of a ratio."""

import sys
from pathlib import Path

import pytest
from tools.paired import compare, interval, read_json, values_under


def test_the_figures_under_a_key_are_found_in_order_however_deep() -> None:
    found = read_json('a table\n{"rows": [{"us": 1}, {"us": 2.5, "in": {"us": 3}}], "us": "x"}\n')
    assert list(values_under(found, "us")) == [1.0, 2.5, 3.0]
    assert read_json('{\n"us": 4\n}') == {"us": 4}


def test_the_interval_holds_the_median_and_is_wide_where_ratios_are() -> None:
    low, high = interval([1.0 + index / 100 for index in range(-5, 5)])
    assert 0.95 <= low < 0.995 < high <= 1.04
    assert interval([1.1] * 10) == (1.1, 1.1)


def test_a_slower_tree_is_found_slower(tmp_path: Path) -> None:
    for name, number in (("before", 2.0), ("after", 3.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "figure.py").write_text(f"print('noise')\nprint('{{\"us\": {number}}}')")
    trees = str(tmp_path / "before"), str(tmp_path / "after")
    found = compare([sys.executable, "-m", "figure"], *trees, ["us"], 4)
    assert found["us[0]"] == pytest.approx({"base": 2.0, "now": 3.0, "ratio": 1.5, "low": 1.5, "high": 1.5})

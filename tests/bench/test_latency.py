"""Points of a curve on the fake model, and the charts drawn of them."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET

import pytest
from tests.bench.test_offline import _engine

from octavo.bench.latency import COLUMNS, LoadShape, draw_sweep, make_point, point_row
from octavo.bench.offline import OfflineBench, StepFloor

FLOOR = StepFloor(1e9, 1e9, 10**6, 10**5, 1)


def _points(shapes, runs=2):
    async def work():
        (client, recorder, capacity), counts = _engine(), []
        bench, points = OfflineBench(client, recorder, capacity.num_slots), []
        try:
            for shape in shapes:
                workloads = shape.workloads(capacity.vocab_size, runs)
                records = [await bench.run(workload, counts.append) for workload in workloads]
                points.append(make_point(shape, records, FLOOR, 32))
        finally:
            await client.close()
        return points, sum(counts)

    return asyncio.run(work())


def test_a_point_is_the_median_run_beside_its_floor() -> None:
    points, num_tokens = _points([LoadShape(1, 20, 6), LoadShape(4, 8, 6)])
    assert num_tokens == 2 * (6 + 24)
    for point, rows in zip(points, (1, 4), strict=True):
        assert point["at_once"] == rows
        assert point["output_tokens_per_s"] > 0 and point["ttft_ms"] > 0 and point["step_ms"] > 0
        assert 0 <= point["host_ms"] <= point["step_ms"]
        assert point["floor_fraction"] == pytest.approx(point["floor_ms"] / point["step_ms"], rel=1e-2)
        assert point["floor_ms"] >= 1.0, "a millisecond to read the weights"
        assert len(point_row(point)) == len(COLUMNS)


def test_the_floor_of_the_first_token_counts_steps_and_their_arithmetic() -> None:
    points, _ = _points([LoadShape(1, 20, 2), LoadShape(3, 20, 2)], runs=1)
    assert points[0]["ttft_floor_ms"] == pytest.approx(2.0), "20 tokens at 0.1 ms each"
    assert points[1]["ttft_floor_ms"] == pytest.approx(4.2), "40 tokens until the median one: 32, then 8"


def test_one_token_requests_have_no_decode_steps() -> None:
    (point,), _ = _points([LoadShape(1, 5, 1)], runs=1)
    assert point["step_ms"] is None and point_row(point)[-1] == ""


def test_the_picture_of_a_sweep_has_each_curve_beside_its_floor() -> None:
    points, _ = _points([LoadShape(1, 20, 6), LoadShape(4, 8, 6)])
    text = draw_sweep({"rows": points, "contexts": points})
    root = ET.fromstring(text)
    lines = [node.attrib["class"] for node in root.iter() if "line" in node.attrib.get("class", "").split()]
    assert lines == ["line", "line dash"] * 2 and text == draw_sweep({"rows": points, "contexts": points})

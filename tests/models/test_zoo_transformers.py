"""Model types of zoo_transformers.py, and native types by choice, through the transformers backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.ops import cpu
from tests.models import zoo_checks
from tests.models.zoo import ROWS, ModelType
from tests.models.zoo_checks import ServedModel, TinyModel
from tests.models.zoo_transformers import TRANSFORMERS_DENSE
from tests.quick import one_in


@pytest.fixture(scope="module", params=TRANSFORMERS_DENSE, ids=lambda row: row.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    served = ServedModel(TinyModel(request.param, tmp_path_factory.mktemp("model")), "transformers")
    yield served
    served.close()


def test_X01_X03_X04_logits_of_every_position_equal_those_of_transformers_alone(served: ServedModel) -> None:
    zoo_checks.check_facts(served)
    zoo_checks.record(served.tiny.row.name, {"difference": zoo_checks.check_logits(served)})


def test_X01_S02_K02_greedy_text_in_chunks_and_from_the_prefix_cache(served: ServedModel) -> None:
    zoo_checks.check_chunks_and_prefix_hits(served)


@pytest.mark.slow  # what it adds to chunks is the scheduler's, and native types have it in the quick suite
def test_X01_S07_greedy_text_of_preempted_requests(served: ServedModel) -> None:
    zoo_checks.check_preemption(served)


def test_X01_P07_greedy_text_with_drafts(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo_checks.check_speculation(served, monkeypatch)


def test_X04_logits_alone_are_near_those_in_a_batch_and_in_chunks(served: ServedModel) -> None:
    zoo_checks.record(served.tiny.row.name, {"bits": zoo_checks.compare_bits(served)})


@pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")
@pytest.mark.parametrize("code", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_X01_X07_quantised_logits_are_near(served: ServedModel, code: str) -> None:
    zoo_checks.record(served.tiny.row.name, {code: zoo_checks.check_quantization(served.tiny, code, "transformers")})


@pytest.mark.parametrize("row", one_in(3, ROWS), ids=lambda row: row.name)
def test_X01_native_types_through_transformers_by_choice(row: ModelType, tmp_path: Path) -> None:
    served = ServedModel(TinyModel(row, tmp_path, has_text=False), "transformers")
    assert served.capacity.decoder == "transformers"
    zoo_checks.check_logits(served)
    served.close()

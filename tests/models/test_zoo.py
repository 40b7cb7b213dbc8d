"""Every model type of tests/models/zoo.py against transformers.

With OCTAVO_WRITE_TABLES set, in one process, the results are written to where tools/models.py reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.ops import cpu
from tests.models import zoo_checks
from tests.models.zoo import ROWS
from tests.models.zoo_checks import ServedModel, TinyModel


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(tiny: TinyModel) -> Iterator[ServedModel]:
    served = ServedModel(tiny)
    yield served
    served.close()


def test_X01_X03_X04_logits_of_every_position_equal_transformers(served: ServedModel) -> None:
    zoo_checks.check_facts(served)
    zoo_checks.record(served.tiny.row.name, {"difference": zoo_checks.check_logits(served)})


def test_X01_S02_K02_greedy_text_in_chunks_and_from_the_prefix_cache(served: ServedModel) -> None:
    zoo_checks.check_chunks_and_prefix_hits(served)


def test_X01_S07_greedy_text_of_preempted_requests(served: ServedModel) -> None:
    zoo_checks.check_preemption(served)


def test_X01_P07_greedy_text_with_drafts(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo_checks.check_speculation(served, monkeypatch)


def test_X04_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(served: ServedModel) -> None:
    zoo_checks.record(served.tiny.row.name, {"bits": zoo_checks.compare_bits(served)})


def test_X04_threads_change_no_bit(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if served.capacity.decoder != "native":
        pytest.skip("torch divides the work")
    zoo_checks.check_threads(served, monkeypatch)


def test_X04_logits_of_the_torch_twin(tiny: TinyModel) -> None:
    served = ServedModel(tiny, "torch")
    zoo_checks.check_logits(served)
    served.close()


@pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")
@pytest.mark.parametrize("code", ["int8", "int4"])
def test_X01_X07_quantised_logits_are_near(tiny: TinyModel, code: str) -> None:
    zoo_checks.record(tiny.row.name, {code: zoo_checks.check_quantization(tiny, code)})


def test_X01_X08_logits_of_two_ranks(tiny: TinyModel) -> None:
    zoo_checks.record(tiny.row.name, {"ranks": zoo_checks.check_ranks(tiny) or "yes"})

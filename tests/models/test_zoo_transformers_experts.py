"""Mixtures of experts of zoo_transformers.py: the tests of test_zoo_transformers.py, with other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.test_zoo_transformers import (
    test_X01_P07_greedy_text_with_drafts,
    test_X01_S02_K02_greedy_text_in_chunks_and_from_the_prefix_cache,
    test_X01_S07_greedy_text_of_preempted_requests,
    test_X01_X03_X04_logits_of_every_position_equal_those_of_transformers_alone,
    test_X01_X07_quantised_logits_are_near,
    test_X04_logits_alone_are_near_those_in_a_batch_and_in_chunks,
)
from tests.models.zoo_checks import ServedModel, TinyModel
from tests.models.zoo_transformers import TRANSFORMERS_EXPERTS

__all__ = [  # collected here too, with the fixture of this file
    "test_X01_P07_greedy_text_with_drafts",
    "test_X01_S02_K02_greedy_text_in_chunks_and_from_the_prefix_cache",
    "test_X01_S07_greedy_text_of_preempted_requests",
    "test_X01_X03_X04_logits_of_every_position_equal_those_of_transformers_alone",
    "test_X01_X07_quantised_logits_are_near",
    "test_X04_logits_alone_are_near_those_in_a_batch_and_in_chunks",
]


@pytest.fixture(scope="module", params=TRANSFORMERS_EXPERTS, ids=lambda row: row.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    served = ServedModel(TinyModel(request.param, tmp_path_factory.mktemp("model")), "transformers")
    yield served
    served.close()

"""A tiny model's tokenizer, as a vocabulary that is wider than it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

MORE = 37  # ids of the model that the tokenizer lacks


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_tiny_model("llama3", tmp_path_factory.mktemp("grammar") / "llama3"))


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Iterator[Vocabulary]:
    yield Vocabulary(lambda: tokenizer, VOCAB_SIZE + MORE)

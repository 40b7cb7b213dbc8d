"""The default model's text side, read once."""

import pytest
from tokenizers import pre_tokenizers

from octavo.artifacts.resolve import find_wheel_model
from octavo.text.text_model import TextModel


@pytest.fixture(scope="session")
def default_files():
    files = find_wheel_model()
    if files is None:
        pytest.skip("needs the default model")
    return files


@pytest.fixture(scope="session")
def default_model(default_files):
    return TextModel.load(default_files)


@pytest.fixture(scope="session")
def transformers_tokenizer(default_files):
    """transformers' own conversion of the default model's GGUF file, with the one step it leaves out.

    This family cuts out each digit before the pattern is applied; everything else is the conversion's own.
    """
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoTokenizer.from_pretrained(default_files.root, gguf_file=default_files.weights[0].name)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made

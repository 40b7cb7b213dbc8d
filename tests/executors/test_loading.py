"""The choice of a decoder: where the transformers decoder is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import find_wheel_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.executors.loading import DecoderChoice
from octavo.nn.parallel import Parallel

CHOSEN = ExecutionConfig(decoder="transformers", device="cpu")


def test_X01_the_transformers_decoder_is_refused_where_it_cannot_run() -> None:
    files = find_wheel_model()
    spec = read_model_spec(files)
    with pytest.raises(ConfigError, match="reads folders of safetensors"):
        DecoderChoice(files, spec, CHOSEN, ModelConfig())
    with pytest.raises(ConfigError, match="cannot be divided among ranks"):
        DecoderChoice(files, spec, CHOSEN, ModelConfig(), Parallel())


def test_X01_other_decoders_are_refused_for_a_model_without_a_native_family() -> None:
    files = find_wheel_model()
    spec = replace(
        read_model_spec(files), path="transformers", path_reason="model_type 'x' has no native implementation"
    )
    with pytest.raises(ConfigError, match="decoder is 'native', but model_type 'x' has no native implementation"):
        DecoderChoice(files, spec, ExecutionConfig(decoder="native", device="cpu"), ModelConfig())

"""A Llama-like model is one entry: two families are removed, added by an entry, and loaded from both formats.

The models are tiny random ones of transformers; the GGUF files have the names of the gguf package's own tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from transformers import AutoModelForCausalLM, GemmaConfig, Phi3Config, PreTrainedConfig

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.family import Family, TensorName, Windows
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ModelFileError
from octavo.executors.torch_executor import TorchExecutor
from octavo.models.native_decoder import NativeDecoder
from tests.models.dense_backend import all_logits, load_decoder
from tests.models.test_decoder import TOLERANCE, prompt, reference_logits
from tests.models.test_native_decoder import SPEC, Probe
from tests.source_tree import ROOT
from tests.tiny_gguf import write_out
from tests.tiny_models import VOCAB_SIZE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip

# Begin of the worked examples of docs/extending.md.
PHI3 = Family(
    "phi3",
    tensors={  # several roles in one tensor: their rows follow each other
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), TensorName("self_attn.qkv_proj", "attn_qkv")),
        **dict.fromkeys(("gate_proj", "up_proj"), TensorName("mlp.gate_up_proj", "ffn_up")),
    },
    has_rotary_pairs=False,
    windows=Windows.ALL,
)
GEMMA = Family(
    "gemma",
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    has_rotary_pairs=False,
    activation="gelu_tanh",
    norm_offset=1.0,
    scales_embedding=True,
)
# End of the worked examples.

MODELS: dict[str, tuple[Family, PreTrainedConfig, MODEL_ARCH]] = {
    "phi3": (PHI3, Phi3Config(**SIZES, sliding_window=16, tie_word_embeddings=False), MODEL_ARCH.PHI3),
    "gemma": (GEMMA, GemmaConfig(**SIZES, head_dim=32), MODEL_ARCH.GEMMA),
}


class NewModel:
    """A model of a new family as a folder and as a GGUF file, with its logits by transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family, config, arch = MODELS[name]
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(0.2 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
                if parameter.dim() == 1 and not self.family.norm_offset:
                    parameter.add_(1.0)
        self.folder, self.gguf = folder / name, folder / f"{name}.gguf"
        model.save_pretrained(self.folder)
        _write_gguf(self.gguf, model, config, arch, self.family.norm_offset)
        self.rows = [prompt(60), prompt(1, 2), prompt(33, 3)]
        self.expected = [reference_logits(model, row) for row in self.rows]


def _write_gguf(path: Path, model: torch.nn.Module, config: PreTrainedConfig, arch: MODEL_ARCH, offset: float) -> None:
    """Write the model as llama.cpp's conversion does."""
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    writer = GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name not in tied:
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            added = offset if name.endswith("norm.weight") else 0.0
            writer.add_tensor(gguf_name, np.ascontiguousarray((tensor + added).numpy()))
    write_out(writer)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewModel:
    return NewModel(request.param, tmp_path_factory.mktemp("new"))


@pytest.fixture
def added(model: NewModel, monkeypatch: pytest.MonkeyPatch) -> NewModel:
    monkeypatch.setitem(FAMILIES, model.family.name, model.family)
    return model


def test_the_documents_have_these_entries_and_every_family() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    examples = source.split("# Begin of the worked examples of docs/extending.md.\n")[1].split("# End of")[0]
    assert examples.replace("PHI3 = ", "").replace("GEMMA = ", "") in (ROOT / "docs/extending.md").read_text("utf-8")
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    for family in FAMILIES.values():
        assert f"`{family.model_type or family.name}`" in page, f"add {family.name} to docs/models.md"


def test_without_its_entry_a_folder_runs_through_transformers_and_a_gguf_file_is_refused(
    model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, model.family.name)
    spec = read_model_spec(resolve_model(str(model.folder)))
    assert spec.path == "transformers" and "has no native implementation" in spec.path_reason
    with pytest.raises(ModelFileError, match="is not supported; supported families: llama, "):
        read_model_spec(resolve_model(str(model.gguf)))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_one_entry_gives_the_logits_of_transformers(added: NewModel, kind: str) -> None:
    path = getattr(added, kind)
    for logits, expected in zip(all_logits(load_decoder(path), added.rows), added.expected, strict=True):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_and_of_the_kernels(added: NewModel, kind: str) -> None:
    probe = Probe(getattr(added, kind), "native", dtype="float32")
    assert isinstance(probe.decoder, NativeDecoder)
    for logits, expected in zip(probe.all_logits(added.rows), added.expected, strict=True):
        torch.testing.assert_close(logits, expected[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_memory_is_planned_from_the_entry_alone(added: NewModel, kind: str) -> None:
    files = resolve_model(str(getattr(added, kind)))
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), ModelConfig(dtype="float32"))
    try:
        assert executor.open(SPEC).num_blocks
    finally:
        executor.close()

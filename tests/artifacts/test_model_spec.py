import contextlib
import json
import math
import random

import numpy as np
import pytest
from tests.artifacts.gguf_writing import write_gguf, write_llama

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.model_spec import RopeScaling
from octavo.artifacts.read_spec import read_gguf_spec, read_hf_spec, read_model_spec
from octavo.artifacts.resolve import ModelFiles, find_wheel_model
from octavo.errors import ModelFileError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path):
    def read(generation=None, **overrides):
        config = {key: value for key, value in {**BASE, **overrides}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_hf_spec(tmp_path)

    return read


@pytest.fixture
def read_gguf(tmp_path):
    return lambda arch="llama", tensors=(), **overrides: read_gguf_spec(
        [GGUFFile.open(write_llama(tmp_path / "m.gguf", arch, tensors, **overrides))]
    )


def test_a_plain_llama(read):
    spec = read()
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("llama", 300, 64, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (4, 2, 16, 96)
    assert (spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling, spec.max_model_len) == (1e-5, 10000.0, None, 256)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2,), 1, "bfloat16")
    assert not (spec.tie_word_embeddings or spec.biases or spec.qk_norm or spec.layer_windows)


def test_families_differ_in_bias_norm_window_and_head_size(read):
    assert read(model_type="qwen2", sliding_window=128, use_sliding_window=False).biases == ("qkv",)
    assert read(model_type="qwen2", sliding_window=128).layer_windows == ()
    qwen3 = read(model_type="qwen3", head_dim=32)
    assert (qwen3.qk_norm, qwen3.biases, qwen3.head_dim) == (True, (), 32)
    assert read(model_type="mistral", sliding_window=64).layer_windows == (64, 64)
    assert read(model_type="mistral").layer_windows == ()
    assert read(sliding_window=64).layer_windows == ()  # llama has none, whatever the file says
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(tie_word_embeddings=True).tie_word_embeddings


def test_K07_windows_of_some_layers_only(read):
    qwen = {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}
    assert read(**qwen, max_window_layers=0).layer_windows == (32, 32)
    assert read(**qwen, max_window_layers=2).layer_windows == ()
    assert read(**qwen, max_window_layers=1).layer_windows == (None, 32)
    mixed = ["full_attention", "sliding_attention"]
    assert read(**qwen, layer_types=mixed[::-1]).layer_windows == (32, None)
    assert read(**qwen, layer_types=["full_attention"] * 2).layer_windows == ()
    assert [read(**qwen, max_window_layers=1).window_of(layer) for layer in (0, 1)] == [None, 32]
    assert read().window_of(1) is None
    for bad in (mixed[:1], [*mixed, "full_attention"], ["chunked_attention"] * 2, "full_attention"):
        with pytest.raises(ModelFileError, match="layer_types"):
            read(**qwen, layer_types=bad)
    with pytest.raises(ModelFileError, match="mix of full and sliding"):
        read(model_type="mistral", sliding_window=32, layer_types=mixed)
    with pytest.raises(ModelFileError, match="sliding_window is 0"):
        read(model_type="mistral", sliding_window=0)


def test_X01_gemma3_from_old_and_new_configurations(read):
    gemma = {"model_type": "gemma3_text", "hidden_act": None, "num_hidden_layers": 7, "sliding_window": 16}
    old = read(**gemma, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert read(**gemma, rope_parameters=new) == old
    assert (old.rope_theta, old.sliding_rope_theta, old.rope_scaling) == (5e5, 2e4, RopeScaling("linear", 8.0))
    assert (old.family, old.layer_windows) == ("gemma3", (16,) * 5 + (None, 16))
    assert (old.head_dim, old.attention_scale, old.tie_word_embeddings, old.qk_norm) == (256, 256.0**-0.5, True, True)
    plain = read(**gemma, sliding_window_pattern=2, query_pre_attn_scalar=168)
    assert plain.layer_windows == (16, None, 16, None, 16, None, 16)
    assert (plain.rope_theta, plain.sliding_rope_theta, plain.attention_scale) == (1e6, 1e4, 168.0**-0.5)
    assert read(**gemma, final_logit_softcapping=30.0).logits_soft_cap == 30.0
    assert read(**gemma, layer_types=["full_attention"] * 7).layer_windows == ()
    for bad, word in (
        ({"final_logit_softcapping": -30.0}, "logits_soft_cap"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "tanh"}, "hidden_activation 'tanh'"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"query_pre_attn_scalar": 0}, "attention_scale"),
        ({"rope_local_base_freq": 0}, "sliding_rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "of sliding layers"),
        ({"rope_parameters": {"full_attention": [1]}}, "rope parameters"),
    ):
        with pytest.raises(ModelFileError, match=word):
            read(**gemma, **bad)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_in_old_and_new_spelling(read, key):
    spec = read(**{key: {**LLAMA3, "rope_theta": 500000.0}})
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert read(**{key: {"type": "linear", "factor": 2.0}}).rope_scaling == RopeScaling("linear", 2.0)
    assert read(**{key: {"rope_type": "default", "rope_theta": 7.0}}).rope_scaling is None
    assert read(rope_theta=9.0, **{key: {"rope_type": "default"}}).rope_theta == 9.0
    assert read(**{key: {"rope_type": "dynamic", "factor": 2.0}}).rope_scaling == RopeScaling("dynamic", 2.0)
    with pytest.raises(ModelFileError, match="rope scaling 'proportional' is not supported"):
        read(**{key: {"rope_type": "proportional", "factor": 2.0}})
    for bad in (
        {"factor": 0.0},
        {"factor": float("nan")},
        {"factor": "x"},
        {"high_freq_factor": 1.0},
        {"original_max_position_embeddings": 0},
    ):
        with pytest.raises(ModelFileError, match="factor"):
            read(**{key: LLAMA3 | bad})


def test_yarn_and_longrope(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = read(rope_scaling=yarn).rope_scaling
    assert (spec.kind, spec.factor, spec.original_max_len, spec.beta_fast, spec.truncate) == ("yarn", 4.0, 64, 32, True)
    assert spec.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    scales = {"mscale": 1.0, "mscale_all_dim": 0.8}
    expected = (0.1 * math.log(4.0) + 1.0) / (0.08 * math.log(4.0) + 1.0)
    assert read(rope_scaling=yarn | scales).rope_scaling.attention_factor == pytest.approx(expected)
    assert not read(rope_scaling=yarn | {"truncate": False}).rope_scaling.truncate
    long = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = read(rope_scaling=long, original_max_position_embeddings=64).rope_scaling
    assert (spec.kind, spec.factor, spec.original_max_len, spec.long_factors) == ("longrope", 4.0, 64, (2.0,) * 8)
    assert spec.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert read(rope_scaling={**long, "type": "su"}, original_max_position_embeddings=64).rope_scaling == spec
    for bad in (
        yarn | {"factor": 0.5},
        yarn | {"original_max_position_embeddings": "x"},
        yarn | {"original_max_position_embeddings": 0.5},
        yarn | {"beta_fast": []},
        yarn | {"beta_fast": -1.0},
        yarn | {"rope_theta": 1.0},
        long | {"short_factor": [1.0] * 7},
        long | {"long_factor": None},
        long | {"long_factor": [0.0] * 8},
    ):
        with pytest.raises(ModelFileError, match=r"factor|beta_fast"):
            read(rope_scaling=bad)


def test_biases_and_activations_by_the_configuration(read):
    assert read(mlp_bias=True).biases == ("gate_up", "down")
    assert read(attention_bias=True).biases == ("qkv", "output")
    assert read(hidden_act="gelu").activation == "gelu"
    assert read(hidden_act=None).activation == "silu"


def test_generation_defaults_and_end_ids(read):
    spec = read({"eos_token_id": [2, 5], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": "x"})
    assert spec.eos_token_ids == (2, 5)
    assert spec.generation == {"temperature": 0.7, "top_p": 0.9}
    assert read({"temperature": 0.7}).generation == {}


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"model_type": "bloom"}, "supported families: llama, mistral, qwen2, qwen3, gemma, gemma2"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "supported families"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"quantization_config": {}}, "quantization method None is not supported"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.2}, "3 of 16 values of a head are rotated"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": "300"}, "vocab_size is '300'"),
        ({"num_hidden_layers": 1 << 40}, "num_layers is 1099511627776"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"rope_scaling": [1]}, "rope parameters"),
    ],
)
def test_refused_configurations_name_file_and_field(read, tmp_path, bad, word):
    with pytest.raises(ModelFileError) as caught:
        read(**bad)
    assert word in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1', "\xff", "[" * 100000])
def test_files_that_are_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_model_spec(ModelFiles("m", "hf", tmp_path, ()))


def test_mutated_configurations_are_read_or_refused(read):
    rng = random.Random(1)
    values = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", [], {}, [[1]], {"a": {}}]
    keys = [
        *BASE,
        "rope_scaling",
        "rope_theta",
        "head_dim",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "sliding_window_pattern",
        "rope_parameters",
        "query_pre_attn_scalar",
        "dtype",
    ]
    for _ in range(400):
        with contextlib.suppress(ModelFileError):
            read(
                model_type=rng.choice(["llama", "qwen2", "mistral", "gemma3_text"]),
                **{k: rng.choice(values) for k in rng.sample(keys[1:], 2)},
            )


def test_tiny_models_read_as_transformers_reads_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.tiny_models import FAMILIES, make_tiny_model

    for family in FAMILIES:
        root = make_tiny_model(family, tmp_path / family)
        spec = read_model_spec(ModelFiles(family, "hf", root, ()))
        config = transformers.AutoConfig.from_pretrained(root)
        assert spec.family == config.model_type.removesuffix("_text")
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * spec.num_layers
        window = config.sliding_window if spec.family != "llama" else None
        assert spec.rope_theta == rope["rope_theta"]
        assert [spec.window_of(layer) for layer in range(spec.num_layers)] == [
            window if kind == "sliding_attention" else None for kind in kinds
        ]
        assert spec.num_kv_heads == config.num_key_value_heads
        assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        assert (spec.rope_scaling is not None) == (rope["rope_type"] != "default")


def test_gguf_llama(read_gguf):
    spec = read_gguf(tensors=("output.weight",))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.head_dim, spec.num_kv_heads) == (
        "llama",
        300,
        64,
        16,
        2,
    )
    assert (spec.max_model_len, spec.eos_token_ids, spec.bos_token_id, spec.dtype) == (256, (2,), 1, "float32")
    assert not spec.tie_word_embeddings
    assert read_gguf().tie_word_embeddings


def test_gguf_variants_show_in_tensors(read_gguf):
    assert read_gguf("qwen2", ("blk.0.attn_q.bias",)).biases == ("qkv",)
    assert read_gguf(tensors=("blk.0.attn_output.bias", "blk.0.ffn_up.bias")).biases == ("output", "gate_up")
    assert read_gguf(
        "qwen3", ("blk.0.attn_q_norm.weight",), attention__key_length=32, rope__dimension_count=None
    ).qk_norm
    assert read_gguf(tensors=("rope_freqs.weight",)).rope_factors_tensors == ("rope_freqs.weight",)
    assert read_gguf().rope_factors_tensors == ()
    assert read_gguf(rope__dimension_count=8).rope_dim == 8
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert read_gguf(**yarn, rope__scaling__original_context_length=64).rope_scaling == RopeScaling(
        "yarn", 4.0, original_max_len=64, attention_factor=0.1 * math.log(4.0) + 1.0
    )
    assert read_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope_scaling == RopeScaling("linear", 4.0)
    assert read_gguf(attention__head_count=[4, 4], attention__head_count_kv=[2, 2]).num_heads == 4


def test_X01_gguf_gemma3(read_gguf):
    gemma = {"arch": "gemma3", "attention__key_length": 16, "block_count": 7, "rope__freq_base": 1e6}
    spec = read_gguf(**gemma, attention__sliding_window=32)
    assert spec.layer_windows == (32,) * 5 + (None, 32)
    assert (spec.rope_theta, spec.sliding_rope_theta, spec.attention_scale) == (1e6, 1e4, None)
    assert read_gguf(**gemma).layer_windows == ()
    every = read_gguf(**gemma, attention__sliding_window=32, attention__sliding_window_pattern=3)
    assert every.layer_windows == (32, 32, None, 32, 32, None, 32)
    listed = [True, False, False, True, True, True, False]
    spec = read_gguf(**gemma, attention__sliding_window=32, attention__sliding_window_pattern=listed)
    assert spec.layer_windows == tuple(32 if slides else None for slides in listed)
    assert read_gguf(**{**gemma, "block_count": 62}).attention_scale == 16**-0.5
    for bad in ({"attention__sliding_window_pattern": 0}, {"attention__sliding_window_pattern": listed[:3]}):
        with pytest.raises(ModelFileError, match="sliding_window_pattern"):
            read_gguf(**gemma, attention__sliding_window=32, **bad)
    with pytest.raises(ModelFileError, match="attn_logit_softcapping"):
        read_gguf(**gemma, attn_logit_softcapping=30.0)
    assert read_gguf(attention__sliding_window=32).layer_windows == (32, 32)


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"arch": "bloom"}, "architecture 'bloom' is not supported; supported families: llama"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"rope__dimension_count": 18}, "18 of 16 values of a head are rotated"),
        ({"rope__scaling__type": "longrope2", "rope__scaling__factor": 4.0}, "rope scaling 'longrope2'"),
        ({"tensors": ("output.bias",)}, "output.bias"),
        ({"block_count": None}, "llama.block_count is None"),
        ({"embedding_length": "big"}, "llama.embedding_length is 'big'"),
        ({"attention__head_count_kv": 3}, "4 heads cannot share 3"),
        ({"attention__head_count": [4, 2]}, "attention.head_count"),
        ({"context_length": 0}, "max_model_len is 0"),
    ],
)
def test_refused_gguf_files_name_the_reason(read_gguf, bad, word):
    with pytest.raises(ModelFileError) as caught:
        read_gguf(**bad)
    assert word in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_gguf_file_without_an_embedding(tmp_path):
    metadata = {"llama.attention.head_count": 4, "llama.embedding_length": 64}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"x": np.zeros(8, np.float32)})
    with pytest.raises(ModelFileError, match=r"tensor 'token_embd\.weight': is missing"):
        read_gguf_spec([GGUFFile.open(path)])


@pytest.mark.skipif(find_wheel_model() is None, reason="needs the default model")
def test_the_default_model():
    spec = read_model_spec(find_wheel_model())
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("llama", 30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_model_len, spec.rope_theta) == (49152, 8192, 100000.0)
    assert (spec.tie_word_embeddings, spec.eos_token_ids, spec.quantization) == (True, (2,), "Q4_1")
    assert spec.generation == {"temperature": 0.2, "top_p": 0.9}  # its model card

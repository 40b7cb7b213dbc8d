"""Experts are the same packed weights whichever way the files have them.

A tiny model of transformers is saved as on the hub (a tensor for each expert, or GPT-OSS's and Granite's of all
experts), and written again in other layouts: of all experts in one tensor, as GGUF, and as MXFP4 blocks.
"""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.core.plan import ROW_SAMPLE
from octavo.errors import ModelFileError
from octavo.models.native_decoder import NativeDecoder
from octavo.models.native_weights import load_native_weights
from octavo.nn.packed_weight import WeightKind
from octavo.ops import cpu
from tests.executors.driver import make_prompt
from tests.models import zoo
from tests.models.test_native_decoder import Probe
from tests.models.zoo_checks import TinyModel
from tests.tiny_gguf import write_out

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")
ROWS = {row.name: row for row in zoo.MIXTURES}
METADATA = {
    "qwen2_moe": {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    "mixtral": {},
    "gpt_oss": {"attention.sliding_window": 16, "expert_feed_forward_length": 96},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function from a row's name to its saved model, which tests copy from."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            TinyModel(ROWS[name], made[name], has_text=False)
        return made[name]

    return make


def load(path, quantization="none"):
    files = resolve_model(str(path))
    spec = read_model_spec(files)
    return spec, load_native_weights(files, spec, quantization, torch.float32)


def same_parts(first, second):
    """Assert that two models' packed weights, biases and vectors are equal."""
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.vectors.keys() == other.vectors.keys()
        assert all(np.array_equal(one.vectors[name], other.vectors[name]) for name in one.vectors)
        for part, twin in zip(one.parts, other.parts, strict=True):
            assert part.shape == twin.shape and np.array_equal(part.buffer, twin.buffer)
            assert (part.bias is None) == (twin.bias is None)
            assert part.bias is None or np.array_equal(part.bias, twin.bias)


def rewrite(source, target, tensors):
    """Write a model folder with these tensors and the source's configuration."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def stacked(tensors):
    """Return tensors with qwen's experts in one tensor for gate and up, and one for down."""
    found = dict(tensors)
    prefixes = {name.split("experts.0.")[0] for name in tensors if "experts.0.gate_proj" in name}
    for prefix in prefixes:
        parts = {
            role: [found.pop(f"{prefix}experts.{i}.{role}.weight") for i in range(8)]
            for role in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        found[f"{prefix}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{prefix}experts.down_proj"] = torch.stack(parts["down_proj"])
    return found


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_experts_of_one_tensor_equal_experts_of_their_own(folder, tmp_path, quantization):
    source = folder("qwen2_moe")
    tensors = load_file(source / "model.safetensors")
    target = rewrite(source, tmp_path / "stacked", stacked(tensors))
    same_parts(load(source, quantization)[1], load(target, quantization)[1])


def gguf_attention(spec, layer, prefix):
    """Yield the name and values of attention's tensors and of the layer's vectors, as llama.cpp converts them."""
    family = FAMILIES[spec.family]
    (qkv,), (output,) = layer.qkv, layer.output
    sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    biases = [None] * 3 if qkv.bias is None else torch.from_numpy(qkv.bias).split(sizes)
    for name, matrix, heads in zip("qkv", qkv.dequantize().split(sizes), (4, 2, 0), strict=True):
        if family.has_rotary_pairs and heads:
            matrix = matrix.view(heads, 2, -1, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)
        yield f"{prefix}attn_{name}.weight", matrix
    yield from ((f"{prefix}attn_{name}.bias", bias) for name, bias in zip("qkv", biases, strict=True))
    yield f"{prefix}attn_output.weight", output.dequantize()
    yield f"{prefix}attn_output.bias", None if output.bias is None else torch.from_numpy(output.bias)
    for role, vector in layer.vectors.items():
        yield f"{prefix}{family.names(role).gguf}.weight", torch.from_numpy(vector)


def gguf_mixture(spec, mixture, prefix):
    """Yield the name and values of a mixture's tensors."""
    router, count = mixture.router.dequantize(), spec.mixture.num_experts
    yield f"{prefix}ffn_gate_inp.weight", router[:count]
    yield f"{prefix}ffn_gate_inp_shexp.weight", router[count] if spec.mixture.has_shared_gate else None
    yield f"{prefix}ffn_gate_inp.bias", None if mixture.router.bias is None else torch.from_numpy(mixture.router.bias)
    for name, part in zip(("gate", "up", "down"), mixture.routed.parts, strict=True):
        yield f"{prefix}ffn_{name}_exps.weight", part.dequantize().view(count, -1, part.inputs)
        yield (
            f"{prefix}ffn_{name}_exps.bias",
            None if part.bias is None else torch.from_numpy(part.bias).view(count, -1),
        )
    for name, part in zip(("gate", "up", "down"), mixture.shared.parts if mixture.shared else (), strict=False):
        yield f"{prefix}ffn_{name}_shexp.weight", part.dequantize()


def gguf_tensors(spec, weights):
    """Yield the name and values of every tensor; None for those that the model lacks."""
    for index, layer in enumerate(weights.layers):
        yield from gguf_attention(spec, layer, f"blk.{index}.")
        yield from gguf_mixture(spec, layer.mixture, f"blk.{index}.")
    yield "token_embd.weight", weights.embedding.dequantize()
    yield "output.weight", weights.head.dequantize()
    yield "output_norm.weight", torch.from_numpy(weights.vectors["final_norm"])


def write_gguf(path, spec, weights, kind=GGMLQuantizationType.F32):
    family = FAMILIES[spec.family]
    writer = GGUFWriter(path, family.gguf_architecture)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_expert_count(spec.mixture.num_experts)
    writer.add_expert_used_count(spec.mixture.top_k)
    for key, value in METADATA[family.name].items():
        writer.add_uint32(f"{family.gguf_architecture}.{key}", value)
    for name, tensor in gguf_tensors(spec, weights):
        if tensor is None:
            continue
        of_kind = kind if name.endswith("exps.weight") else GGMLQuantizationType.F32
        raw = quants.quantize(np.ascontiguousarray(tensor.numpy()), of_kind)
        writer.add_tensor(name, raw, raw_dtype=of_kind)
    write_out(writer)
    return path


@pytest.mark.parametrize("name", METADATA)
def test_experts_of_gguf_files_equal_those_of_safetensors(folder, tmp_path, name):
    spec, weights = load(folder(name))
    found_spec, found = load(write_gguf(tmp_path / "model.gguf", spec, weights))
    same_parts(weights, found)
    mixture, expected = found_spec.mixture, spec.mixture
    for field in ("num_experts", "top_k", "intermediate_size", "layers", "scoring", "shared_size", "has_bias"):
        assert getattr(mixture, field) == getattr(expected, field), field
    assert found_spec.layer_windows == spec.layer_windows


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_of_quantised_gguf_files_keep_their_codes(folder, tmp_path, kind):
    spec, weights = load(folder("qwen2_moe"))
    qtype = GGMLQuantizationType[kind]
    _, found = load(write_gguf(tmp_path / "model.gguf", spec, weights, qtype), "auto")
    for layer, kept in zip(weights.layers, found.layers, strict=True):
        for part, own in zip(layer.mixture.routed.parts, kept.mixture.routed.parts, strict=True):
            assert own.kind == (WeightKind.INT8 if kind == "Q8_0" else WeightKind.INT4)
            exact = quants.dequantize(quants.quantize(part.dequantize().numpy(), qtype), qtype)
            assert np.array_equal(own.dequantize().numpy(), exact)


def test_gpt_oss_keeps_experts_in_four_bits_from_either_kind_of_file(folder, tmp_path):
    source = folder("gpt_oss")
    spec, weights = load(source)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2)  # [experts, outputs, inputs]
        raw = quants.quantize(np.ascontiguousarray(rows.numpy()), GGMLQuantizationType.MXFP4)
        blocks = torch.from_numpy(raw).view(*rows.shape[:2], -1, 17)
        halves = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)  # GGUF's order; the hub has neighbours
        tensors[f"{name}_blocks"] = halves[..., ::2] | halves[..., 1::2] << 4
        tensors[f"{name}_scales"] = blocks[..., 0]
    target = rewrite(source, tmp_path / "mxfp4", tensors)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (target / "config.json").write_text(json.dumps(config))
    _, of_hub = load(target, "auto")
    _, of_gguf = load(write_gguf(tmp_path / "m.gguf", spec, weights, GGMLQuantizationType.MXFP4), "auto")
    assert all(part.kind == WeightKind.MXFP4 for part in of_hub.layers[0].mixture.routed.parts)
    same_parts(of_hub, of_gguf)


def test_a_missing_expert_is_named(folder, tmp_path):
    source = folder("mixtral")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    target = rewrite(source, tmp_path / "missing", tensors)
    with pytest.raises(ModelFileError, match=r"model.layers.1.block_sparse_moe.experts.2.w1.weight.* is missing"):
        load(target)


def test_a_tensor_of_experts_with_another_shape_is_refused(folder, tmp_path):
    source = folder("granitemoe")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors[name] = tensors[name][:3]
    with pytest.raises(ModelFileError, match=r"has shape \[3, 192, 64\], the configuration needs \[4, 192, 64\]"):
        load(rewrite(source, tmp_path / "short", tensors))


def test_a_decode_step_reads_only_the_experts_that_its_rows_choose(folder):
    probe = Probe(folder("mixtral"), "native", dtype="float32")
    decoder = probe.decoder
    assert isinstance(decoder, NativeDecoder)
    mixtures = [layer.mixture for layer in decoder._weights.layers]
    whole = sum(part.nbytes for mixture in mixtures for part in mixture.routed.parts)
    routers = sum(mixture.router.nbytes for mixture in mixtures)
    probe.all_logits([make_prompt(100, 1)])
    assert decoder._step.expert_bytes == routers + whole, "100 tokens choose all of 4 experts"
    probe.row(0, 100, 1, ROW_SAMPLE)
    probe.run()
    assert decoder._step.expert_bytes == routers + whole // 2, "one token chooses 2 of 4"
    assert decoder.idle_expert_bytes == whole // 2
    assert probe.capacity.weight_bytes - probe.capacity.idle_expert_bytes == decoder.weight_bytes - whole // 2


def test_figures_of_the_decoders_count_chosen_experts(folder):
    native, twin = (Probe(folder("qwen2_moe"), decoder, dtype="float32") for decoder in ("native", "torch"))
    assert native.capacity.linear_flops_per_token == twin.capacity.linear_flops_per_token
    assert native.capacity.idle_expert_bytes == twin.capacity.idle_expert_bytes > 0


def test_bits_of_a_mixture_do_not_depend_on_threads(folder, monkeypatch):
    prompts = [make_prompt(length, length) for length in (60, 1, 17, 2)]
    one = Probe(folder("qwen2_moe"), "native", quantization="int8").all_logits(prompts)
    monkeypatch.setattr(cpu, "team_size", lambda: 3)
    three = Probe(folder("qwen2_moe"), "native", quantization="int8").all_logits(prompts)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))

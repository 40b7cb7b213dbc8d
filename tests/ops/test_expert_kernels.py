"""Triton's kernels of experts, interpreted, against their torch twins; a token's bits in any company."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ops.test_layer_kernels import coded, row_by_row
from torch import Tensor

from octavo.artifacts.model_spec import MixtureSpec
from octavo.nn.coded_linear import DeviceCodes, Part
from octavo.nn.experts import Expert, Mixture, StackedLinear, choose_experts
from octavo.nn.layers import Linear
from octavo.nn.packed_weight import WeightKind
from octavo.ops.gated_mul import activation_of
from octavo.ops.triton import available

__all__ = ["row_by_row"]

pytestmark = [
    pytest.mark.skipif(not available.is_available(), reason="no triton"),
    pytest.mark.usefixtures("patched_once"),
]
ops = torch.ops.octavo
NAN = float("nan")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def spec_of(**changes: object) -> MixtureSpec:
    fields = {"num_experts": 12, "top_k": 3, "intermediate_size": 24, "layers": (0,), **changes}
    return MixtureSpec(**fields)  # type: ignore[arg-type]


CHOICES = {
    "softmax": spec_of(),
    "normalised": spec_of(is_normalised=True, scale=2.5),
    "of chosen": spec_of(scoring="softmax_of_chosen"),
    "sigmoid with a bias": spec_of(scoring="sigmoid", has_choice_bias=True, is_normalised=True),
    "groups": spec_of(scoring="sigmoid", has_choice_bias=True, num_groups=4, top_groups=2, is_normalised=True),
    "groups of one": spec_of(num_groups=12, top_groups=5),
    "all": spec_of(top_k=12),
    "one of one": spec_of(num_experts=1, top_k=1),
}


def choose(logits_TX: Tensor, spec: MixtureSpec, bias_X: Tensor | None) -> tuple[Tensor, Tensor]:
    how = (("softmax", "softmax_of_chosen", "sigmoid").index(spec.scoring), spec.is_normalised, spec.least_sum)
    chosen: tuple[Tensor, Tensor] = ops.choose_experts(
        logits_TX, bias_X, spec.top_k, *how, spec.scale, spec.num_groups, spec.top_groups
    )
    return chosen


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN slice")
@pytest.mark.parametrize("name", CHOICES)
def test_the_choice(name: str) -> None:
    """As the twin's, in ascending order of experts; of equal scores the lower index; not finite ones are valid too."""
    spec = CHOICES[name]
    wide_TX = 3 * torch.randn(12, spec.num_experts + 1)
    wide_TX[0], wide_TX[1], wide_TX[2, ::2] = 0.0, -90.0, 1.5  # equal scores
    logits_TX = wide_TX[:, : spec.num_experts]
    bias_X = torch.randn(spec.num_experts) if spec.has_choice_bias else None
    chosen_TC, weights_TC = choose(logits_TX, spec, bias_X)
    twin_TC, twin_weights_TC = choose_experts(logits_TX, spec, bias_X)
    order_TC = twin_TC.argsort(1)
    assert chosen_TC.dtype is torch.int32 and torch.equal(chosen_TC.long(), twin_TC.gather(1, order_TC))
    torch.testing.assert_close(weights_TC, twin_weights_TC.gather(1, order_TC), atol=1e-7, rtol=2e-6)
    for row in (0, 7):
        assert all(
            map(torch.equal, choose(logits_TX[row : row + 1], spec, bias_X), (chosen_TC[[row]], weights_TC[[row]]))
        )
    odd_TX = torch.full((3, spec.num_experts), NAN)
    odd_TX[1, 0], odd_TX[2] = float("inf"), -float("inf")
    chosen_TC, _ = choose(odd_TX, spec, bias_X)
    assert all(len(set(row)) == spec.top_k and set(row) <= set(range(spec.num_experts)) for row in chosen_TC.tolist())


@pytest.mark.parametrize("num_tokens, top_k, num_experts", [(0, 2, 5), (1, 3, 8), (9, 2, 3), (300, 1, 7), (700, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_by_experts(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
    """Each pair is once in a tile of its expert, in order; one expert has all pairs, or they have equal shares."""
    even_TC = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].int()
    for chosen_TC in (even_TC, torch.full_like(even_TC, num_experts - 1)):
        pairs_NB, tiles = ops.arrange_pairs(chosen_TC, num_experts, dtype)
        num_tiles, experts = int(tiles[0]) if len(chosen_TC) else 0, tiles[1:]
        assert num_tiles <= len(pairs_NB) == len(experts)
        found: dict[int, list[int]] = {}
        for tile_B, expert in zip(pairs_NB[:num_tiles].tolist(), experts.tolist(), strict=False):
            held = list(itertools.takewhile(lambda pair: pair >= 0, tile_B))
            assert held and set(tile_B[len(held) :]) <= {-1}
            found.setdefault(expert, []).extend(held)
        flat = chosen_TC.flatten()
        assert found == {one: (flat == one).nonzero().flatten().tolist() for one in sorted(set(flat.tolist()))}


def mixture(spec: MixtureSpec, hidden: int, dtype: torch.dtype, kind: WeightKind | None = None) -> Mixture:
    """A mixture whose experts have random weights: floats, or codes, of which gate and up are two parts."""
    count, size = spec.num_experts, spec.intermediate_size

    def floats(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

    def codes(outputs: int, inputs: int) -> DeviceCodes:
        assert kind is not None
        return coded(kind, 32, outputs, inputs)[0]

    def linear(part: Part, bias: Tensor | None) -> Linear:
        return Linear(part.dequantize().to(dtype) if isinstance(part, DeviceCodes) else part, bias, "plain")

    gate_up: list[Part] = [floats(count * 2 * size, hidden)]
    if kind is not None:
        gate_up = [codes(count * size, hidden), codes(count * size, hidden)]
    down: list[Part] = [floats(count * hidden, size) if kind is None else codes(count * hidden, size)]
    biases = [floats(count, 2 * size), floats(count, hidden)] if spec.has_bias else [None, None]
    stacked = StackedLinear(count, gate_up, biases[0]), StackedLinear(count, down, biases[1])
    experts = []
    for one in range(count):
        layers = []
        for layer in stacked:
            parts, bias = layer.of_expert(one)
            weight = torch.cat(
                [part.dequantize().to(dtype) if isinstance(part, DeviceCodes) else part for part in parts]
            )
            layers.append(linear(weight, bias))
        experts.append(Expert(*layers))
    shared = None
    if spec.shared_size:
        shared = Expert(Linear(floats(2 * spec.shared_size, hidden)), Linear(floats(hidden, spec.shared_size)))
    router = Linear(torch.randn(count + spec.has_shared_gate, hidden) / hidden**0.5)
    return Mixture(spec, router, experts, shared, None, activation_of("silu", True), stacked)


def twin_of(layer: Mixture) -> Mixture:
    return Mixture(layer.spec, layer.router, layer.experts, layer.shared, layer.choice_bias_X, layer.activation)


MIXTURES = {
    "plain": spec_of(num_experts=6, top_k=2, intermediate_size=32, is_normalised=True),
    "biases": spec_of(num_experts=4, top_k=3, intermediate_size=32, has_bias=True),
    "shared": spec_of(num_experts=6, top_k=2, intermediate_size=32, shared_size=48),
    "shared gate": spec_of(num_experts=6, top_k=2, intermediate_size=32, shared_size=48, has_shared_gate=True),
}


@pytest.mark.parametrize(
    "name, dtype, kind",
    [
        *((name, torch.float32, None) for name in MIXTURES),
        ("shared gate", torch.bfloat16, None),
        ("shared", torch.float16, None),
        ("plain", torch.float32, WeightKind.INT4),
        ("biases", torch.bfloat16, WeightKind.INT4),
        ("biases", torch.float32, WeightKind.INT8),
        ("plain", torch.bfloat16, WeightKind.MXFP4),
    ],
)
def test_a_mixture_equals_its_twin(name: str, dtype: torch.dtype, kind: WeightKind | None) -> None:
    layer = mixture(MIXTURES[name], 64, dtype, kind)
    for num_tokens in (1, 40):
        x_TE = torch.randn(num_tokens, 64).to(dtype)
        found_TE, twin_TE = layer(x_TE), twin_of(layer)(x_TE)
        assert found_TE.dtype is dtype and found_TE.shape == twin_TE.shape
        scale = twin_TE.float().abs().max()
        near = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        assert (found_TE.float() - twin_TE.float()).abs().max() <= near * scale


def test_no_tokens() -> None:
    layer = mixture(MIXTURES["shared gate"], 64, torch.bfloat16)
    assert layer(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    "kind, dtype", [(None, torch.float32), (None, torch.bfloat16), (WeightKind.INT4, torch.bfloat16)]
)
def test_a_token_has_the_same_bits_in_any_company(kind: WeightKind | None, dtype: torch.dtype) -> None:
    """From 1 token to 65: tiles are 16, 32, 64 and 128 pairs wide (64 for float32), of other tokens each time."""
    layer = mixture(spec_of(num_experts=2, top_k=2, intermediate_size=32, is_normalised=True), 32, dtype, kind)
    x_TE = torch.randn(65, 32).to(dtype)
    logits_TX = layer.router(x_TE.float())
    whole_TE = layer.mix(x_TE, logits_TX)
    for rows in (slice(64, 65), slice(3, 19), slice(40, 57), slice(0, 33)):
        assert torch.equal(layer.mix(x_TE[rows], logits_TX[rows]), whole_TE[rows])
    mixed = torch.randperm(65)
    assert torch.equal(layer.mix(x_TE[mixed], logits_TX[mixed]), whole_TE[mixed])

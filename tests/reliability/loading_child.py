"""Loads damaged model files, one after the other: `python loading_child.py FOLDER FIRST END BASES` (numbers are seeds).

BASES is "plain", or "formats": quantised checkpoints, mixtures, models of transformers, encoders, split files.
Says a line of JSON for each: before (so that a crash is known by its number) and after. Bases are made in FOLDER once.
An audit hook notes what loading a model must never do: start a process, use a network, unpickle, write elsewhere.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402  the path comes first
import transformers.masking_utils  # noqa: E402, F401  else a model is blamed for what its first import writes
from safetensors.torch import load_file, save_file  # noqa: E402

from octavo.artifacts.read_spec import read_model_spec  # noqa: E402
from octavo.artifacts.resolve import resolve_model  # noqa: E402
from octavo.config import ExecutionConfig, ModelConfig  # noqa: E402
from octavo.errors import OctavoError  # noqa: E402
from octavo.executors.encoder_executor import EncoderExecutor  # noqa: E402
from octavo.executors.loading import DecoderChoice  # noqa: E402
from octavo.executors.protocol import ExecutorSpec  # noqa: E402
from octavo.text.text_model import TextModel  # noqa: E402
from tests.artifacts.gguf_writing import LLAMA, write_gguf  # noqa: E402
from tests.reliability import model_bases  # noqa: E402
from tests.reliability.nasty_requests import mutated  # noqa: E402
from tests.text.rendered import prompt_text  # noqa: E402
from tests.text.test_chat_template import EVIL, TEMPLATES  # noqa: E402
from tests.text.tiny_tokenizers import SPECIAL, sentencepiece_parts  # noqa: E402
from tests.tiny_gguf import make_tiny_gguf  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402

LOAD_LIMIT_S = 20
MEMORY_BYTES = 2 << 30  # of address space, beside what whole models and their libraries took
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
EDGES = [
    *(0, 1, 2, 3, 7, 8, 24, 31, 32, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 8, 2**64 - 1),
]
PIECES = [
    *("{{", "%}", "{%- for x in ", "()", "|attr('__class__')", "'", "\x00", ".__init__.__globals__", "*" * 9),
    *("[0]", "{% set x = namespace() %}", "9" * 400),
]
SETTINGS = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        5,
        7,
        17,
        2**15,
        2**31 - 1,
        2**31,
        2**40,
        2**63,
        -(2**63),
        10**30,
        0.5,
        3.5,
        -1.5,
    ),
    *(float("nan"), float("inf"), 1e308, 1e-320, "", "x", "4", [], [1], [None] * 3, ["x"], {}, {"x": 1}, {"x": [{}]}),
]
FORBIDDEN = {
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind",
    "socket.getaddrinfo", "pickle.find_class", "os.remove", "os.rename", "shutil.rmtree", "os.putenv",
}  # fmt: skip


class Audit:
    """What was done while it was on."""

    def __init__(self, folder: Path) -> None:
        self.is_on = False
        self.seen: list[str] = []
        self._folder = str(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        is_write = event == "open" and isinstance(arguments[1], str) and bool(set(arguments[1]) & set("wax+"))
        if event in FORBIDDEN or (is_write and not str(arguments[0]).startswith((self._folder, "/dev/"))):
            self.seen.append(f"{event}{arguments!r}"[:200])


def make_bases(folder: Path) -> list[Path]:
    """Small models of both formats that load."""
    made = [folder / "bases" / name for name in ("hf", "sharded", "gemma", "q8.gguf", "f32.gguf", "text.gguf")]
    if made[0].exists():
        return made
    (folder / "bases").mkdir()
    make_tiny_model("llama3", made[0])
    make_tiny_model("qwen3", made[1], shards=2, dtype="bfloat16")
    make_tiny_model("gemma3", made[2], num_hidden_layers=3)
    make_tiny_gguf("llama2", made[3], "Q8_0")
    make_tiny_gguf("qwen2", made[4], "F32")
    tokens, merges = sentencepiece_parts()
    text = {f"llama.{key}": value for key, value in LLAMA.items()} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATES[0],
    }
    embedding = {"token_embd.weight": torch.zeros(len(tokens), LLAMA["embedding_length"]).numpy()}
    write_gguf(made[5], text, embedding)
    return made


def formats(folder: Path) -> list[Path]:
    """Models of the other formats, made once."""
    made, names = folder / "formats", folder / "formats.json"
    if not names.exists():
        names.write_text(json.dumps([str(path.relative_to(made)) for path in model_bases.make_bases(made)]))
    return [made / name for name in json.loads(names.read_text())]


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to three faults, mostly in the first kilobytes, where headers are."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not raw:
            break
        at = rng.randrange(min(len(raw), rng.choice((32, 512, 4096, len(raw)))))
        kind = rng.randrange(8)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at : at + 8] = rng.choice(EDGES).to_bytes(8, "little")
        elif kind == 2:
            raw[at : at + 4] = (rng.choice(EDGES) & 0xFFFFFFFF).to_bytes(4, "little")
        elif kind == 3:
            del raw[rng.choice((at, len(raw) - 1 - at)) :]
        elif kind == 4:
            del raw[at : at + rng.choice((1, 8, 100))]
        elif kind == 5:
            raw[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        elif kind == 6:
            filling = rng.choice((b"\xff", b"0", b"9", b"{", b'"', b"-")) * rng.choice((1, 4))
            raw[at : at + rng.choice((1, 4, 16))] = filling
        else:
            end = min(len(raw), at + 64)
            raw[at:end] = rng.choice((bytes(end - at), raw[: end - at], rng.randbytes(end - at)))
    return bytes(raw)


def damage_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file whose header is another JSON object, of the right length."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(rng, json.loads(data[8 : 8 + length]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damage_template(rng: random.Random, source: str) -> str:
    source = rng.choice((source, rng.choice(TEMPLATES)))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(source) + 1)
        piece = rng.choice((rng.choice(list(EVIL.values())), rng.choice(PIECES)))
        source = source[:at] + piece + source[at + rng.choice((0, 1, 5)) :]
    return source


def damage_field(rng: random.Random, data: bytes) -> bytes:
    """A GGUF file with another number near the name of a key or of a tensor: a value, a size, a type or an offset."""
    names = [match.end() for match in re.finditer(rb"(?:[a-z0-9_]+\.)+[a-z0-9_]+", data[: 1 << 16])]
    at = rng.choice(names) + rng.choice((0, 4, 8, 12, 20, 24))
    width = rng.choice((4, 8))
    return data[:at] + (rng.choice(EDGES) & (1 << 8 * width) - 1).to_bytes(width, "little") + data[at + width :]


def damage_tensor(rng: random.Random, file: Path) -> None:
    """One tensor is missing, of another shape or type, or holds extreme numbers."""
    tensors = load_file(file)
    name = rng.choice(list(tensors))
    tensor = tensors[name]
    kind = rng.randrange(7)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = tensor.flatten()[: rng.choice((0, 1, tensor.numel() // 2))]
    elif kind == 2:
        tensors[name] = tensor.flatten() if rng.random() < 0.5 else tensor[None]
    elif kind == 3:
        tensors[name] = tensor.repeat(2, *[1] * (tensor.dim() - 1)) if tensor.dim() else tensor.repeat(3)
    elif kind == 4:
        dtypes = (torch.float32, torch.float16, torch.int32, torch.uint8, torch.int8, torch.int64, torch.bool)
        tensors[name] = tensor.float().to(rng.choice((*dtypes, torch.float8_e4m3fn, torch.float64)))
    elif kind == 5:
        tensors[name] = tensor.t() if tensor.dim() == 2 else tensor.flip(0) if tensor.dim() else tensor
    elif tensor.is_floating_point():
        tensors[name] = torch.full_like(tensor.float(), rng.choice((float("nan"), 1e30, -1.0, 0.0))).to(tensor.dtype)
    else:
        info = torch.iinfo(tensor.dtype)
        tensors[name] = torch.full_like(tensor, rng.choice((info.max, info.min, 0)))
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, file, {"format": "pt"})


def damage_setting(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """A configuration with one or two extreme settings, those of parts included."""
    for _ in range(rng.choice((1, 1, 2))):
        tables = [value, *(part for part in value.values() if isinstance(part, dict) and part)]
        table = rng.choice(tables)
        key = rng.choice(list(table))
        if isinstance(table[key], list) and table[key] and rng.random() < 0.5:
            table[key] = rng.choice((table[key][1:], table[key] * 3, [*table[key][1:], rng.choice(SETTINGS)]))
        else:
            table[key] = rng.choice(SETTINGS)
    return value


def damage(rng: random.Random, base: Path, target: Path) -> Path:
    """A damaged copy of a base."""
    if base.suffix == ".gguf":
        files = sorted(base.parent.iterdir()) if base.parent.name == "split" else [base]
        for file in files:
            shutil.copy(file, target / file.name)
        chosen = target / rng.choice(files).name
        if len(files) > 1 and rng.random() < 0.2:
            chosen.write_bytes(rng.choice(files).read_bytes()) if rng.random() < 0.5 else chosen.unlink()
        else:
            method = damage_field if rng.random() < 0.5 else damage_bytes
            chosen.write_bytes(method(rng, chosen.read_bytes()))
        return target / base.name
    copy = target / base.name
    shutil.copytree(base, copy)
    files = sorted(file for file in copy.rglob("*") if file.is_file())
    weights = [file for file in files if file.suffix == ".safetensors"]
    config = copy / "config.json"
    chosen = rng.choice((rng.choice(weights), rng.choice(weights), rng.choice(files), config, config))
    if (copy / "imatrix").exists():
        chosen = copy / "imatrix"
    if chosen.suffix == ".safetensors":
        data, kind = chosen.read_bytes(), rng.randrange(4)
        if kind > 1:
            damage_tensor(rng, chosen)
        else:
            chosen.write_bytes(damage_header(rng, data) if kind else damage_bytes(rng, data))
    elif chosen.suffix != ".json" or rng.random() < 0.2:
        chosen.write_bytes(damage_bytes(rng, chosen.read_bytes()))
    else:
        value = json.loads(chosen.read_bytes())
        if "chat_template" in value and rng.random() < 0.7:
            value["chat_template"] = damage_template(rng, value["chat_template"])
        elif isinstance(value, dict) and value and rng.random() < 0.6:
            value = damage_setting(rng, value)
        else:
            value = mutated(rng, value)
        chosen.write_text(json.dumps(value), "utf-8")
    return copy


def load(path: Path, with_text: bool, with_weights: bool) -> None:
    """Everything that serving a model does with its files before it serves."""
    files = resolve_model(str(path))
    spec = read_model_spec(files)
    if with_text:
        text = TextModel.load(files)
        ids = text.tokenizer.encode("the cat sat <s> é 猫")
        text.tokenizer.decode(ids)
        if text.chat_template is not None:
            prompt_text(text, HI)
    if not with_weights:
        return
    imatrix = path / "imatrix"
    model = ModelConfig(weight_cache_bytes=0)
    if imatrix.exists():
        model = ModelConfig(weight_cache_bytes=0, quantization="int4", imatrix=str(imatrix))
    if spec.encoder is not None:
        executor = ExecutorSpec(max_sequences=2, max_batch_tokens=64, block_size=16, num_blocks=16)
        EncoderExecutor(files, spec, ExecutionConfig(threads=1), model).open(executor)
        return
    decoders = ("auto",) if imatrix.exists() or spec.path == "transformers" else ("torch", "auto")
    for decoder in decoders:
        DecoderChoice(files, spec, ExecutionConfig(threads=1, decoder=decoder), model).load(64)


def parts_of(base: Path) -> tuple[bool, bool]:
    """Whether a base has a text, and weights of a whole model."""
    return base.suffix != ".gguf" or base.stem.startswith("text"), not base.stem.startswith("text")


def outcome(path: Path, audit: Audit, with_text: bool, with_weights: bool) -> str:
    audit.is_on = True
    try:
        load(path, with_text, with_weights)
    except OctavoError as error:
        text = str(error)
        if "alloc" in text or "\n" in text or not text:
            return f"refused with {text[:200]!r}"
        return "refused"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:160]} ({Path(last.filename).name}:{last.lineno})"
    finally:
        audit.is_on = False
    return "loaded"


def main(folder: Path, first: int, end: int, corpus: str) -> None:
    torch.set_num_threads(1)
    bases = make_bases(folder) if corpus == "plain" else formats(folder)
    audit = Audit(folder)
    for base in bases:  # whole they load, and what is imported late is imported now
        load(base, *parts_of(base))
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    target = folder / "damaged"
    for number in range(first, end):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        rng = random.Random(number)
        base = rng.choice(bases)
        path = damage(rng, base, target)
        print(json.dumps({"number": number}), flush=True)
        signal.alarm(LOAD_LIMIT_S)
        found = outcome(path, audit, *parts_of(base))
        signal.alarm(0)
        print(json.dumps({"number": number, "outcome": found, "did": audit.seen, "base": base.name}), flush=True)
        audit.seen = []


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

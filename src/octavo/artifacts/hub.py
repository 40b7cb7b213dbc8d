"""Downloads from the Hugging Face hub, into its own cache.

Owns: which files are fetched, what a repository has, and turning the library's errors into ours.
Does not: fetch anything that could run: no pickles, no Python.
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import UnknownModelError

_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def download_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository, downloading what is missing. Raises UnknownModelError.

    With `gguf_pattern` only the matching files are fetched. Without a network the cache is used.
    """
    return _snapshot(repository, revision, gguf_pattern, is_local=_is_offline())


def cached_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository; no network is tried. Raises UnknownModelError."""
    return _snapshot(repository, revision, gguf_pattern, is_local=True)


def list_files(repository: str, revision: str | None, is_offline: bool) -> list[str]:
    """Return the names of a repository's files; those that are cached where offline or without a network.

    Raises UnknownModelError.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    if not (is_offline or _is_offline()):
        try:
            return HfApi().list_repo_files(repository, revision=revision)
        except errors.HfHubHTTPError as error:
            raise UnknownModelError(_why(repository, revision, error)) from error
        except (httpx.HTTPError, OSError):
            pass  # no network: the cache may have what is needed
    root = cached_repository(repository, revision, None)
    return [str(path.relative_to(root)) for path in root.rglob("*.gguf")]


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")  # as the library reads it


def _snapshot(repository: str, revision: str | None, gguf_pattern: str | None, *, is_local: bool) -> Path:
    # Imported here: the hub's client costs 0.3 s, and local models never need it.
    import httpx
    from huggingface_hub import errors, snapshot_download

    patterns = list(_MODEL_PATTERNS) if gguf_pattern is None else [gguf_pattern]
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=is_local)
        return Path(found)
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError, OSError) as error:
        if is_local and not isinstance(error, errors.HFValidationError):
            raise UnknownModelError(
                f"{_at(repository, revision)} is not in this machine's cache, and offline mode is on (--offline or "
                f"HF_HUB_OFFLINE); run octavo pull {repository} once with a network, or give a local folder or file"
            ) from error
        raise UnknownModelError(_why(repository, revision, error)) from error


def _why(repository: str, revision: str | None, error: Exception) -> str:
    """Return why a repository cannot be had, and what to do."""
    import httpx
    from huggingface_hub import errors

    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, (httpx.TransportError, errors.OfflineModeIsEnabled)):
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

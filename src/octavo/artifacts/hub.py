"""Downloads from the Hugging Face hub, into its own cache.

Owns: which files are fetched, and turning the library's errors into ours.
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
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):  # as the library reads it
        return cached_repository(repository, revision, gguf_pattern)
    return _snapshot(repository, revision, gguf_pattern, is_local=False)


def cached_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository; no network is tried. Raises UnknownModelError."""
    return _snapshot(repository, revision, gguf_pattern, is_local=True)


def _snapshot(repository: str, revision: str | None, gguf_pattern: str | None, *, is_local: bool) -> Path:
    # Imported here: the hub's client costs 0.3 s, and local models never need it.
    import httpx
    from huggingface_hub import errors, snapshot_download

    patterns = list(_MODEL_PATTERNS) if gguf_pattern is None else [gguf_pattern]
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=is_local)
        return Path(found)
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        if is_local and not isinstance(error, errors.HFValidationError):
            raise UnknownModelError(
                f"{repository!r}{at} is not in this machine's cache, and offline mode is on (--offline or "
                f"HF_HUB_OFFLINE); run octavo pull {repository} once with a network, or give a local folder or file"
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "check the name and the network, or give a local folder or .gguf file"
        raise UnknownModelError(f"cannot get {repository!r}{at} ({reason}); {remedy}") from error

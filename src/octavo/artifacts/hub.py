"""Downloads from the Hugging Face hub, into its own cache.

Owns: which files are fetched, and turning the library's errors into ours.
Does not: fetch anything that could run: no pickles, no Python.
"""

from __future__ import annotations

from pathlib import Path

from octavo.errors import UnknownModelError

_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def download_repository(repository: str, revision: str | None, gguf_pattern: str | None) -> Path:
    """Return the local snapshot of a repository, downloading what is missing. Raises UnknownModelError.

    With `gguf_pattern` only the matching files are fetched. Without a network the cache is used.
    """
    # Imported here: the hub's client costs 0.3 s, and local models never need it.
    import httpx
    from huggingface_hub import errors, snapshot_download

    patterns = list(_MODEL_PATTERNS) if gguf_pattern is None else [gguf_pattern]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "check the name and the network, or give a local folder or .gguf file"
        raise UnknownModelError(f"cannot get {repository!r}{at} ({reason}); {remedy}") from error

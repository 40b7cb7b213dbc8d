"""Read a JSON object from a model's folder.

Owns: the size bound and the errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError

_MAX_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 64 MiB. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelFileError(path, f"has {size} bytes; at most {_MAX_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds a {type(value).__name__}; an object is needed")
    return value

"""Read a JSON object from a file of a model.

Owns: the bound of its size, and the error that names the file. Does not: know any key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError

_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path, kind: type = dict, optional: bool = False) -> Any:
    """Read a JSON object, or a list if `kind` is list, of at most 64 MiB; if `optional`, no file is an empty one.

    Raises ModelFileError.
    """
    if optional and not path.is_file():
        return kind()
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ModelFileError(path, f"has {size} bytes; at most {_MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON ({error})") from error
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise ModelFileError(path, f"holds a {type(value).__name__}; {wanted} is needed")
    return value

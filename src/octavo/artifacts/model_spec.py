"""Read a model's specification from files of any supported kind.

Owns: the choice between the readers, and the names that other packages import.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.gguf_spec import read_gguf_spec
from octavo.artifacts.hf_spec import read_hf_spec
from octavo.artifacts.resolve import DEFAULT_MODEL, ModelFiles
from octavo.artifacts.script import script_spec
from octavo.artifacts.spec import FAMILIES, ModelSpec, RopeScaling

__all__ = ["FAMILIES", "ModelSpec", "RopeScaling", "read_model_spec"]


_DEFAULT_SAMPLING = {
    "temperature": 0.2,
    "top_p": 0.9,
}  # recommended by the default model's card; its files have no defaults


def read_model_spec(files: ModelFiles) -> ModelSpec:
    """Read and check the specification. Raises ModelFileError naming the file and what is wrong or unsupported."""
    if files.kind == "scripted":
        return script_spec(files.weights[0])
    if files.kind == "gguf":
        spec = read_gguf_spec([GGUFFile.open(path) for path in files.weights])
    else:
        spec = read_hf_spec(files.root)
    if files.name == DEFAULT_MODEL and not spec.generation:
        return replace(spec, generation=_DEFAULT_SAMPLING)
    return spec

"""Whether Triton's kernels can run here. Modules elsewhere ask this one, and never import triton.

Owns: the search for triton, and the registration of the kernels as torch.ops.octavo.*. Does not: look for a device.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from torch import Tensor

import octavo.ops.triton

OLDEST = (3, 6)


@cache
def is_available() -> bool:
    """Return True if triton is installed and new enough; the operators of all kernels are registered then."""
    try:
        version = importlib.import_module("triton").__version__  # the distribution has other names too: pytorch-triton
    except ImportError:
        return False
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return False
    for module in pkgutil.iter_modules(octavo.ops.triton.__path__, "octavo.ops.triton."):
        importlib.import_module(module.name)
    return True


def uses_kernels(tensor: Tensor) -> bool:
    """Return True if operations on this tensor take Triton's kernels: it is not on a CPU, and they are available."""
    return tensor.device.type != "cpu" and is_available()

"""Build the C++ kernels as one plain shared library; everything else is in pyproject.toml.

The library has a C ABI and knows neither Python nor torch, so one build serves every version of both. Without a
compiler the build still succeeds, with a warning: the torch twins then do the work.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

LIBRARY = "octavo.ops.libkernels"
SOURCES = sorted(path.as_posix() for path in Path("csrc").glob("*.cpp"))
# No -march: features are chosen at run time. No contraction: every path must round alike.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
WITHOUT_KERNELS = "octavo: WARNING: no C++ compiler; built without the CPU kernels, the torch twins are used"


class BuildKernels(build_ext):
    """Compile with OpenMP, else without, else not at all."""

    def get_ext_filename(self, fullname):
        """Name the library without a Python version: nothing in it depends on one."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        """Try OpenMP first; a failure of the second try is reported by the optional extension."""
        try:
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, "-fopenmp"], ["-fopenmp"]
            super().build_extension(ext)
        except (CompileError, LinkError) as error:
            print(f"octavo: no OpenMP ({error}); building the kernels for one thread", file=sys.stderr)
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, "-Wno-unknown-pragmas"], []
            super().build_extension(ext)

    def build_extensions(self):
        """Compile the files side by side: each is a process of its own, and the larger ones take 10 s."""
        compile_file = self.compiler._compile

        def compile_all(*arguments, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.compiler._compile = lambda *job: jobs.append(pool.submit(compile_file, *job))
                jobs = []
                objects = type(self.compiler).compile(self.compiler, *arguments, **options)
                for job in jobs:
                    job.result()
            return objects

        self.compiler.compile = compile_all
        super().build_extensions()

    def run(self):
        """Build, then say plainly whether the kernels are in."""
        super().run()
        if not all(os.path.exists(path) for path in self.get_outputs()):
            print(WITHOUT_KERNELS, file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """One wheel per platform, for every Python 3: it holds machine code but no Python ABI."""

    def get_tag(self):
        """Return (py3, none, platform)."""
        return "py3", "none", super().get_tag()[2]


HEADERS = sorted(path.as_posix() for path in Path("csrc").glob("*.h"))
setup(
    ext_modules=[Extension(LIBRARY, SOURCES, depends=HEADERS, language="c++", optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)

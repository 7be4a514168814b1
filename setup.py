"""Builds the native CPU kernels and copies. Without a C compiler the package installs on plain torch."""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

digest_of = runpy.run_path("src/tiercel/kernels/meaning.py")["digest_of"]
TUNE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


class BuildNamed(build_ext):
    """Tells the library what it is built from: cached pages are shared among those that agree in this."""

    def build_extension(self, extension: Extension) -> None:
        compiling = [*self.compiler.compiler_so, *extension.extra_compile_args, *extension.define_macros]
        linking = [*self.compiler.linker_so, *extension.extra_link_args]  # -ffast-math counts here, too
        linking = [each for each in linking if not each.startswith(("-L", "-Wl,"))]  # where libraries are
        name = digest_of(
            repr(compiling), repr(linking), files=map(Path, extension.sources + extension.depends)
        )
        extension.define_macros.append(("BUILT_FROM", f'"{name}"'))
        super().build_extension(extension)


setup(
    cmdclass={"build_ext": BuildNamed},
    ext_modules=[
        Extension(
            "tiercel.kernels._native",
            ["src/tiercel/kernels/native.c", "src/tiercel/kernels/grouped.c"],
            depends=["src/tiercel/kernels/vector.h"],
            extra_compile_args=["-O3", TUNE, "-fopenmp", "-ffp-contract=off"],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
        Extension(
            "tiercel.kernels._copy",
            ["src/tiercel/kernels/copy.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ],
)

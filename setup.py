"""Builds the native CPU kernels and copies. Without a C compiler the package installs on plain torch."""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TUNE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


class BuildNamed(build_ext):
    """Tells the library what it is built from: cached pages are shared among those that agree in this."""

    def build_extension(self, extension: Extension) -> None:
        command = [*self.compiler.compiler_so, *extension.extra_compile_args]
        whole = hashlib.sha256(repr(command).encode())
        for source in extension.sources:
            whole.update(Path(source).read_bytes())
        extension.define_macros.append(("BUILT_FROM", f'"{whole.hexdigest()}"'))
        super().build_extension(extension)


setup(
    cmdclass={"build_ext": BuildNamed},
    ext_modules=[
        Extension(
            "tiercel.kernels._native",
            ["src/tiercel/kernels/native.c"],
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

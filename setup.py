"""Builds the native CPU kernels, once for each level of CPUs, and copies. Without a C compiler the package
installs on plain torch."""

import runpy
from copy import copy
from pathlib import Path
from sysconfig import get_config_var

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/tiercel/kernels")
digest_of = runpy.run_path(str(KERNELS / "meaning.py"))["digest_of"]
levels = runpy.run_path(str(KERNELS / "levels.py"))


class BuildNamed(build_ext):
    """Tells a library what it is built from: cached pages are shared among those that agree in this."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # as many compilers as there are CPUs

    def build_extension(self, extension: Extension) -> None:
        compiling = [*self.compiler.compiler_so, *extension.extra_compile_args, *extension.define_macros]
        linking = [*self.compiler.linker_so, *extension.extra_link_args]  # -ffast-math counts here, too
        linking = [each for each in linking if not each.startswith(("-L", "-Wl,"))]  # where libraries are
        name = digest_of(
            repr(compiling), repr(linking), files=map(Path, extension.sources + extension.depends)
        )
        extension.define_macros.append(("BUILT_FROM", f'"{name}"'))
        own = copy(self)
        own.build_temp = str(
            Path(self.build_temp, extension.name)
        )  # object files of one source have one name
        super(BuildNamed, own).build_extension(extension)

    def copy_extensions_to_source(self) -> None:
        """An editable install. Levels of an earlier one would be chosen, too."""
        for library in KERNELS.glob(f"_native*{get_config_var('EXT_SUFFIX')}"):
            library.unlink()
        super().copy_extensions_to_source()


def kernels(level: str) -> Extension:
    return Extension(
        f"tiercel.kernels._native_{level}",
        [f"{KERNELS}/native.c", f"{KERNELS}/grouped.c"],
        depends=[f"{KERNELS}/vector.h"],
        extra_compile_args=["-O3", *levels["options_of"](level), "-fopenmp", "-ffp-contract=off"],
        extra_link_args=["-fopenmp"],
        optional=True,
    )


def plain(name: str) -> Extension:
    """Runs on every CPU."""
    source = [f"{KERNELS}/{name}.c"]
    return Extension(f"tiercel.kernels._{name}", source, extra_compile_args=["-O3"], optional=True)


setup(
    cmdclass={"build_ext": BuildNamed},
    ext_modules=[*map(kernels, levels["levels_to_build"]()), plain("cpu"), plain("copy")],
)

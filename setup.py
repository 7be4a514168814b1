"""Builds the native CPU kernels. Without a C compiler the package installs all the same: on plain torch."""

import platform

from setuptools import Extension, setup

TUNE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"

setup(
    ext_modules=[
        Extension(
            "tiercel.kernels._native",
            ["src/tiercel/kernels/native.c"],
            extra_compile_args=["-O3", TUNE, "-fopenmp", "-ffp-contract=off"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)

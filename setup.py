"""Builds tierckpt._native; everything else about the package stands in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

sources = sorted(str(path) for path in Path("native").glob("*.cpp"))
headers = sorted(str(path) for path in Path("native").glob("*.h"))

setup(
    ext_modules=[
        Pybind11Extension(
            "tierckpt._native",
            sources,
            depends=headers,
            cxx_std=17,
            # No -march: one build serves every machine, the wide kernels are chosen at run time.
            extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)

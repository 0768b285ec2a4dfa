"""Builds tierckpt._native; everything else about the package stands in pyproject.toml."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from pybind11.setup_helpers import build_ext as base
from setuptools import setup

sources = sorted(str(path) for path in Path("native").glob("*.cpp"))
headers = sorted(str(path) for pattern in ("*.h", "cuda/*") for path in Path("native").glob(pattern))

KERNELS = Path("native/cuda/kernels.cu")
#: GPUs that get machine code, as far as the nvcc knows them; for later ones their driver compiles text for the first.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
#: The oldest version of that text in which the kernels can be written: drivers since 2018 read it.
TEXT_VERSION = "6.3"


def nvcc() -> str | None:
    """The CUDA compiler: of ``CUDA_HOME``, else of the path; none where there is neither, or ``TIERCKPT_NVCC`` is empty."""
    if "TIERCKPT_NVCC" in os.environ:
        return os.environ["TIERCKPT_NVCC"] or None
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def compile_kernels(compiler: str, folder: Path) -> tuple[bytes, bytes]:
    """The kernels as a fat binary, and as text for drivers older than the compiler."""
    told = subprocess.run([compiler, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
    known = [number for number in ARCHITECTURES if f"compute_{number}" in told.split()]
    if not known:
        raise SystemExit(
            f"{compiler} knows none of the architectures {ARCHITECTURES}; set TIERCKPT_NVCC= to do without"
        )
    oldest = f"compute_{known[0]}"
    targets = [f"-gencode=arch={oldest},code={oldest}"]
    targets += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in known]
    common = [compiler, "-O3", "-std=c++17", str(KERNELS)]
    binary, text = folder / "kernels.fatbin", folder / "kernels.ptx"
    subprocess.run([*common, "-fatbin", *targets, "-o", str(binary)], check=True)
    subprocess.run([*common, "-ptx", f"-arch={oldest}", "-o", str(text)], check=True)
    older = re.sub(r"(?m)^\.version .*$", f".version {TEXT_VERSION}", text.read_text())
    return binary.read_bytes(), older.encode() + b"\0"


def embed(images: tuple[bytes, bytes], path: Path) -> None:
    """Write the source that ``native/cuda/embedded.h`` declares."""
    lines = ['#include "cuda/embedded.h"', "namespace tierckpt {"]
    for name, image in zip(("kernels_binary", "kernels_text"), images, strict=True):
        numbers = ",".join(map(str, image or b"\0"))
        lines.append(f"alignas(16) static const unsigned char {name}_data[] = {{{numbers}}};")
        lines.append(f"Embedded {name}() {{ return {{{name}_data, {len(image)}}}; }}")
    path.write_text("\n".join([*lines, "}  // namespace tierckpt", ""]))


class build_ext(base):  # noqa: N801
    """Compiles the CUDA kernels into the module where there is a compiler for them."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        compiler = nvcc()
        if compiler is None:
            print("no nvcc: the module is built without CUDA kernels")
        images = (b"", b"") if compiler is None else compile_kernels(compiler, folder)
        made = folder / "embedded.cpp"
        embed(images, made)
        extension.sources = [*sources, str(made)]
        super().build_extension(extension)


setup(
    ext_modules=[
        Pybind11Extension(
            "tierckpt._native",
            sources,
            depends=headers,
            include_dirs=["native"],
            cxx_std=17,
            # No -march: one build serves every machine, the wide kernels are chosen at run time.
            extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)

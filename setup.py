"""Builds torch_dflash2/_C: the operators in C++ and, on macOS, the Metal path in Objective-C++.

Everything else about the package is in pyproject.toml.
"""

import os
import pathlib
import runpy
import sys

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = pathlib.Path("torch_dflash2/csrc")
SOURCES = sorted(CSRC.glob("*.cpp"))
COMPILE = ["-std=c++20", "-O3", "-Wall", "-fvisibility=hidden"]
LINK: list[str] = []
INCLUDE: list[str] = []

if sys.platform == "linux" and "clang" not in os.environ.get("CXX", ""):
    # at::parallel_for is inlined, and serial without this. Not linked: torch brings the runtime, and a second one would have
    # threads of its own. (clang's code asks for another runtime than torch's.)
    COMPILE += ["-fopenmp"]

if sys.platform == "darwin":
    # The shader is embedded here, so that a library without its shader cannot exist. ARC, because the Metal objects then
    # need no reference counting by hand.
    embed = runpy.run_path("torch_dflash2/shaders/embed.py")["embed"]
    INCLUDE += [str(embed(pathlib.Path("build/shaders")).resolve())]
    SOURCES += [CSRC / "mps.mm"]
    COMPILE += ["-fobjc-arc", "-mmacosx-version-min=14.0"]
    LINK += ["-framework", "Metal", "-framework", "Foundation", "-mmacosx-version-min=14.0"]

setup(
    ext_modules=[
        CppExtension(
            "torch_dflash2._C",
            [str(source) for source in SOURCES],
            include_dirs=INCLUDE,
            extra_compile_args=COMPILE,
            extra_link_args=LINK,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)

"""Rewrites the Metal shader as CUDA C++, statement by statement: python convert.py > dflash2.inc

Metal's address spaces and attributes go, functions become __device__, and every kernel NAME that a host can ask for
gets an entry point NAME_cuda(threads_per_grid, buffers..., parameters) with the same bounds as dispatchThreads has. The
text belongs inside metal.cuh's namespace `shader`. What this cannot rewrite does not compile.
"""

import os
import pathlib
import re
import runpy
import shutil
import subprocess

SHADERS = pathlib.Path(__file__).resolve().parents[2] / "torch_dflash2" / "shaders"


def preprocess(source: str) -> str:
    """Expands the shader's own macros with whichever C++ compiler is there."""
    source = re.sub(r"(?m)^#include <metal_stdlib>$", "", source)
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        raise SystemExit("no C++ compiler: expected c++, g++ or clang++ on the PATH, or CXX to name one")
    command = [compiler, "-E", "-P", "-x", "c++", "-nostdinc", "-D__METAL_VERSION__=310", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=True).stdout


def entry_point(name: str, function: str, parameters: str) -> str:
    """The __global__ function that calls `function` as Metal would for the kernel that hosts call `name`."""
    taken, passed = ["dim3 threads_per_grid"], []
    for parameter in re.split(r",(?![^<(\[]*[>)\]])", parameters):
        declared = re.fullmatch(r"\s*(.+?)\s*\[\[(\w+)(?:\(\d+\))?\]\]\s*", parameter, re.S)
        if not declared:
            raise SystemExit(f"kernel {name}: no attribute on parameter {parameter.strip()!r}")
        declaration, attribute = declared.groups()
        if attribute == "thread_position_in_grid":
            passed.append("thread_position")
        elif attribute == "buffer":
            by_value = declaration.startswith("constant") and "&" in declaration  # what the host gives with setBytes
            taken.append(declaration.replace("&", "") if by_value else declaration)
            passed.append(re.findall(r"\w+", declaration)[-1])
        else:
            raise SystemExit(f"kernel {name}: attribute {attribute} has no counterpart here")
    return f"""
__global__ void {name}_cuda({", ".join(taken)}) {{
  const uint3 thread_position{{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
                              blockIdx.z * blockDim.z + threadIdx.z}};
  if (thread_position.x >= threads_per_grid.x || thread_position.y >= threads_per_grid.y ||
      thread_position.z >= threads_per_grid.z)
    return;
  {function}({", ".join(passed)});
}}"""


def convert(source: str) -> str:
    """CUDA C++ of a Metal shader given as one text."""
    text = preprocess(source)
    host_name = r'template\s*\[\[host_name\("(\w+)"\)\]\]'
    named = re.compile(host_name + r"\s*kernel\s+void\s+(\w+\s*<[^()]*>)\s*\((.*?)\)\s*;", re.S)
    plain = re.compile(r"(?<!>)\s\bkernel\s+void\s+(\w+)\s*\(((?:[^{}])*?)\)\s*\{", re.S)
    entries = [entry_point(*kernel) for kernel in named.findall(text)]
    entries += [entry_point(name, name, parameters) for name, parameters in plain.findall(text)]
    if not entries:
        raise SystemExit("the shader has no kernels")

    text = named.sub("", text)
    text = re.sub(r"\binline\b|\bkernel\b", "__device__ __forceinline__", text)
    text = re.sub(r"\bstatic\b(?=[^;={]*\()", "static __device__ __forceinline__", text)  # member functions
    text = re.sub(r"\[\[[^\[\]]*\]\]", "", text + "\n".join(entries))
    text = re.sub(r"\bconstant\s+constexpr\b", "constexpr", text)
    text = re.sub(r"\bconstant\b", "const", text)
    return re.sub(r"\b(device|thread|threadgroup)\s+", "", text) + "\n"


def shader_source() -> str:
    return runpy.run_path(str(SHADERS / "embed.py"))["shader_source"]()


if __name__ == "__main__":
    print(convert(shader_source()), end="")

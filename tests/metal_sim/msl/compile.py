"""Compiles Metal Shading Language text into a shared library of CPU kernels.

usage: compile.py FOLDER --link libmetal_sim.so [--fast] [--coverage] < source.metal

Makes FOLDER with library.so, kernel.metal and warnings.txt, all or nothing; warnings also go to stdout. Exit status 1,
with clang's messages or our own on stdout, if the text does not compile. Line numbers are those of the source.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CXX = os.environ.get("METAL_SIM_CXX", "clang++-19")
DIALECT = ["-x", "c++", "-std=c++17", "-I", str(HERE)]
# Loads and stores must stay what the source says they are: no vectorizing, no memset or memcpy out of loops.
CODEGEN = ["-shared", "-fPIC", "-gline-tables-only", "-gdwarf-4", "-fno-builtin"]
CODEGEN += ["-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine", "-ffp-contract=off"]
CODEGEN += ["--rtlib=compiler-rt", "-w"]
CHECKED = ["-O1", "-fsanitize-coverage=func,trace-loads,trace-stores", "-fsanitize-minimal-runtime"]
CHECKED += ["-fsanitize=shift,integer-divide-by-zero,signed-integer-overflow,bounds,unreachable,float-cast-overflow"]
CHECKED += ["-fno-sanitize-recover=all"]
COVERAGE = ["-fprofile-instr-generate", "-fcoverage-mapping", "-DMSL_COVERAGE"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-attributes", "-Wno-unused-function", "-Wno-c++17-extensions"]

BUILT_IN = {
    "thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threads_per_grid",
    "threads_per_threadgroup", "dispatch_threads_per_threadgroup", "threadgroups_per_grid",
    "thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
    "threads_per_simdgroup", "thread_execution_width", "simdgroups_per_threadgroup",
}  # fmt: skip
NOT_SIMULATED = r"\b(threadgroup|(?:threadgroup|simdgroup)_barrier|(?:simd|quad|atomic)_\w+)\b"


class Error(Exception):
    """The text does not compile."""


def clang(*arguments: str, folder: pathlib.Path | None = None, text: str = "") -> tuple[str, str]:
    """Returns clang's stdout and stderr."""
    result = subprocess.run([CXX, *arguments], input=text, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise Error(result.stderr)
    return result.stdout, result.stderr


def preprocess(source: str) -> str:
    """Expands the source's own macros; <metal_stdlib> stays out of it. Every line keeps its number."""
    for number, line in enumerate(source.splitlines(), 1):
        if not line.isascii():
            raise Error(f"kernel.metal:{number}: error: the text is not ASCII: {line!a}")
    metal = ["-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__=1"]
    text = clang("-E", "-x", "c++", "-std=c++17", "-nostdinc", "-I", str(HERE / "stub"), *metal, "-", text=source)[0]
    lines = [""] * (source.count("\n") + 2)
    at, in_source = 0, False
    for line in text.splitlines():
        if marker := re.match(r'# (\d+) "(.*?)"', line):
            at, in_source = int(marker[1]) - 1, marker[2] == "<stdin>"
        elif in_source:
            lines[at] += line
            at += 1
    text = "\n".join(lines)
    if found := re.search(NOT_SIMULATED, re.sub(r"\[\[.*?\]\]", lambda m: " " * len(m[0]), text)):
        raise Error(f"kernel.metal:{text[: found.start()].count(chr(10)) + 1}: error: '{found[1]}' is not simulated")
    return text


def closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise Error("unbalanced parentheses in a kernel's signature")


def split(parameters: str) -> list[str]:
    """Splits at the commas outside brackets."""
    out, depth, part = [], 0, ""
    for c in parameters:
        depth += (c in "(<[") - (c in ")>]")
        if c == "," and depth == 0:
            out.append(part)
            part = ""
        else:
            part += c
    return [*out, part] if part.strip() else out


def parse_parameter(kernel: str, text: str) -> dict:
    attributes = [a.strip() for group in re.findall(r"\[\[(.*?)\]\]", text) for a in group.split(",")]
    declaration = " ".join(re.sub(r"\[\[.*?\]\]", " ", text).split())
    parsed = re.match(r"(.*?[\s*&])(\w+)$", declaration)
    if not parsed:
        raise Error(f"kernel {kernel}: cannot parse parameter '{declaration}'")
    type_, name = parsed[1].strip(), parsed[2]
    for attribute in attributes:
        if attribute in BUILT_IN:
            return {"name": name, "type": type_, "builtin": attribute}
        if buffer := re.match(r"buffer\s*\(\s*(\d+)\s*\)$", attribute):
            if not re.search(r"\b(constant|device)\b", type_):
                raise Error(f"kernel {kernel}: '{declaration}' must have address space 'device' or 'constant'")
            if type_[-1] not in "*&":
                raise Error(f"kernel {kernel}: '{declaration}' must be a pointer or a reference")
            return {"name": name, "type": type_, "index": int(buffer[1])}
    raise Error(f"kernel {kernel}: parameter '{declaration}' has no attribute that the stand-in knows")


def kernels(text: str) -> list[dict]:
    """The kernels of preprocessed text: name, what to call, parameters, most threads a group (0: not said)."""
    start = r"(?:\bkernel\b|\[\[\s*kernel\s*\]\])(?:\s*\[\[([^\]]*)\]\])?\s+void\s+(\w+)\s*(<[^()]*>)?\s*\("
    found = []
    for m in re.finditer(start, text):
        before = text[: m.start()].rstrip()
        host_name = re.search(r'template\s*\[\[\s*host_name\s*\(\s*"(\w+)"\s*\)\s*\]\]$', before)
        if not host_name and (before.endswith(">") or m[3]):
            continue  # a template's definition, or an instantiation without a name
        end = closing(text, m.end() - 1)
        around = (m[1] or "") + before[before.rfind("}") + 1 :][-200:] + text[end : text.find("{", end)]
        limit = re.search(r"max_total_threads_per_threadgroup\s*\(\s*(\w+)\s*\)", around)
        name = host_name[1] if host_name else m[2]
        parameters = [parse_parameter(name, p) for p in split(text[m.end() : end])]
        indices = [p["index"] for p in parameters if "index" in p]
        if len(indices) != len(set(indices)):
            raise Error(f"kernel {name}: two parameters with the same buffer index")
        if max(indices, default=0) > 30:
            raise Error(f"kernel {name}: a buffer index above 30")
        callee = m[2] + (m[3] or "")
        found.append({"name": name, "callee": callee, "parameters": parameters, "limit": limit[1] if limit else "0"})
    if not found:
        raise Error("no kernel functions")
    return found


def rewrite(text: str) -> str:
    """Takes Metal's attributes out; what is left is C++ under metal_shim.h."""
    text = re.sub(r"(\btemplate\s*)\[\[\s*host_name[^\]]*\]\]", r"\1", text)
    text = re.sub(r"\[\[\s*kernel\s*\]\]", "kernel", text)
    return re.sub(r"\[\[[^\[\]]*\]\]", "", text)


def entry_points(found: list[dict]) -> str:
    """C++ that describes the kernels to the stand-in and calls them."""
    out = [f"#undef {space}\n#define {space}" for space in ("device", "thread")]
    out += ["#undef constant\n#define constant const"]
    table = []
    for i, k in enumerate(found):
        arguments, call = [], []
        for p in k["parameters"]:
            if "builtin" in p:
                call.append(f"msl::value(t->{p['builtin']})")
                continue
            traits = f"msl::parameter<{p['type']}>"
            constant = str("constant" in p["type"].split()).lower()
            fields = ("writable", "pointer", "size", "align")
            described = ", ".join([f'"{p["name"]}"', str(p["index"]), constant, *(f"{traits}::{f}" for f in fields)])
            arguments.append("{" + described + "}")
            call.append(f"{traits}::get(b[{p['index']}])")
        out.append(f"static const msl_argument msl_arguments_{i}[] = {{{', '.join(arguments) or '{}'}}};")
        out.append(f"MSL_PLAIN static void msl_call_{i}(void* const* b, const msl_thread* t) {{")
        out.append(f"  (void)b, (void)t;\n  {k['callee']}({', '.join(call)});\n}}")
        table.append(f'{{"{k["name"]}", msl_arguments_{i}, {len(arguments)}, msl_call_{i}, {k["limit"]}}}')
    out.append(f"static const msl_kernel msl_kernels[] = {{{', '.join(table)}}};")
    out.append(f"MSL_LIBRARY(msl_kernels, {len(found)});")
    return "\n".join(out) + "\n"


def build(source: str, folder: pathlib.Path, link: str, fast: bool, coverage: bool) -> str:
    """Compiles into `folder`; returns clang's warnings."""
    text = preprocess(source)
    found = kernels(text)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        (work / "kernel.metal").write_text(rewrite(text))
        (work / "library.cpp").write_text(f'#include "kernel.metal"\n{entry_points(found)}')
        # A pass with clang's own address spaces finds what an Apple compiler would refuse.
        syntax = [*DIALECT, *WARNINGS, "-include", "metal_shim.h", "-DMSL_STRICT", "-fsyntax-only", "kernel.metal"]
        warnings = clang(*syntax, folder=work)[1]
        flags = [*DIALECT, *CODEGEN, *(["-O2"] if fast else CHECKED), *(COVERAGE if coverage else [])]
        flags += [f"-ffile-compilation-dir={folder}", "-include", "metal_shim.h"]
        clang(*flags, "-o", "library.so", "library.cpp", "-x", "none", link, folder=work)
        (work / "kernel.metal").write_text(source)
        (work / "warnings.txt").write_text(warnings)
        try:
            work.rename(folder)
        except OSError:  # another process was quicker
            if not (folder / "library.so").exists():
                raise
        return warnings
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="compiles Metal text for the CPU")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--link", required=True, metavar="LIBRARY")
    parser.add_argument("--fast", action="store_true", help="check nothing")
    parser.add_argument("--coverage", action="store_true", help="for llvm-cov")
    options = parser.parse_args()
    try:
        warnings = build(sys.stdin.read(), options.folder, options.link, options.fast, options.coverage)
    except Error as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(warnings)
    return 0


if __name__ == "__main__":
    sys.exit(main())

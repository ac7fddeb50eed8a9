"""Builds the stand-in for a Mac, and host code against it.

As a script: python tests/metal_sim/build.py [--clean]. Everything goes into build/metal_sim of the repository. Objects
are kept by the content of what they are made from (files, compiler, torch), so that a second build compiles only what
changed, in whichever process. Locks keep processes from building the same thing twice.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "metal_sim"
CXX = os.environ.get("METAL_SIM_CXX", "clang++-19")

COMMON = ["-std=c++20", "-O1", "-gline-tables-only", "-fPIC", "-Wall", "-Wextra"]
OBJC = ["-fblocks", "-fobjc-runtime=macosx-10.15", "-isystem", str(HERE / "sdk"), "-isystem", str(HERE / "sdk/linux")]
ARC = ["-fobjc-arc"]
RUNTIME = ["-I", str(HERE / "runtime"), "-I", str(HERE / "msl"), "-Werror"]
COVERAGE = ["-fprofile-instr-generate", "-fcoverage-mapping"]
SOURCES = {
    "objc.cpp": [],
    "sim.cpp": [],
    "execute.cpp": ["-O2"],
    "foundation.mm": OBJC,
    "dispatch.mm": OBJC + ARC,
    "metal.mm": OBJC + ARC,
}


class BuildError(RuntimeError):
    """Something did not compile or link, or the compiler is missing; the text says what."""


@functools.cache
def compiler() -> str:
    """The compiler's path."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise BuildError(f"the stand-in runs on Linux, x86-64 or arm64, not on {sys.platform} {platform.machine()}")
    path = shutil.which(CXX)
    if path is None:
        raise BuildError(
            f"{CXX} is not installed, and the stand-in for a Mac is built with it.\n"
            "Debian, Ubuntu: apt-get install clang-19 libclang-rt-19-dev (METAL_SIM_CXX names another clang++ 19)"
        )
    return path


@functools.cache
def torch_flags() -> tuple[list[str], list[str]]:
    """What compiling and linking against the installed torch takes."""
    import torch

    home = Path(torch.__file__).parent
    include = home / "include"
    link = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    return ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")], link


@functools.cache
def toolchain() -> str:
    """Identifies everything outside the project's own sources that a compilation depends on."""
    import torch

    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    header = Path(torch.__file__).parent / "include/torch/library.h"
    sdk = [p for p in sorted((HERE / "sdk").rglob("*.h"))]
    return digest(version, torch.__version__, header, header.stat().st_mtime_ns, *(p.read_bytes() for p in sdk))


def digest(*parts: object) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        h.update(b"%d:" % len(data) + data)
    return h.hexdigest()[:24]


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one thread of one process at a time."""
    (BUILD / "locks").mkdir(parents=True, exist_ok=True)
    with open(BUILD / "locks" / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path]) -> None:
    """Runs a compiler; shows its warnings, raises with its errors."""
    text = [str(c) for c in command]
    result = subprocess.run(text, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{result.stderr.strip()}\nfailed: {shlex.join(text)}")
    sys.stderr.write(result.stderr)


def compile_object(source: Path, flags: Sequence[str], suffix: str = ".o") -> Path:
    """Compiles one file, unless an object of the same content exists."""
    folder = BUILD / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = digest(toolchain(), source, *flags)
    included = folder / f"{recipe}.json"  # what the source included the last time

    def output() -> Path:
        contents = [Path(name).read_bytes() for name in json.loads(included.read_text())]
        return folder / f"{source.stem}-{digest(recipe, *contents)}{suffix}"

    with locked(recipe):
        with contextlib.suppress(FileNotFoundError):
            if (known := output()).exists():
                return known
        new, listing = folder / f"{recipe}.tmp", folder / f"{recipe}.d"
        run([compiler(), *flags, "-MMD", "-MF", listing, "-c", source, "-o", new])
        names = shlex.split(listing.read_text().split(":", 1)[1].replace("\\\n", " "))
        included.write_text(json.dumps([name for name in names if not name.endswith(".pch")]))
        return new.rename(output())


def torch_prefix() -> Path:
    """torch/library.h, precompiled: most of the time that a host file takes."""
    source = BUILD / "torch_prefix.h"
    with locked(source.name):
        if not source.exists():
            source.write_text("#include <torch/library.h>\n")
    flags = ["-x", "objective-c++-header", *COMMON, *OBJC, *ARC, *torch_flags()[0], "-fpch-instantiate-templates"]
    return compile_object(source, flags, ".pch")


def link(output: Path, objects: Iterable[Path], flags: Sequence[str]) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(digest(output)):
        if not output.exists():
            new = output.with_suffix(".tmp")
            run([compiler(), "-shared", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", "-o", new, *objects, *flags])
            new.rename(output)
    return output


def in_parallel(jobs: Iterable[Callable[[], Path]]) -> list[Path]:
    """Runs the jobs; the error, if any, has the text of all that failed."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(job) for job in jobs]
    failures = [str(f.exception()) for f in futures if f.exception()]
    if failures:
        raise BuildError("\n\n".join(failures))
    return [f.result() for f in futures]


def build() -> Path:
    """Builds libmetal_sim.so and libtorch_mps_sim.so, unless they are there, and returns their folder."""
    compiler()  # says what is missing before anything takes time
    runtime, torch_side = HERE / "runtime", HERE / "runtime/torch_mps.mm"

    def torch_object() -> Path:
        return compile_object(torch_side, [*host_flags(), *RUNTIME])

    jobs = [functools.partial(compile_object, runtime / name, [*COMMON, *RUNTIME, *f]) for name, f in SOURCES.items()]
    torch_mps, *objects = in_parallel([torch_object, *jobs])
    shaders = [p.read_bytes() for p in sorted((HERE / "msl").rglob("*")) if p.is_file() and p.suffix != ".pyc"]
    folder = BUILD / digest(torch_mps, *objects, *shaders)  # has the shader cache too
    link(folder / "libmetal_sim.so", objects, ["-Wl,-soname,libmetal_sim.so", "-ldl", "-lpthread"])
    link(folder / "libtorch_mps_sim.so", [torch_mps], [f"-L{folder}", "-lmetal_sim", *torch_flags()[1]])
    return folder


def host_flags() -> list[str]:
    return [*COMMON, *OBJC, *ARC, *torch_flags()[0], "-include-pch", str(torch_prefix())]


def build_extension(
    sources: Iterable[str | Path],
    include_dirs: Iterable[str | Path] = (),
    name: str = "extension",
    extra_flags: Sequence[str] = (),
) -> Path:
    """Compiles a torch extension's .mm and .cpp files, as they are, for the stand-in; returns the shared library.

    The flags are those of the package on a Mac (C++20, ARC for .mm). With METAL_SIM_COVERAGE=1 the library is built for
    llvm-cov. Raises BuildError with the compiler's text.
    """
    folder = build()
    flags = [*(f"-I{Path(d).resolve()}" for d in include_dirs), *extra_flags]
    if os.environ.get("METAL_SIM_COVERAGE", "0") != "0":
        flags += COVERAGE

    def job(source: Path) -> Path:
        common = host_flags() if source.suffix == ".mm" else [*COMMON, *torch_flags()[0]]
        return compile_object(source, [*common, *flags])

    objects = in_parallel([functools.partial(job, Path(s).resolve()) for s in sources])
    output = folder / f"{name}-{digest(*objects, *flags)}.so"
    if used := os.environ.get("METAL_SIM_USED"):
        with open(used, "a") as file:
            file.write(f"{output}\n")
    return link(output, objects, [*flags, f"-L{folder}", "-lmetal_sim", *torch_flags()[1]])


def main() -> int:
    parser = argparse.ArgumentParser(description="builds the stand-in for a Mac")
    parser.add_argument("--clean", action="store_true", help="build everything again")
    if parser.parse_args().clean:
        shutil.rmtree(BUILD, ignore_errors=True)
    started = time.monotonic()
    try:
        folder = build()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

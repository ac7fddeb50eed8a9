"""Compiles the package for arm64 macOS 14 and links it strictly against torch's macOS wheels, on any machine.

usage: python tests/mac_check/check.py [--torch 2.10.0 ...]

Needs PyPI's `ziglang` (compiler and linker) and pip. The wheels' headers and libraries are kept in build/mac_check.
Prints a line for each version of torch; exit status 1, with the compiler's text, if anything fails. See README.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "torch_dflash2"
BUILD = ROOT / "build/mac_check"

OLDEST, CLAIMED = "2.10.0", "torch>=2.10,<2.16"
PLATFORM = ["--platform", "macosx_14_0_arm64", "--python-version", "3.11", "--only-binary=:all:", "--no-deps"]
LIBRARIES = ["libc10.dylib", "libtorch.dylib", "libtorch_cpu.dylib"]

TARGET = ["-target", "aarch64-macos.14.0"]
# As setup.py compiles, and warnings are errors: also of what is newer than macOS 14 and not guarded by @available.
COMPILE = ["-std=c++20", "-O0", "-Wall", "-Werror", "-Wunguarded-availability-new", "-fvisibility=hidden"]
SDK = ["-isystem", str(ROOT / "tests/metal_sim/sdk")]

# What a Mac would refuse and in which words, so that the check shows that it has teeth.
REFUSED = {
    "void f(id<MTLDevice> d) { [d newLibrary]; }": "no known instance method for selector 'newLibrary'",
    "void f(id<MTLFunction> f) { f.label = 3.0; }": "from incompatible type 'double'",
    "void f(MTLCompileOptions* o) { o.mathMode = MTLMathModeSafe; }": "only available on macOS 15.0 or newer",
    "void f(id<MTLDevice> d) { [d release]; }": "ARC forbids explicit message send",
    "void missing(); void f() { missing(); }": "undefined symbol",
}
ACCEPTED = """void f(MTLCompileOptions* o) { if (@available(macOS 15.0, *)) o.mathMode = MTLMathModeSafe; }
id<MTLLibrary> g(NSString* s) { return [MTLCreateSystemDefaultDevice() newLibraryWithSource:s options:nil error:nil]; }
bool h(NSError* e) { return [[e localizedDescription] isEqualToString:@"a literal"]; }
"""


class CheckError(Exception):
    """The text says what went wrong."""


def run(command: Sequence[str | Path]) -> None:
    text = [str(c) for c in command]
    result = subprocess.run(text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise CheckError(f"{result.stdout.strip()}\nfailed: {' '.join(text)}")


def pip(*arguments: str | Path) -> None:
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])


def newest() -> str:
    """The newest torch for macOS that pip can give, of those that we claim."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--dry-run", "--ignore-installed", "--target", folder, *PLATFORM, "--report", report, CLAIMED)
        return json.loads(report.read_text())["install"][0]["metadata"]["version"]


def wheel(version: str) -> Path:
    """The headers and libraries of torch's macOS wheel: downloaded once."""
    home = BUILD / f"torch-{version}"
    if home.exists():
        return home
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        pip("download", *PLATFORM, "-d", folder, f"torch=={version}")
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as z:
            wanted = ("torch/include/", *(f"torch/lib/{name}" for name in LIBRARIES))
            z.extractall(Path(folder) / "unzipped", [n for n in z.namelist() if n.startswith(wanted)])
        (Path(folder) / "unzipped/torch").rename(home)
    return home


def digest(files: Iterable[Path]) -> str:
    h = hashlib.sha256(importlib.metadata.version("ziglang").encode())
    for file in files:
        h.update(f"{file} {file.stat().st_size}\n".encode() + file.read_bytes())
    return h.hexdigest()[:24]


def compile_source(source: Path, output: Path, flags: Sequence[str]) -> Path:
    language = ["-x", "objective-c++", "-fobjc-arc"] if source.suffix == ".mm" else ["-x", "c++"]
    run([sys.executable, "-m", "ziglang", "c++", *TARGET, *language, *COMPILE, *flags, "-c", source, "-o", output])
    return output


def link(objects: Iterable[Path], output: Path, libraries: Iterable[Path] = ()) -> None:
    """Every symbol must be in one of the libraries; torch's own extension builds leave that to the loader."""
    stubs = sorted((HERE / "tbd").glob("*.tbd"))
    run([sys.executable, "-m", "ziglang", "c++", *TARGET, "-shared", *objects, *libraries, *stubs, "-o", output])


def check_teeth(folder: Path) -> None:
    """The check refuses what it must, and only that."""

    def build(text: str) -> None:
        source = folder / "sample.mm"
        source.write_text(f"#import <Metal/Metal.h>\n{text}")
        link([compile_source(source, folder / "sample.o", SDK)], folder / "sample.so")

    build(ACCEPTED)
    for text, expected in REFUSED.items():
        try:
            build(text)
        except CheckError as error:
            if expected not in str(error):
                raise
        else:
            raise CheckError(f"the check accepts what no Mac would: {text}")


def check(version: str, sources: Sequence[Path], include: Path, folder: Path) -> None:
    home = wheel(version)
    headers = home / "include"
    flags = [*SDK, "-isystem", str(headers), "-isystem", str(headers / "torch/csrc/api/include"), "-I", str(include)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_source, s, folder / f"{s.name}.o", flags) for s in sources]
    failures = [str(job.exception()) for job in jobs if job.exception()]
    if failures:
        raise CheckError("\n\n".join(failures))
    link([job.result() for job in jobs], folder / "_C.so", [home / "lib" / name for name in LIBRARIES])


def main() -> int:
    parser = argparse.ArgumentParser(description="compiles and links the package for arm64 macOS")
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="default: the oldest and newest we claim")
    parser.add_argument("--sources", nargs="+", type=Path, help="default: torch_dflash2/csrc/*.cpp and *.mm")
    options = parser.parse_args()
    sources = options.sources or sorted((PACKAGE / "csrc").glob("*.cpp")) + sorted((PACKAGE / "csrc").glob("*.mm"))
    if importlib.util.find_spec("ziglang") is None:
        print("the compiler for macOS is missing: pip install ziglang", file=sys.stderr)
        return 1
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(BUILD / "zig")
    folders = [PACKAGE / "csrc", PACKAGE / "shaders", HERE / "tbd", ROOT / "tests/metal_sim/sdk"]
    inputs = [HERE / "check.py", *(f for d in folders for f in sorted(d.rglob("*")) if f.is_file())]
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            run([sys.executable, PACKAGE / "shaders/embed.py", folder])
            check_teeth(folder)
            versions = options.torch or [OLDEST, newest()]
        except CheckError as error:
            print(error, file=sys.stderr)
            return 1
        for version in versions:
            started = time.monotonic()
            passed = BUILD / f"passed-{version}-{digest([*sources, *inputs])}"
            if passed.exists():
                print(f"torch {version}: nothing changed since it compiled and linked for arm64 macOS 14")
                continue
            try:
                check(version, sources, folder, folder)
            except CheckError as error:
                failed = True
                print(f"torch {version}: FAILED\n{error}", file=sys.stderr)
            else:
                seconds = time.monotonic() - started
                passed.touch()
                names = ", ".join(s.name for s in sources)
                print(f"torch {version}: compiled and linked for arm64 macOS 14 in {seconds:.0f} s ({names})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

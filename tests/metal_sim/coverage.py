"""Line coverage of host code and shaders, from tests on the stand-in.

usage: python tests/metal_sim/coverage.py [--least PERCENT] FILE... -- PYTHON ARGUMENTS

Runs `python PYTHON ARGUMENTS` (say, -m pytest tests/test_operators.py) with everything built for llvm-cov, and prints
for each FILE how many lines were run and which were not. A host file goes by its path or the end of it; a shader is
kernel.metal. Exit status 1 below PERCENT. Needs Debian's llvm-19.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path


def tool(name: str) -> str:
    path = shutil.which(f"{name}-19")
    if path is None:
        raise SystemExit(f"{name}-19 is not installed (Debian, Ubuntu: apt-get install llvm-19)")
    return path


def line_counts(lcov: str) -> dict[str, dict[int, int]]:
    """How often each line of each file was run."""
    files: dict[str, dict[int, int]] = collections.defaultdict(dict)
    name = ""
    for record in lcov.splitlines():
        kind, _, value = record.partition(":")
        if kind == "SF":
            name = value
        elif kind == "DA":
            line, count = (int(n) for n in value.split(",")[:2])
            files[name][line] = max(count, files[name].get(line, 0))
    return files


def ranges(lines: Iterable[int]) -> str:
    """1, 2, 3, 7 -> 1-3, 7"""
    runs: list[list[int]] = []
    for line in sorted(lines):
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--least", type=float, default=0)
    parser.add_argument("files", nargs="+")
    if "--" not in sys.argv:
        parser.error("no -- PYTHON ARGUMENTS")
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        used = folder / "used"  # the libraries that took part
        settings = {"METAL_SIM_COVERAGE": "1", "METAL_SIM_USED": str(used)}
        settings["LLVM_PROFILE_FILE"] = str(folder / "%m-%p.profraw")
        tests = subprocess.run([sys.executable, *sys.argv[split + 1 :]], env={**os.environ, **settings})
        if tests.returncode:
            return tests.returncode
        if not used.exists():
            raise SystemExit("nothing ran on the stand-in")
        merged = folder / "profdata"
        subprocess.run([tool("llvm-profdata"), "merge", "-o", merged, *folder.glob("*.profraw")], check=True)
        objects = [f"-object={path}" for path in sorted(set(used.read_text().split()))]
        export = [tool("llvm-cov"), "export", "-format=lcov", f"-instr-profile={merged}", *objects]
        counts = line_counts(subprocess.check_output(export, text=True))

    enough = True
    for wanted in options.files:
        found = [name for name in counts if Path(name).match(wanted)]
        if not found:
            raise SystemExit(f"no code of {wanted} was run")
        for name in found:
            missed = [line for line, count in counts[name].items() if not count]
            percent = 100 * (1 - len(missed) / len(counts[name]))
            enough &= percent >= options.least
            rest = f", not {ranges(missed)}" if missed else ""
            print(f"{name}: {percent:.1f} % of {len(counts[name])} lines{rest}")
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())

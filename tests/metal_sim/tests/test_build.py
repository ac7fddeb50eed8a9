"""Building: by content, in several processes, with the compiler's text when it fails."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import metal_sim

BRANCH = """kernel void k0(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i > 100)
    a[i] = 1;
  a[i] = 2;
}
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(metal_sim.__file__).parents[1])}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include/value.h").write_text("#define VALUE 1\n")
    (tmp_path / "small.cpp").write_text('#include "value.h"\nint value() { return VALUE; }\n')
    return tmp_path / "small.cpp"


def build(source, **options):
    return metal_sim.build_extension([source], [source.parent / "include"], name="small", **options)


def test_by_content(source):
    first = build(source)
    assert first.exists() and first.parent == metal_sim.build() and build(source) == first
    built = first.stat().st_mtime_ns
    header = source.parent / "include/value.h"
    header.write_text("#define VALUE 2\n")
    second = build(source)
    assert second != first
    header.write_text("#define VALUE 1\n")
    assert build(source) == first and first.stat().st_mtime_ns == built
    assert build(source, extra_flags=["-DOTHER"]) not in (first, second)


def test_failures_have_the_compilers_text(source):
    other = source.with_name("other.cpp")
    source.write_text("int value() { return VALU; }\n")
    other.write_text("int other() { return missing }\n")
    with pytest.raises(metal_sim.BuildError) as error:
        metal_sim.build_extension([source, other], name="small")
    assert "small.cpp:1:22: error: use of undeclared identifier 'VALU'" in str(error.value)
    assert "other.cpp:1:22: error: use of undeclared identifier 'missing'" in str(error.value)
    source.write_text("int elsewhere(); int value() { return elsewhere(); }\n")
    with pytest.raises(metal_sim.BuildError, match=r"undefined reference to `elsewhere\(\)'"):
        metal_sim.build_extension([source], name="small")


def test_at_the_same_time(source):
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(build, [source] * 4))) == 1


def test_a_missing_compiler_says_how_to_get_it():
    script = Path(metal_sim.__file__).with_name("build.py")
    command = [sys.executable, str(script)]
    result = subprocess.run(command, env={**ENVIRONMENT, "METAL_SIM_CXX": "clang++-0"}, capture_output=True, text=True)
    assert result.returncode == 1
    assert "clang++-0 is not installed" in result.stderr
    assert "apt-get install clang-19 libclang-rt-19-dev" in result.stderr


def test_coverage():
    """Of a kernel; host code goes the same way, by the flags of build_extension."""
    probe = metal_sim.build_extension([Path(__file__).parent / "probe.mm"], name="probe")
    code = f"""
import metal_sim
metal_sim.load()
import torch
torch.ops.load_library({str(probe)!r})
from metal_sim.tests.kernels import pair, run
run({BRANCH!r}, tensors=pair())
"""
    script = Path(metal_sim.__file__).with_name("coverage.py")
    command = [sys.executable, str(script), "kernel.metal", "--least", "90", "--", "-c", code]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert "kernel.metal: 80.0 % of 5 lines, not 3" in result.stdout, result.stderr
    assert result.returncode == 1

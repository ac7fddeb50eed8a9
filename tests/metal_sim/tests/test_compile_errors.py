"""What Apple's shader compiler would refuse, and what reaches the host of its messages."""

import pytest
import torch

import metal_sim

from .kernels import AB, library, pair, run

REFUSED = {
    "a[i] = c[i];": "kernel.metal:4:.*undeclared identifier 'c'",
    "device float* p = &b[i]; *p = 1;": "kernel.metal:4:.*cannot initialize",  # drops const
    "float* p = a + i; *p = 1;": "kernel.metal:4:.*cannot initialize",  # no address space
    "double d = 1; a[i] = d;": "kernel.metal:4:.*poisoned",
    "a[i] = min(i, 3);": "kernel.metal:4:.*no matching function for call to 'min'",
    "a[i] = float4(1, 2, 3).x;": "wrong number of components",
    "a[i] = as_type<float>(ulong(1));": "as_type: the sizes differ",
    "threadgroup float s[64]; s[i] = a[i];": "kernel.metal:4:.*'threadgroup' is not simulated",
    "a[i] = b[i]; // \N{MULTIPLICATION SIGN} 2": r"kernel.metal:4:.*not ASCII: .*\\xd7",
    "a[i] = b[i]": "kernel.metal:4:.*expected ';'",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused(body):
    with pytest.raises(RuntimeError, match="(?s)program_source: .*" + REFUSED[body]):
        run(library([body]), "k0", pair())


SIGNATURES = {
    "const float* a [[buffer(0)]]": "must have address space 'device' or 'constant'",
    "device float a [[buffer(0)]]": "must be a pointer or a reference",
    "device float* a [[buffer(0)]], device float* b [[buffer(0)]]": "two parameters with the same buffer index",
    "device float* a [[buffer(31)]]": "a buffer index above 30",
    "device float* a": "has no attribute that the stand-in knows",
}


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_refused_signature(parameters):
    with pytest.raises(RuntimeError, match=SIGNATURES[parameters]):
        run(library([""], parameters), "k0", pair())


def test_missing_function_and_kernel():
    with pytest.raises(RuntimeError, match="no function other"):
        run(library(["a[i] = b[i];"]), "other", pair())
    with pytest.raises(RuntimeError, match="no kernel functions"):
        run("#include <metal_stdlib>\n", "k0", pair())


def test_warnings_leave_a_library_and_a_text():
    before = len(metal_sim.warnings())
    source = library(["uint unused = 0; a[i] = b[i];"])
    for _ in range(2):  # the second time from the cache
        run(source, "k0", pair())
    warnings = metal_sim.warnings()[before:]
    assert len(warnings) == 2 and all("kernel.metal:4:6: warning: unused variable 'unused'" in w for w in warnings)


def test_helpers_templates_macros_and_host_names():
    head = """#define TWICE(x) \\
  ((x) + (x))
struct Params { uint n; float scale; };
constant float kTable[2] = {1.0f, 2.0f};
template <typename T> inline void store(device T* p, uint i, T v) { p[i] = v; }
template <typename T>
kernel void scale(device T* a [[buffer(0)]], device const T* b [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  store(a, i, T(TWICE(b[i]) * T(kTable[i & 1])));
}
template [[host_name("scale_f32")]] kernel void scale<float>(device float* a [[buffer(0)]],
    device const float* b [[buffer(1)]], uint i [[thread_position_in_grid]]);
template [[host_name("scale_f16")]] kernel void scale<half>(device half* a [[buffer(0)]],
    device const half* b [[buffer(1)]], uint i [[thread_position_in_grid]]);
"""
    source = library(["a[i] = c[i];"], AB, head)
    with pytest.raises(RuntimeError, match=r"kernel.metal:17:.*undeclared identifier 'c'"):  # lines stay what they are
        run(source, "k0", pair())
    source = library([], head=head)
    for name, dtype in ("scale_f32", torch.float32), ("scale_f16", torch.float16):
        a, b = (t.to(dtype) for t in pair())
        run(source, name, [a, b], group=(32, 1, 1))
        assert torch.equal(a.cpu(), (b.cpu() * 2 * torch.tensor([1, 2]).repeat(32)).to(dtype))

"""Kernels for the stand-in's own tests, many to a library: compiling one takes a second."""

import torch

AB = "device float* a [[buffer(0)]], device const float* b [[buffer(1)]], uint i [[thread_position_in_grid]]"


def library(bodies, parameters=AB, head=""):
    """Metal text with kernels k0, k1, ... of these bodies; body n is line 4 + 3 * n (after the head)."""
    text = f"#include <metal_stdlib>\nusing namespace metal;\n{head}"
    for n, body in enumerate(bodies):
        assert "\n" not in body
        text += f"kernel void k{n}({parameters}) {{\n{body}\n}}\n"
    return text


def run(source, name="k0", tensors=(), grid=(64, 1, 1), group=(64, 1, 1), mistake=""):
    torch.ops.probe.run(source, name, grid, group, tensors, mistake)
    torch.mps.synchronize()


def pair(n=64):
    """Zeros, and 0, 1, 2, ..."""
    return [torch.zeros(n, device="mps"), torch.arange(float(n), device="mps")]

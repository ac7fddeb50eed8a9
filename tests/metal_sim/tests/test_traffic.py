"""Memory traffic: what SIMD groups of 32 threads ask for and touch."""

import torch

import metal_sim

from .kernels import library, pair, run

SOURCE = library(["a[i] = b[i] + b[(i % 32) * 32];", "a[i] = b[0];", "a[i / 32 * 32 + 31 - i % 32] = b[i];"])


def traffic(kernel, tensors, n=1024):
    with metal_sim.traced() as trace:
        run(SOURCE, kernel, tensors, grid=(n, 1, 1), group=(256, 1, 1))
    return trace.traffic


def test_contiguous_and_strided():
    t = traffic("k0", pair(1024))
    # 32 SIMD groups, each 128 contiguous bytes
    assert t["k0/a"] == metal_sim.Traffic(32, 4096, sectors=128, lines=32, unique_sectors=128, unique_lines=32)
    # the strided load touches a piece for every thread, always the same 32
    assert t["k0/b"] == metal_sim.Traffic(64, 8192, 128 + 1024, 32 + 1024, 128, 32)


def test_broadcast_and_permuted():
    assert traffic("k1", pair(1024))["k1/b"] == metal_sim.Traffic(32, 4096, 32, 32, 1, 1)
    assert traffic("k2", pair(1024))["k2/a"] == metal_sim.Traffic(32, 4096, 128, 32, 128, 32)


def test_a_view_off_the_grid_of_pieces():
    a, b = pair(1032)
    t = traffic("k2", [a[4:1028], b[4:1028]])  # 16 bytes into the buffer
    assert t["k2/b"].sectors == 32 * 5 and t["k2/b"].unique_sectors == 129


def test_nothing_is_recorded_outside():
    assert "k1/b" in traffic("k1", pair(1024))
    run(SOURCE, "k2", pair(1024))
    assert "k2/b" not in torch.ops.metal_sim.traffic()

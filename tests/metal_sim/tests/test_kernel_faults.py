"""What a kernel does wrong and a GPU hides."""

import pytest
import torch

import metal_sim

from .kernels import AB, library, pair, run

FAULTS = {
    "a[i] = b[i + 1];": "load of 4 bytes out of bounds; nearest is 'b' at byte 256 of 256",
    "a[i + 1] = b[i];": "store of 4 bytes out of bounds; nearest is 'a' at byte 256 of 256",
    "a[i] = b[int(i) - 1];": "load of 4 bytes out of bounds; nearest is 'b' at byte -4",
    "a[i - 64] = 0;": "store of 4 bytes out of bounds",
    "*(device float2*)(a + i + 1) = float2(0);": "misaligned store of 8 bytes",
    "if (i == 3) *(device float*)((device char*)a + 2) = 1;": "misaligned store of 4 bytes",
    "a[i] = *(device const float*)((device const char*)b + i);": "misaligned load of 4 bytes",
    "*(device float*)(ulong)(b + i) = 1;": "store to read-only b",
    "a[0] = b[i];": "write/write race on a byte 0 with thread #0",
    "a[i] = a[(i + 1) % 64];": "race on a byte",
    "if (i == 0) a[1] = 1; else if (i == 2) a[2] = a[1];": "read/write race on a byte 4 with thread #0",
    "if (i == 0) a[2] = a[1]; else if (i == 1) a[1] = 1;": "write/read race on a byte 4 with thread #0",
    "a[i] = float(7 / (int(i) - 5));": "integer division by zero",
    "a[i] = float(7u % (i / 5));": "integer division by zero",
    "a[i] = float(1 << (i + 1));": "shift by a negative or too large amount",
    "a[i] = float((int(i) + 2147483600) * 2);": "signed integer overflow",
    "int x[4]; for (uint j = 0; j < 4; ++j) x[j] = j; a[i] = float(x[i]);": "array index out of bounds",
    "a[i] = float(int(b[i] * 1e12f));": "does not fit the integer type",
}
SOURCE = library(FAULTS)


@pytest.mark.parametrize("n, message", list(enumerate(FAULTS.values())))
def test_fault(n, message):
    with pytest.raises(RuntimeError, match=message) as error:
        run(SOURCE, f"k{n}", pair())
    assert f"kernel k{n} at kernel.metal:{4 + 3 * n}: " in str(error.value)


SOUND = {
    "a[i] = b[i] * 2;": lambda a, b: b * 2,
    "a[63 - i] = b[i];": lambda a, b: b.flip(0),
    "a[i] += 1; a[i] += b[i];": lambda a, b: b + 1,
    "if (i % 4 == 0) *(device float4*)(a + i) = *(device const float4*)(b + i);": lambda a, b: b,
    "a[i] = as_type<float>(as_type<uint>(b[i]) ^ 0x80000000u);": lambda a, b: -b,
    "a[i] = float(uint(0u - 1u) >> 31) + float(clamp(int(i) - 8, 0, 3));": lambda a, b: 1 + (b - 8).clamp(0, 3),
    "a[i] = b[max(i, 5u)] + b[min(i, 3u)];": lambda a, b: b.clamp(min=5) + b.clamp(max=3),
    "a[i] = b[(i + 1) % 64];": lambda a, b: b.roll(-1),
    "const float4 v = float4(b[i], float2(1, 2), 3); a[i] = v.x + v.y * v.z - v.w;": lambda a, b: b - 1,
}


@pytest.mark.parametrize("n, expected", list(enumerate(SOUND.values())))
def test_sound_kernels_pass(n, expected):
    a, b = pair()
    run(library(SOUND), f"k{n}", [a, b], group=(24, 1, 1))
    assert torch.equal(a.cpu(), expected(torch.zeros(64), torch.arange(64.0)))


def test_unchecked_kernels_compute_the_same():
    for n, expected in enumerate(SOUND.values()):
        a, b = pair()
        with metal_sim.options(checks=0):
            run(library(SOUND), f"k{n}", [a, b], group=(24, 1, 1))
        assert torch.equal(a.cpu(), expected(torch.zeros(64), torch.arange(64.0)))
    with metal_sim.options(checks=0):
        run(SOURCE, "k8", pair())  # a race, not looked for


def test_races_are_between_threads_of_any_threadgroup():
    with pytest.raises(RuntimeError, match="write/write race on a byte 0 with thread #0"):
        run(library(["a[i / 32 * 0 + i % 32] = 1;"]), "k0", pair(), group=(32, 1, 1))


def test_a_buffer_bound_twice():
    t = torch.zeros(128, device="mps")
    run(SOURCE, "k0", [t[64:], t[:64]], grid=(63, 1, 1))  # reads one half, writes the other
    with pytest.raises(RuntimeError, match=r"race on [ab] byte"):
        run(SOURCE, "k0", [t, t])


def test_buffers_beyond_32_bits_take_no_memory():
    n = 2**31 + 64  # elements: 4 GiB and a little
    big = torch.empty(n, dtype=torch.bfloat16, device="mps")
    source = library(
        ["a[ulong(i) + 2147483648ul] = ushort(i); a[i] = ushort(64 - i);"],
        "device ushort* a [[buffer(0)]], uint i [[thread_position_in_grid]]",
    )
    run(source, "k0", [big])
    assert big[-64:].view(torch.int16).tolist() == list(range(64))
    assert big[:64].view(torch.int16).tolist() == list(range(64, 0, -1))
    end = big[-32:]  # a view whose offset needs 33 bits
    run(library(["a[i] = 7;"], "device ushort* a [[buffer(0)]], uint i [[thread_position_in_grid]]"), "k0", [end], (32, 1, 1))
    assert end.view(torch.int16).tolist() == [7] * 32 and big[-33].view(torch.int16).item() == 31


def test_built_in_values():
    text = library(
        ["a[(p.z * 3 + p.y) * 5 + p.x] = uint(g.x + 10 * g.y + 100 * g.z) + 1000 * t + 100000 * s;"],
        "device uint* a [[buffer(0)]], uint3 p [[thread_position_in_grid]], uint3 g [[threadgroup_position_in_grid]], "
        "uint t [[thread_index_in_threadgroup]], ushort s [[simdgroup_index_in_threadgroup]]",
    )
    a = torch.zeros(2, 3, 5, dtype=torch.int32, device="mps")
    run(text, "k0", [a], grid=(5, 3, 2), group=(4, 2, 1))
    a = a.cpu()
    assert a[0, 0].tolist() == [0, 1000, 2000, 3000, 1]
    assert a[1, 2].tolist() == [110, 1110, 2110, 3110, 111]  # the last groups are cut off at the grid
    with pytest.raises(RuntimeError, match=r"race|out of bounds"):  # dispatchThreadgroups does not cut
        run(text, "k0", [a.to("mps")], grid=(2, 2, 2), group=(4, 2, 1), mistake="threadgroups")


def test_bfloat_conversion_is_that_of_torch():
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 12,), dtype=torch.int64, generator=g).to(torch.int32)
    special = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x00000001, 0x00008000, 0x00018000]
    edges = torch.tensor(special, dtype=torch.int32)
    x = torch.cat([bits, edges, edges | -(2**31)]).view(torch.float32)
    out = torch.empty(x.numel(), dtype=torch.bfloat16, device="mps")
    source = library(["a[i] = bfloat(b[i]);"], AB.replace("float* a", "bfloat* a"))
    run(source, "k0", [out, x.to("mps")], grid=(x.numel(), 1, 1))
    torch.testing.assert_close(out.cpu(), x.bfloat16(), rtol=0, atol=0, equal_nan=True)

"""What each Metal kernel moves, and how long that takes at the least on GPUs of three memory speeds.

    python benchmarks/metal_bytes.py [--lanes 1] [--q-heads 32] [--kv-heads 8] [--head-dim 128] [--rows 16] [--window 2048]

The real shader and host code run on the stand-in for a Mac (tests/metal_sim), which counts the memory they touch, in pieces
of 32 bytes. "touched" counts each of them once, as a perfect cache would; "uncached" counts it for every instruction of 32
threads that asks for it, the lane's length and position included. The floor is what is touched, over the bandwidth of three
classes of Apple GPUs. It is arithmetic: no time was measured on one.
"""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
BANDWIDTHS = (120, 300, 546)  # GB/s
TOKENS = 8  # committed at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("lanes", 1), ("q-heads", 32), ("kv-heads", 8), ("head-dim", 128), ("rows", 16), ("window", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hidden-size", type=int, default=5120)
    g = parser.parse_args()

    import conftest  # noqa: F401  loads the stand-in and the Metal path into this process
    import metal_sim
    import torch

    ops = torch.ops.dflash2

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="mps")

    full = torch.full((g.lanes,), 10 * g.window + 3, dtype=torch.int32, device="mps")
    keys, values = (tensor(g.lanes, g.kv_heads, g.window, g.head_dim, dtype=torch.bfloat16) for _ in range(2))
    queries = tensor(g.lanes, g.rows, g.q_heads, g.head_dim)
    current = tensor(g.lanes, g.rows, g.kv_heads, g.head_dim)
    other = torch.zeros_like(current)
    tokens = tensor(g.lanes, TOKENS, g.kv_heads, g.head_dim)
    more = torch.zeros_like(tokens)
    counts = torch.full((g.lanes,), TOKENS, dtype=torch.int32, device="mps")
    hidden, embedding = tensor(g.lanes * g.rows, g.hidden_size), tensor(g.hidden_size, dtype=torch.bfloat16)

    packed = g.window - 1 + g.rows
    ring_rows = 2 * g.lanes * g.kv_heads * (g.window - 1) * g.head_dim * 2
    packed_rows = 2 * g.lanes * g.kv_heads * packed * g.head_dim * 2
    numbers = 4 * g.lanes  # bytes of an argument with one int32 a lane
    calls = {  # the call, bytes it must read, bytes it must write
        "pack_attention": (
            lambda: ops.pack_attention(keys, values, queries, current, other, full, counts),
            4 * (queries.numel() + 2 * current.numel()) + ring_rows + 2 * numbers,
            2 * queries.numel() + packed_rows,
        ),
        "fill_attention_mask": (
            lambda: ops.fill_attention_mask(full, g.q_heads, g.rows, g.window),
            numbers,
            2 * g.lanes * g.q_heads * g.rows * packed,
        ),
        "fill_attention_mask of a group": (
            lambda: ops.fill_attention_mask(full, g.q_heads // g.kv_heads, g.rows, g.window),
            numbers,
            2 * g.lanes * g.q_heads // g.kv_heads * g.rows * packed,
        ),
        f"commit_kv of {TOKENS}": (
            lambda: ops.commit_kv(tokens, more, counts, full, keys, values),
            8 * tokens.numel() + 2 * numbers,
            4 * tokens.numel(),
        ),
        "set_mask_rows": (
            lambda: ops.set_mask_rows(embedding, hidden, g.lanes, g.rows),
            2 * g.hidden_size,
            4 * g.lanes * (g.rows - 1) * g.hidden_size,
        ),
    }
    print(f"B {g.lanes}, H/Hk {g.q_heads}/{g.kv_heads}, D {g.head_dim}, R {g.rows}, W {g.window}, hidden {g.hidden_size}")
    print("float32 current tensors, full rings. Counted on a stand-in for a Mac: no Apple GPU ran this.")
    floors = "".join(f"{f'us at {speed}':>11}" for speed in BANDWIDTHS)
    print(f"{'':32}{'must read':>12}{'must write':>12}{'touched':>12}{'uncached':>12}{floors}")
    for name, (call, read, written) in calls.items():
        torch.mps.synchronize()
        with metal_sim.traced() as trace:
            call()
        touched = 32 * sum(argument.unique_sectors for argument in trace.traffic.values())
        uncached = 32 * sum(argument.sectors for argument in trace.traffic.values())
        times = "".join(f"{touched / speed / 1e3:>11.1f}" for speed in BANDWIDTHS)
        print(f"{name:32}{read:>12,}{written:>12,}{touched:>12,}{uncached:>12,}{times}")


if __name__ == "__main__":
    main()

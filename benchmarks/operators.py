"""What each operator costs, beside a copy of the bytes that it writes and beside plain PyTorch of the same function.

All contenders of a row run in turns in one process, after a warm-up, and are compared by their medians: the ratios mean
something also on a busy machine, the microseconds do not. A ratio is ours over theirs, so below 1 is faster:

    copy      Tensor.copy_ of as many bytes as the operator writes
    eager     torch_dflash2.reference, which is plain PyTorch
    compiled  the same under torch.compile

`.out` and the operators that write in place use memory that exists; the functional form makes its own, like eager and
compiled PyTorch. The last lines compare a call that does next to nothing with torch.add of one element.

    python benchmarks/operators.py [--all] [--device mps] [--threads 1] [--only pack_attention] [--json FILE]
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from torch_dflash2 import reference

ops = torch.ops.dflash2
CONTENDERS = ("copy", "eager", "compiled")
OPERATORS = ("pack_attention", "fill_attention_mask", "commit_kv", "set_mask_rows")
SHORTEST = 1e-4  # seconds that can be timed
HIDDEN_SIZE = {32: 4096, 64: 5120}  # of the models with so many query heads


@dataclass(frozen=True)
class Geometry:
    lanes: int
    q_heads: int
    head_dim: int
    rows: int
    window: int
    current: str = "float32"
    kv_heads: int = 8

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        return f"{self.lanes:>2} {heads:>5} {self.head_dim:>4} {self.rows:>3} {self.window:>5}  {self.current}"


HEADINGS = " B  H/Hk    D   R     W  current"
ALL = [
    Geometry(*g)
    for g in itertools.product((1, 4), (32, 64), (128, 256), (8, 16), (512, 2048, 4096, 8192), ("float32", "bfloat16"))
]
SOME = [
    Geometry(1, 32, 128, 8, 512),
    Geometry(1, 32, 128, 8, 2048),
    Geometry(1, 64, 256, 16, 2048, "bfloat16"),
    Geometry(4, 32, 128, 8, 2048),
    Geometry(4, 32, 256, 8, 2048),
    Geometry(1, 32, 128, 8, 8192),
]


@dataclass(frozen=True)
class Calls:
    """One row: calls without arguments that do the same work, and the bytes that it must read and write."""

    ours: dict[str, Callable[[], object]]  # "out" or "in place", and "functional"
    eager: Callable[[], object]
    written: list[Tensor]  # of what is written, tensors of that size: what `copy` copies
    bytes_read: int

    @property
    def bytes_written(self) -> int:
        return sum(t.nbytes for t in self.written)


def calls(operator: str, g: Geometry, device: str) -> Calls:
    """Full rings that wrap, and as many tokens committed as the block has rows."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: str = "bfloat16") -> Tensor:
        return torch.randn(shape, generator=random).to(device, getattr(torch, dtype))

    counts = torch.full((g.lanes,), 10 * g.window + g.window // 3, dtype=torch.int32, device=device)
    rings = [normal(g.lanes, g.kv_heads, g.window, g.head_dim) for _ in range(2)]
    queries = normal(g.lanes, g.rows, g.q_heads, g.head_dim, dtype=g.current)
    block = [normal(g.lanes, g.rows, g.kv_heads, g.head_dim, dtype=g.current) for _ in range(2)]

    if operator == "pack_attention":
        arguments = (*rings, queries, *block, counts, counts)
        packed = ops.pack_attention(*arguments)
        outputs = dict(zip(("packed_queries", "packed_keys", "packed_values"), packed, strict=True))
        ours = {
            "out": lambda: ops.pack_attention.out(*arguments, **outputs),
            "functional": lambda: ops.pack_attention(*arguments),
        }
        read = [queries, *block, *(ring[:, :, 1:] for ring in rings)]
        return Calls(ours, lambda: reference.pack_attention(*arguments), list(packed), sum(t.nbytes for t in read))
    if operator == "fill_attention_mask":
        numbers = (counts, g.q_heads, g.rows, g.window)
        mask = ops.fill_attention_mask(*numbers)
        ours = {
            "out": lambda: ops.fill_attention_mask.out(*numbers, mask=mask),
            "functional": lambda: ops.fill_attention_mask(*numbers),
        }
        return Calls(ours, lambda: reference.fill_attention_mask(*numbers), [mask], 0)
    if operator == "commit_kv":
        tokens = (*block, torch.full_like(counts, g.rows), counts, *rings)
        ours = {"in place": lambda: ops.commit_kv(*tokens)}
        written = [x.bfloat16() for x in block]
        return Calls(ours, lambda: reference.commit_kv(*tokens), written, sum(x.nbytes for x in block))
    hidden = normal(g.lanes * g.rows, HIDDEN_SIZE[g.q_heads], dtype=g.current)
    embedding = normal(hidden.shape[1])
    ours = {"in place": lambda: ops.set_mask_rows(embedding, hidden, g.lanes, g.rows)}
    written = [hidden[: g.lanes * (g.rows - 1)].clone()]
    return Calls(ours, lambda: reference.set_mask_rows(embedding, hidden, g.lanes, g.rows), written, embedding.nbytes)


def geometries(operator: str, of: list[Geometry]) -> Iterator[Geometry]:
    """Without those that differ only in what the operator does not see."""
    unseen = {"fill_attention_mask": {"head_dim": 128, "current": "float32"}, "set_mask_rows": {"head_dim": 128, "window": 512}}
    yield from dict.fromkeys(Geometry(**asdict(g) | unseen.get(operator, {})) for g in of)


class Stopwatch:
    """Times calls in turns."""

    def __init__(self, device: str, threads: int, seconds: float, turns: int) -> None:
        self.device, self.threads, self.seconds, self.turns = device, threads, seconds, turns

    def clock(self) -> float:
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()
        return time.perf_counter()

    def medians(self, contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds a call."""
        timers, numbers = {}, {}
        for name, call in contenders.items():
            # The timer of torch.utils.benchmark does not wait for every kind of device: ours does.
            timers[name] = Timer("call()", globals={"call": call}, timer=self.clock, num_threads=self.threads)
            timers[name].timeit(2)  # the warm-up, which compiles what is compiled
            # Once a turn, unless too short for the clock: in a round, too, others use the cache between two calls.
            numbers[name] = max(1, int(SHORTEST / timers[name].timeit(1).median))
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        start = time.perf_counter()
        while len(taken["copy"]) < self.turns or time.perf_counter() - start < self.seconds:
            for name, timer in timers.items():
                taken[name].append(timer.timeit(numbers[name]).median)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}


def measure(operator: str, g: Geometry, stopwatch: Stopwatch) -> dict:
    torch.compiler.reset()
    c = calls(operator, g, stopwatch.device)
    sources = [t.clone() for t in c.written]
    targets = [t.clone() for t in c.written]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    compiled = torch.compile(c.eager, dynamic=False)
    seconds = stopwatch.medians({"copy": copy, **c.ours, "eager": c.eager, "compiled": compiled})
    return {
        "operator": operator,
        **asdict(g),
        "seconds": seconds,
        "ratios": {form: {other: seconds[form] / seconds[other] for other in CONTENDERS} for form in c.ours},
        "bytes_read": c.bytes_read,
        "bytes_written": c.bytes_written,
        "gigabytes_per_second": {
            **{form: (c.bytes_read + c.bytes_written) / seconds[form] / 1e9 for form in c.ours},
            "copy": 2 * c.bytes_written / seconds["copy"] / 1e9,
        },
    }


def overhead(stopwatch: Stopwatch) -> dict[str, float]:
    """Calls of the smallest geometry, over torch.add of one element."""
    smallest = Geometry(1, 1, 128, 2, 3, kv_heads=1)
    c = calls("pack_attention", smallest, stopwatch.device)
    one = torch.ones(1, device=stopwatch.device)
    seconds = stopwatch.medians({"copy": lambda: torch.add(one, one), **c.ours})
    return {form: seconds[form] / seconds["copy"] for form in c.ours}


def processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()


def print_table(results: list[dict]) -> None:
    print(f"\n{results[0]['operator']}")
    print(f"  {HEADINGS:<37} form        us    copy   eager  compiled    GB/s, copy's")
    for r in results:
        g = Geometry(**{name: r[name] for name in Geometry.__dataclass_fields__})
        for i, (form, ratios) in enumerate(r["ratios"].items()):
            speed = r["gigabytes_per_second"]
            numbers = "  ".join(f"{ratios[other]:6.3f}" for other in CONTENDERS)
            print(
                f"  {str(g) if i == 0 else '':<37} {form:<10} {1e6 * r['seconds'][form]:6.0f}  {numbers}"
                f"    {speed[form]:6.1f}  {speed['copy']:6.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help=f"the whole grid of {len(ALL)} geometries, about an hour")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=OPERATORS, help="one operator")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each row")
    parser.add_argument("--turns", type=int, default=7, help="at least so many, for each row")
    parser.add_argument("--json", type=pathlib.Path, help="a file to write all figures to")
    options = parser.parse_args()
    stopwatch = Stopwatch(options.device, options.threads, options.seconds, options.turns)

    print(f"{options.device}, {processor()}, {options.threads} of {os.cpu_count()} threads, torch {torch.__version__}")
    print(f"Medians of {options.turns} or more turns, ratios ours / theirs: below 1 is faster than copy_, eager, compiled.")
    results = []
    for operator in [options.only] if options.only else OPERATORS:
        rows = []
        for g in geometries(operator, ALL if options.all else SOME):
            rows.append(measure(operator, g, stopwatch))
        print_table(rows)
        results += rows
    smallest = overhead(stopwatch)
    print(
        "\nThe smallest pack_attention over torch.add of one element:", ", ".join(f"{k} {v:.2f}" for k, v in smallest.items())
    )
    if options.json:
        figures = {
            "date": time.strftime("%Y-%m-%d"),
            "device": options.device,
            "processor": processor(),
            "threads": options.threads,
            "torch": torch.__version__,
            "overhead_over_add": smallest,
            "rows": results,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

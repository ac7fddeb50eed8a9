"""Times the Metal shader, rewritten as CUDA, on an NVIDIA GPU: python benchmarks/gpu/bench.py [--json FILE]

Needs nvcc and a C++ compiler; of Python only the standard library. Results are checked against plain host code first.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from convert import convert, shader_source

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 1.08  # times the copy of the same bytes, where the published geometry is packed
PACKED_PUBLISHED = [("pack_attention", "float32", 4, 32, 8, 128, 16, window) for window in (2048, 8192)]
LAUNCH_BOUND = 3  # times an empty kernel: below, the launch is a large part of the time


def rows(quick: bool) -> list[tuple]:
    """(operator, current dtype, lanes, q_heads, kv_heads, head_dim, rows, window)"""
    if quick:
        return PACKED_PUBLISHED
    lanes, heads, sizes, blocks, windows = (1, 4), ((32, 8), (64, 8)), (128, 256), (8, 16), (512, 2048, 4096, 8192)
    grid = [(b, h, hk, d, r, w) for b, (h, hk), d, r, w in itertools.product(lanes, heads, sizes, blocks, windows)]
    published = [g for g in grid if g[1:5] == (32, 8, 128, 16)]
    short = [g for g in grid if g[5] == 2048]
    return [
        *(("pack_attention", "float32", *g) for g in grid),
        *(("pack_attention", "bfloat16", *g) for g in published),
        *(("fill_attention_mask", "float32", *g) for g in grid if g[3] == 128),  # a mask has no head size
        *(("commit_kv", "float32", *g) for g in short),
        *(("set_mask_rows", "float32", *g) for g in short),
    ]


def build(folder: pathlib.Path, shader: str, arch: str) -> pathlib.Path:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise SystemExit("no nvcc: expected on the PATH or in /usr/local/cuda/bin")
    (folder / "dflash2.inc").write_text(convert(shader), encoding="ascii")
    program = folder / "bench"
    command = [nvcc, "-O3", "-std=c++17", f"-arch={arch}", f"-I{folder}", "-o", program, HERE / "bench.cu"]
    if subprocess.run(command).returncode != 0:
        raise SystemExit("nvcc did not compile the shader as CUDA: metal.cuh may lack what it uses of Metal's library")
    return program


def answer_of(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def complete(row: dict, empty_us: float) -> dict:
    """The row with what follows from its medians."""
    ours, copy = row["ours"]["median_us"], row["copy"]["median_us"]
    row |= {"gb_per_s": row["bytes"] / ours / 1e3, "to_copy": ours / copy}
    row["launch_bound"] = ours < LAUNCH_BOUND * empty_us
    for other in ("element_a_thread", "memset"):
        if other in row:
            row[f"to_{other}"] = ours / row[other]["median_us"]
    return row


def printed(row: dict) -> str:
    ours = row["ours"]
    geometry = f"{row['lanes']:>2} {row['q_heads']}/{row['kv_heads']} {row['head_dim']:>4} {row['rows']:>3} {row['window']:>5}"
    times = f"{ours['median_us']:8.2f} {'({min_us:.2f}-{max_us:.2f})'.format(**ours):18}"
    remarks = []
    if "element_a_thread" in row:
        remarks.append(f"{1 / row['to_element_a_thread']:.2f} times as fast as a thread an element")
    if "memset" in row:
        remarks.append(f"{row['to_memset']:.2f} of a memset")
    if row["launch_bound"]:
        remarks.append("launch-bound")
    return (
        f"{row['op']:20}{row['current']:9}{geometry}{row['bytes'] / 1e6:9.2f} {times}{row['gb_per_s']:6.0f}"
        f"{row['copy']['median_us']:9.2f}{row['to_copy']:7.2f}  {', '.join(remarks)}"
    )


HEADER = (
    f"\n{'operator':20}{'current':9}{'B':>2} {'H/Hk':4} {'D':>4} {'R':>3} {'W':>5}{'MB':>9} {'us':>8} {'(min-max)':18}"
    f"{'GB/s':>6}{'copy us':>9}{'/copy':>7}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--samples", type=int, default=60, help="samples of each median (default 60)")
    parser.add_argument("--arch", default="native", help="nvcc's -arch (default: the card in this machine)")
    parser.add_argument("--quick", action="store_true", help="only the packing rows that have a limit")
    parser.add_argument("--build-only", action="store_true", help="compile and stop: needs no GPU if --arch names one")
    options = parser.parse_args()

    shader = shader_source()
    with tempfile.TemporaryDirectory() as folder:
        program = build(pathlib.Path(folder), shader, options.arch)
        if options.build_only:
            return 0
        record: dict = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "shader_sha256": hashlib.sha256(shader.encode()).hexdigest(),
            "commit": answer_of(["git", "rev-parse", "HEAD"]),
            "driver": answer_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
            "note": "The Metal shader rewritten as CUDA on an NVIDIA GPU: this is not an Apple GPU.",
            "rows": [],
        }
        with tempfile.TemporaryFile("w+") as wanted:
            wanted.writelines(" ".join(map(str, row)) + "\n" for row in rows(options.quick))
            wanted.seek(0)
            run = subprocess.Popen([program, str(options.samples)], stdin=wanted, stdout=subprocess.PIPE, text=True)
            assert run.stdout is not None
            for line in run.stdout:
                answer = json.loads(line)
                if "verified" in answer:
                    print(f"{answer['verified']}: {'as the host computes it' if answer['right'] else 'WRONG'}")
                elif "op" in answer:
                    record["rows"].append(complete(answer, record["empty_kernel_us"]))
                    print(printed(answer), flush=True)
                else:
                    record |= answer
                    print(", ".join(f"{key} {value}" for key, value in answer.items()))
                if "empty_kernel_us" in answer:
                    print(HEADER)
            if run.wait() != 0:
                return run.returncode

    limited = [r for r in record["rows"] if (*list(r.values())[:8],) in PACKED_PUBLISHED]
    for row in limited:
        verdict = "within" if row["to_copy"] <= LIMIT else "ABOVE"
        print(f"packing at window {row['window']}: {row['to_copy']:.3f} of a copy, {verdict} the limit of {LIMIT}")
    if options.json:
        facts = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items() if key != "rows")
        a_line_each = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
        options.json.write_text(f'{{\n{facts} "rows": [\n{a_line_each}\n ]\n}}\n', encoding="ascii")
    return 0 if all(row["to_copy"] <= LIMIT for row in limited) else 3


if __name__ == "__main__":
    sys.exit(main())

"""Breaks the Metal path in many small ways and runs its tests on each: one that no test notices is a hole in the tests.

python tests/mutants.py [NAME ...]   (about 15 s a mutant; Linux, as the tests run on the stand-in for a Mac)
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "torch_dflash2"
HOST, SHADER, OPERATORS = "csrc/mps.mm", "shaders/dflash2.metal", "csrc/operators.h"

# name: (file, text that occurs once, what replaces it)
MUTANTS = {
    # the host
    "storage offset ignored": (HOST, "return NSUInteger(t.storage_offset()) * t.element_size();", "return 0 * t.dim();"),
    "offset in elements": (HOST, "NSUInteger(t.storage_offset()) * t.element_size()", "NSUInteger(t.storage_offset())"),
    "endEncoding forgotten": (HOST, "[encoder endEncoding];", ""),
    "endEncoding twice": (HOST, "[encoder endEncoding];", "[encoder endEncoding]; [encoder endEncoding];"),
    "pipeline not set": (HOST, "[encoder setComputePipelineState:pipeline];", ""),
    "first slot is one": (HOST, "NSUInteger slot = 0;", "NSUInteger slot = 1;"),
    "all tensors in one slot": (HOST, "atIndex:slot++];", "atIndex:slot];"),
    "parameters one slot late": (HOST, "length:sizeof(params) atIndex:slot]", "length:sizeof(params) atIndex:slot + 1]"),
    "parameters cut short": (HOST, "length:sizeof(params)", "length:sizeof(params) - 4"),
    "command buffer taken outside the block": (
        HOST,
        "    __block bool encoded = false;",
        "    torch::mps::get_command_buffer();\n    __block bool encoded = false;",
    ),
    "commits": (HOST, "      encoded = true;", "      encoded = true;\n      torch::mps::commit();"),
    "waits": (HOST, '    TORCH_CHECK(encoded, "dflash2: "', '    torch::mps::synchronize();\n    TORCH_CHECK(encoded, "dflash2: "'),
    "throws in the block": (HOST, "if (encoder == nil) return;", 'TORCH_CHECK(encoder != nil, "no encoder");'),
    "missing encoder not reported": (HOST, "__block bool encoded = false;", "__block bool encoded = true;"),
    "two dispatches": (
        HOST,
        "      [encoder endEncoding];",
        "      [encoder dispatchThreads:grid threadsPerThreadgroup:MTLSizeMake(group, 1, 1)];\n      [encoder endEncoding];",
    ),
    "group above 256": (HOST, "kMaxGroup = 256", "kMaxGroup = 1024"),
    "pipeline's limit ignored": (HOST, "[pipeline maxTotalThreadsPerThreadgroup], grid.width", "grid.width"),
    "library compiled at each pipeline": (HOST, "if (library_ == nil) compile();", "compile();"),
    "pipelines not kept": (HOST, "return pipelines_.emplace(kernel, pipeline).first->second;", "return pipeline;"),
    "missing kernel not reported": (HOST, 'TORCH_CHECK(function != nil, "dflash2', 'TORCH_CHECK(true, "dflash2'),
    "missing library not reported": (HOST, 'TORCH_CHECK(library_ != nil, "dflash2', 'TORCH_CHECK(true, "dflash2'),
    "missing pipeline not reported": (HOST, 'TORCH_CHECK(pipeline != nil, "dflash2', 'TORCH_CHECK(true, "dflash2'),
    "missing device not reported": (HOST, 'TORCH_CHECK(device != nil, "dflash2', 'TORCH_CHECK(true, "dflash2'),
    "Metal's reason dropped": (HOST, "return error ? [[error localizedDescription] UTF8String] :", "return"),
    "unaligned views taken for aligned": (HOST, "byte_offset(*t) % kVectorBytes == 0;", "byte_offset(*t) % 2 == 0;"),
    "alignment of outputs ignored": (HOST, "&current_values,\n                                     &packed_queries", "&current_values});//"),
    "float16 packed as bfloat16": (HOST, 'return std::string(kernel) + "_from_f16";', 'return std::string(kernel) + "_from_bf16";'),
    "bfloat16 packed as float32": (HOST, 'return std::string(kernel) + "_from_bf16";', "return kernel;"),
    "float16 hidden as bfloat16": (HOST, '"dflash2_set_mask_rows_f16"', '"dflash2_set_mask_rows_bf16"'),
    "keys and values swapped in packing": (HOST, "{&ring_keys, &ring_values, &current_queries, &current_keys, &current_values, &cache_lengths", "{&ring_values, &ring_keys, &current_queries, &current_keys, &current_values, &cache_lengths"),
    "lengths and positions swapped": (HOST, "&current_values, &cache_lengths,\n            &write_positions,", "&current_values, &write_positions,\n            &cache_lengths,"),
    "counts and positions swapped": (HOST, "&new_values, &commit_counts, &write_positions,", "&new_values, &write_positions, &commit_counts,"),
    "one packed row short": (HOST, "(query_rows + g.packed_length())", "(query_rows + g.packed_length() - 1)"),
    "one row too many in set_mask_rows": (HOST, "NSUInteger(g.rows - 1)", "NSUInteger(g.rows)"),
    "a token short in commit": (HOST, "g.head_dim / kVectorElements * g.max_count", "g.head_dim / kVectorElements * (g.max_count - 1)"),
    "heads and rows swapped in the parameters": (HOST, "PackParams params{uint32_t(g.q_heads), uint32_t(g.kv_heads)", "PackParams params{uint32_t(g.kv_heads), uint32_t(g.q_heads)"),
    "strided keys not made contiguous": (OPERATORS, "*new_keys.expect_contiguous()", "new_keys"),
    # the shader
    "negative positions not wrapped": (SHADER, "return uint(slot < 0 ? slot + int(window) : slot);", "return uint(slot);"),
    "position not taken modulo the window": (SHADER, "const int slot = position % int(window);", "const int slot = position;"),
    "ring wraps one slot late": (SHADER, "next > age ?", "next >= age ?"),
    "newest token skipped": (SHADER, "? next - 1 - age :", "? next - age :"),
    "slots beyond the wrap shifted": (SHADER, ": next + p.window - 1 - age;", ": next + p.window - 2 - age;"),
    "one slot more than the length": (SHADER, "int(age) < cache_lengths[lane]", "int(age) <= cache_lengths[lane]"),
    "length compared unsigned": (SHADER, "int(age) < cache_lengths[lane]", "age < uint(cache_lengths[lane])"),
    "length of lane 0 for all": (SHADER, "int(age) < cache_lengths[lane]", "int(age) < cache_lengths[0]"),
    "empty slots not zero": (SHADER, "uint4 key = uint4(0)", "uint4 key = uint4(1)"),
    "value read from the keys": (SHADER, "value = load_row(ring_values + ring", "value = load_row(ring_keys + ring"),
    "packed rows one too long": (SHADER, "(lane_head * (p.window - 1 + p.rows) + row)", "(lane_head * (p.window + p.rows) + row)"),
    "ring stride of a head wrong": (SHADER, "(lane_head * p.window + slot)", "(lane_head * (p.window - 1) + slot)"),
    "one block row more": (SHADER, "  if (row < p.rows) {", "  if (row <= p.rows) {"),
    "rows of 256 cut in two": (SHADER, "return head_dim == 128 ? 4 : 5;", "return 4;"),
    "a query head missed": (SHADER, "head * group + row - block_row * group;", "head * group;"),
    "packed queries not transposed": (SHADER, "((ulong(lane) * p.q_heads + q_head) * p.rows + block_row)", "((ulong(lane) * p.rows + block_row) * p.q_heads + q_head)"),
    "second half row missed": (SHADER, "half_row < 2; ++half_row) {\n    device ushort* to", "half_row < 1; ++half_row) {\n    device ushort* to"),
    "rounding truncates": (SHADER, "(float32_bits + 0x7FFF + (float32_bits >> 16 & 1)) >> 16", "float32_bits >> 16"),
    "rounding ties away from zero": (SHADER, "0x7FFF + (float32_bits >> 16 & 1)", "0x8000"),
    "NaN rounded like a number": (SHADER, "  if ((float32_bits & 0x7FFFFFFF) > 0x7F800000) return kNaN;\n", ""),
    "infinity taken for NaN": (SHADER, "> 0x7F800000) return kNaN", ">= 0x7F800000) return kNaN"),
    "float16 infinities finite": (SHADER, "if (exponent == 31) return sign | 0x7F800000", "if (exponent == 32) return sign | 0x7F800000"),
    "float16 subnormals lost": (SHADER, "return sign | as_type<uint>(float(mantissa) * 0x1p-24f);", "return sign;"),
    "float16 overflow not infinite": (SHADER, "if (exponent >= 31) return sign | 0x7C00;", "if (exponent > 31) return sign | 0x7C00;"),
    "float16 subnormal ties up": (SHADER, "significand + half_way - 1 + (significand >> shift & 1)", "significand + half_way"),
    "smallest float16 lost": (SHADER, "if (exponent < -10) return sign;", "if (exponent < -9) return sign;"),
    "unaligned load byte order": (SHADER, "uint(source[2 * i + 1]) << 16", "uint(source[2 * i + 1]) << 8"),
    "unaligned store misses a half": (SHADER, "destination[2 * i + 1] = ushort(packed[i] >> 16);", ""),
    "mask window anchored to the block": (SHADER, "row + 1 + column - p.rows < p.window", "1 + column - p.rows < p.window"),
    "mask window one too wide": (SHADER, "column - p.rows < p.window;", "column - p.rows <= p.window;"),
    "mask column off by one": (SHADER, "in_block = column < p.rows", "in_block = column <= p.rows"),
    "mask length off by one": (SHADER, "int(column - p.rows) < cache_lengths[lane]", "int(column - p.rows) <= cache_lengths[lane]"),
    "mask not quite minus infinity": (SHADER, "0xFF80", "0xFF7F"),
    "causal not passed": (HOST, "uint32_t(g.window), g.causal}", "uint32_t(g.window), 0}"),
    "always causal": (SHADER, "p.causal == 0 || column <= row", "column <= row"),
    "a causal row blind to itself": (SHADER, "column <= row :", "column < row :"),
    "a causal row sees the next": (SHADER, "column <= row :", "column <= row + 1 :"),
    "mask head stride": (SHADER, "(ulong(lane) * p.q_heads + thread_position.y) * p.rows * packed_length", "(ulong(lane) * p.q_heads + thread_position.y) * packed_length"),
    "one token more than the count": (SHADER, "int(token) >= commit_counts[lane]", "int(token) > commit_counts[lane]"),
    "count compared unsigned": (SHADER, "int(token) >= commit_counts[lane]", "token >= uint(commit_counts[lane])"),
    "commit wraps one slot late": (SHADER, "ahead < p.window ? ahead", "ahead <= p.window ? ahead"),
    "commit token stride": (SHADER, "(ulong(lane) * p.max_count + token)", "(ulong(lane) * (p.max_count - 1) + token)"),
    "anchor overwritten": (SHADER, "* p.rows + 1 + thread_position.y;", "* p.rows + thread_position.y;"),
    "32-bit ring offset": (SHADER, "const ulong ring = ((ulong(lane) * p.kv_heads", "const uint ring = ((uint(lane) * p.kv_heads"),
}  # fmt: skip


def mutate(folder: pathlib.Path, file: str, old: str, new: str) -> None:
    for part in ("csrc", "shaders"):
        shutil.copytree(PACKAGE / part, folder / part)
    text = (folder / file).read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {text.count(old)} times, not once: {old}")
    (folder / file).write_text(text.replace(old, new))


def verdict(folder: pathlib.Path) -> str:
    """The first test that fails on this mutant, what else stopped it, or an empty string if nothing did."""
    suites = [str(TESTS / f"test_{name}.py") for name in ("operators", "metal", "invalid_arguments")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "mps or metal", *suites],
        env=os.environ | {"DFLASH2_METAL_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if run.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*::)?(.+?)(?: - .*)?$", run.stdout, re.M)
    return failed[1] if failed else f"exit status {run.returncode}: {(run.stderr or run.stdout).strip()[-200:]}"


def main(names: list[str]) -> int:
    survivors = []
    for name, mutant in MUTANTS.items():
        if names and name not in names:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            mutate(pathlib.Path(folder), *mutant)
            killer = verdict(pathlib.Path(folder))
        print(
            f"{name}: {'killed by ' + killer if killer else 'SURVIVED'} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        if not killer:
            survivors.append(name)
    print(f"{len(survivors)} of {len(names or MUTANTS)} survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The Metal path itself: how it uses the command buffer, its pipelines and memory, and what it does when Metal fails.

Needs the counters of the stand-in for a Mac (tests/metal_sim), so that on a Mac these tests are not collected.
"""

import gc
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import oracle
import pytest
import torch
from test_invalid_arguments import CALLS
from test_operators import CURRENT_DTYPES, assert_bits, commit_inputs, int32, on, pack_inputs

if sys.platform == "darwin":
    collect_ignore = [__file__]
    pytest.skip("the counters are the stand-in's", allow_module_level=True)

import metal_sim
import mutants

ops = torch.ops.dflash2
TESTS = pathlib.Path(__file__).parent


def mps_arguments(op):
    call, valid = CALLS[op]
    return call, {n: v.to("mps") if isinstance(v, torch.Tensor) else v for n, v in valid().items()}


def in_new_process(code, **environment):
    """Runs code in a Python that has loaded nothing yet; `setup()` gives it the device and the Metal path."""
    head = """
        import os, sys
        sys.path[:0] = [TESTS, ROOT]
        def setup():
            import conftest
    """
    head = textwrap.dedent(head).replace("TESTS", repr(str(TESTS))).replace("ROOT", repr(str(TESTS.parent)))
    result = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**__import__("os").environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- one dispatch an operator, on PyTorch's own command buffer


@pytest.mark.parametrize("op", CALLS)
def test_one_dispatch_no_commit_no_wait(op):
    call, arguments = mps_arguments(op)
    call(**arguments)  # pipelines are made now
    torch.mps.synchronize()
    with metal_sim.counted() as n:
        call(**arguments)
    assert n["dispatches"] == n["encoders"] == n["queue_blocks"] == 1
    assert n["commits"] == n["waits"] == n["fallbacks"] == 0
    assert n["devices"] == n["libraries"] == n["functions"] == n["pipelines"] == 0


@pytest.mark.parametrize("op", ["pack_attention.out", "fill_attention_mask.out", "commit_kv", "set_mask_rows"])
def test_writing_in_place_makes_nothing(op):
    call, arguments = mps_arguments(op)
    call(**arguments)
    torch.mps.synchronize()
    before = torch.mps.current_allocated_memory()
    with metal_sim.counted() as n:
        call(**arguments)
        assert torch.mps.current_allocated_memory() == before
    assert n["torch_commands"] == 0


def test_a_thousand_calls_leave_no_metal_objects():
    calls = [mps_arguments(op) for op in CALLS]
    for call, arguments in calls:
        call(**arguments)
    torch.mps.synchronize()
    gc.collect()
    before, memory = metal_sim.counters(), torch.mps.current_allocated_memory()
    for i in range(1000):
        call, arguments = calls[i % len(calls)]
        call(**arguments)
        if i % 50 == 0:
            torch.mps.synchronize()
    torch.mps.synchronize()
    gc.collect()
    after = metal_sim.counters()
    assert after["dispatches"] - before["dispatches"] == 1000
    assert after["live_objects"] == before["live_objects"]
    assert after["libraries"] == before["libraries"] and after["pipelines"] == before["pipelines"]
    assert torch.mps.current_allocated_memory() == memory


def test_between_two_torch_kernels_without_synchronisation():
    """The operator runs after what was queued before it and before what is queued after it."""
    inputs = pack_inputs(2, 4, 2, 128, 3, 9)
    for x in inputs[:5]:
        x.nan_to_num_()
    ring_keys, ring_values, q, k, v, lengths, positions = on("mps", inputs)
    k = k * 0 + 3  # torch's encoder is open now
    packed = ops.pack_attention(ring_keys, ring_values, q, k, v, lengths, positions)
    after = packed[1] * 2
    ops.commit_kv(k, k, int32(3, 3).to("mps"), positions, ring_keys, ring_values)
    again = ops.pack_attention(ring_keys, ring_values, q, k, v, positions * 0 + 3, positions + 3)
    assert (after[:, :, :3] == 6).all().item()
    assert (again[1][:, :, 3:6] == 3).all().item()


def test_inputs_freed_before_the_gpu_runs():
    inputs = pack_inputs(2, 4, 2, 128, 3, 9)
    want = oracle.pack_attention(*inputs)
    arguments = on("mps", inputs)
    torch.mps.synchronize()
    packed = ops.pack_attention(*arguments)
    del arguments
    gc.collect()
    junk = [torch.full((4096,), float("nan"), device="mps") for _ in range(8)]
    assert_bits(packed, want)
    assert len(junk) == 8


def test_strided_inputs_freed_before_the_gpu_runs():
    """The contiguous copies that an operator makes live only as long as the call."""
    inputs = pack_inputs(2, 4, 2, 128, 3, 9)
    strided = [torch.stack([x, x], dim=-1).to("mps")[..., 0] for x in inputs]
    packed = ops.pack_attention(*strided)
    del strided
    gc.collect()
    assert_bits(packed, oracle.pack_attention(*inputs))


# ---- pipelines


def test_no_metal_work_at_import_and_one_library():
    out = in_new_process("""
        setup()
        import metal_sim, torch
        names = ("devices", "libraries", "functions", "pipelines", "encoders", "dispatches", "command_buffers")
        before = metal_sim.counters()
        assert all(before[n] == 0 for n in names if n != "devices"), before
        lengths = torch.ones(1, dtype=torch.int32, device="mps")
        for _ in range(5):
            torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4)
            hidden = torch.ones(2, 3, device="mps")
            torch.ops.dflash2.set_mask_rows(torch.ones(3, device="mps").bfloat16(), hidden, 1, 2)
        after = metal_sim.counters()
        print(after["libraries"] - before["libraries"], after["pipelines"] - before["pipelines"])
    """)
    assert out.split() == ["1", "2"]


def test_two_threads_in_their_first_call():
    out = in_new_process("""
        setup()
        import threading, torch, metal_sim
        lengths = torch.full((2,), 5, dtype=torch.int32, device="mps")
        barrier, results, errors = threading.Barrier(4), [], []
        def first():
            try:
                barrier.wait()
                results.append(torch.ops.dflash2.fill_attention_mask(lengths, 4, 3, 9).cpu())
            except BaseException as e:
                errors.append(e)
        threads = [threading.Thread(target=first) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not errors, errors
        want = torch.ops.dflash2.fill_attention_mask(lengths.cpu(), 4, 3, 9)
        assert len(results) == 4 and all(torch.equal(r, want) for r in results)
        n = metal_sim.counters()
        print(n["libraries"], n["pipelines"])
    """)
    assert out.split() == ["1", "1"]


def test_first_call_in_a_forked_child_and_a_clean_exit():
    in_new_process("""
        setup()
        import torch
        child = os.fork()
        lengths = torch.ones(1, dtype=torch.int32, device="mps")
        mask = torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4).cpu()
        assert torch.equal(mask, torch.ops.dflash2.fill_attention_mask(lengths.cpu(), 1, 2, 4))
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """)


FAILURES = {
    "device": "no Metal device",
    "library": "Metal did not compile the shader: program_source: failed on request",
    "function": "the Metal library has no kernel dflash2_fill_attention_mask_bf16",
    "pipeline": "Metal made no pipeline of dflash2_fill_attention_mask_bf16: failed on request",
    "encoder": "dflash2_fill_attention_mask_bf16: Metal gave no command encoder",
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_metal_refuses_reaches_the_user_and_the_next_call_tries_again(what):
    out = in_new_process(f"""
        setup()
        import metal_sim, torch
        lengths = torch.ones(1, dtype=torch.int32, device="mps")
        torch.mps.synchronize()
        with metal_sim.failing({what!r}, 1):
            try:
                torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4)
            except RuntimeError as e:
                print(e)
        torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4).cpu()
    """)
    assert FAILURES[what] in out.splitlines()[0]  # with Metal's own words, "failed on request"


def test_a_machine_with_mps_but_without_the_metal_path_says_so():
    out = in_new_process("""
        import metal_sim, torch
        metal_sim.load()
        import torch_dflash2
        assert not torch_dflash2.is_metal_available()
        print(torch_dflash2.is_metal_available().reason)
        lengths = torch.ones(1, dtype=torch.int32, device="mps")
        for call in (lambda: torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4),
                     lambda: torch.ops.dflash2.set_mask_rows(lengths, lengths, 1, 2)):
            try:
                call()
            except RuntimeError as e:
                print(e)
    """).splitlines()
    assert "built without its Metal path" in out[0]
    assert out[1] == out[2] == f"dflash2 operators cannot run on mps: {out[0]}"


def test_a_machine_without_mps_says_so():
    out = in_new_process("""
        import torch_dflash2
        a = torch_dflash2.is_metal_available()
        print(bool(a), "|", a.reason, "|", a)
    """)
    assert out.strip() == "False | this PyTorch was built without MPS | not available: this PyTorch was built without MPS"


# ---- threads and grids


@pytest.mark.parametrize("limit", [256, 64, 32])
def test_every_thread_runs_under_a_small_pipeline_limit(limit):
    """A group above the pipeline's limit is dropped in silence by a real GPU: sentinels must all be gone."""
    code = f"""
        setup()
        import metal_sim, torch, oracle
        from test_operators import pack_inputs, commit_inputs, assert_bits, on, int32
        metal_sim.set_options = metal_sim.options(max_threads={limit}, validate=0)
        metal_sim.set_options.__enter__()
        inputs = pack_inputs(3, 4, 2, 256, 5, 17)
        shapes = [(3, 4, 5, 256), (3, 2, 21, 256), (3, 2, 21, 256)]
        pq, pk, pv = (torch.full(s, -77.0, dtype=torch.bfloat16, device="mps") for s in shapes)
        arguments = on("mps", inputs)
        torch.ops.dflash2.pack_attention.out(*arguments, packed_queries=pq, packed_keys=pk, packed_values=pv)
        assert_bits([pq, pk, pv], oracle.pack_attention(*inputs))
        lengths = int32(3, 9)
        for causal in (False, True):
            mask = torch.full((2, 4, 5, 21), -77.0, dtype=torch.bfloat16, device="mps")
            torch.ops.dflash2.fill_attention_mask.out(lengths.to("mps"), 4, 5, 17, causal=causal, mask=mask)
            assert_bits([mask], [oracle.fill_attention_mask(lengths, 4, 5, 17, causal)])
        commit = commit_inputs(2, 2, 256, 16, 17)
        on_mps = on("mps", commit)
        torch.ops.dflash2.commit_kv(*on_mps)
        assert_bits(on_mps[4:], oracle.commit_kv(*commit))
        hidden = torch.full((6, 300), -77.0, device="mps")
        torch.ops.dflash2.set_mask_rows(torch.ones(300, device="mps").bfloat16(), hidden, 2, 3)
        assert (hidden.view(2, 3, 300)[:, 1:] == 1).all().item()
        assert metal_sim.counters()["dropped_dispatches"] == 0
    """
    in_new_process(code)


@pytest.mark.parametrize("op", ["pack_attention", "fill_attention_mask", "commit_kv", "set_mask_rows"])
def test_groups_have_at_most_256_threads(op):
    """At sizes where a whole row of the grid would be a larger group."""
    ring, new = torch.zeros(1, 1, 600, 256, dtype=torch.bfloat16, device="mps"), torch.zeros(1, 16, 1, 256, device="mps")
    number = torch.ones(1, dtype=torch.int32, device="mps")
    calls = {
        "pack_attention": lambda: ops.pack_attention(ring, ring, new, new, new, number, number),
        "fill_attention_mask": lambda: ops.fill_attention_mask(number, 1, 2, 600),
        "commit_kv": lambda: ops.commit_kv(new, new, number, number, ring, ring.clone()),
        "set_mask_rows": lambda: ops.set_mask_rows(ring.flatten()[:600], torch.zeros(2, 600, device="mps"), 1, 2),
    }
    with metal_sim.traced() as trace:
        calls[op]()
    dispatch = trace.dispatches[-1]
    assert dispatch.grid[0] > 256 and np.prod(dispatch.threadgroup) == 256


def test_mutants_are_of_these_sources():
    for name, (file, text, _) in mutants.MUTANTS.items():
        assert (mutants.PACKAGE / file).read_text().count(text) == 1, name


def test_offsets_beyond_32_bits():
    """A ring of 2**33 elements: only the rows that are committed come to exist."""
    lanes, window, head_dim = 4, 2**23, 256
    rings = [torch.empty(lanes, 1, window, head_dim, dtype=torch.bfloat16, device="mps") for _ in range(2)]
    new = torch.arange(lanes * 2.0, device="mps").view(lanes, 2, 1, 1).expand(lanes, 2, 1, head_dim)
    counts, positions = int32(2, 2, 2, 2).to("mps"), int32(0, 5, window - 1, window - 1).to("mps")
    ops.commit_kv(new, -new, counts, positions, *rings)
    for b, slots in enumerate([(0, 1), (5, 6), (window - 1, 0), (window - 1, 0)]):
        for i, slot in enumerate(slots):
            assert (rings[0][b, 0, slot] == 2 * b + i).all().item() and (rings[1][b, 0, slot] == -2 * b - i).all().item()


# ---- memory traffic


def bytes_needed(inputs, outputs, lengths, window):
    """What packing must read and write: live ring rows, current rows, outputs."""
    ring_keys, _, *current = inputs[:5]
    row = ring_keys.shape[1] * ring_keys.shape[3] * 2
    live = sum(min(max(int(n), 0), window - 1) for n in lengths) * row * 2
    return live + sum(x.numel() * x.element_size() for x in current) + sum(x.numel() * 2 for x in outputs)


@pytest.mark.parametrize("offset", [0, 8, 24])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_packing_moves_what_it_must(head_dim, offset):
    """In 32-byte sectors, at most 1.05 times the bytes needed, also for views that start inside a buffer."""
    window = 129
    inputs = pack_inputs(2, 8, 2, head_dim, 8, window, lengths=[window, window], positions=[5, 77])
    arguments = []
    for x in inputs:
        whole = torch.zeros(x.numel() + offset, dtype=x.dtype, device="mps")
        arguments.append(whole[offset:].view(x.shape).copy_(x))
    with metal_sim.traced() as trace:
        outputs = ops.pack_attention(*arguments)
    arguments = {n.split("/")[1]: t for n, t in trace.traffic.items() if n.startswith("dflash2_pack_attention")}
    del arguments["p"]  # constant memory, the same for every thread
    moved = 32 * sum(t.sectors for t in arguments.values())
    needed = bytes_needed(inputs, outputs, inputs[5], window)
    assert needed <= moved <= 1.05 * needed, moved / needed


@pytest.mark.parametrize("dtype", CURRENT_DTYPES)
def test_other_kernels_move_what_they_must(dtype):
    """Coalesced: the sectors touched, counted once, are those of the data."""
    commit = on("mps", commit_inputs(2, 4, 128, 16, 40, dtype=dtype, counts=[16, 16], positions=[3, 39]))
    lengths = int32(100, 100).to("mps")
    hidden = torch.ones(2 * 8, 576, dtype=dtype, device="mps")
    embedding = torch.ones(576, dtype=torch.bfloat16, device="mps")
    with metal_sim.traced() as trace:
        ops.commit_kv(*commit)
        mask = ops.fill_attention_mask(lengths, 4, 8, 129)
        ops.set_mask_rows(embedding, hidden, 2, 8)
    sectors = {name.split("/")[1]: t.sectors for name, t in trace.traffic.items()}
    width = commit[0].element_size()
    rows = 2 * 16 * 4 * 128
    assert sectors["new_keys"] == sectors["new_values"] == rows * width / 32
    assert sectors["ring_keys"] == sectors["ring_values"] == rows * 2 / 32
    assert sectors["mask"] * 32 <= 1.5 * mask.numel() * 2  # rows of odd length straddle sectors
    assert sectors["hidden"] == 2 * 7 * 576 * width / 32


# ---- the shader's text


def test_the_shader_compiles_without_warnings():
    out = in_new_process("""
        setup()
        import metal_sim, torch
        torch.ops.dflash2.fill_attention_mask(torch.ones(1, dtype=torch.int32, device="mps"), 1, 2, 4).cpu()
        print(metal_sim.warnings())
    """)
    assert out.strip() == "[]"


def test_the_shader_is_ascii_and_includes_only_the_standard_library():
    import runpy

    source = runpy.run_path(str(TESTS.parent / "torch_dflash2/shaders/embed.py"))["shader_source"]()
    assert source.isascii()
    includes = [line for line in source.splitlines() if line.lstrip().startswith("#include")]
    assert sorted(includes) == [
        "#include <cstdint>",
        "#include <metal_stdlib>",
    ]  # cstdint: for the host, behind an #ifndef

"""What host code does wrong: on a Mac an assertion, a deadlock, or silence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metal_sim

from .kernels import library, pair, run

SOURCE = library(["a[i] = b[i];", "a[i] += 1;"])
PARAMETERS = (
    "device float* a [[buffer(0)]], device const float* b [[buffer(1)]], constant P& p [[buffer(2)]], "
    "uint i [[thread_position_in_grid]]"
)
WITH_STRUCT = library(["a[i] = b[i] + p.x;"], PARAMETERS, "struct P { float x, y; };\n")

MISTAKES = {
    "command_buffer_outside": "get_command_buffer.. outside a dispatch_sync block",
    "encoder_outside": "computeCommandEncoder outside a dispatch_sync block",
    "bind_outside": "a command is encoded outside a dispatch_sync block",
    "no_end": "left an encoder open .endEncoding missing",
    "end_twice": "endEncoding called twice",
    "dispatch_after_end": "encoded after endEncoding",
    "second_encoder": "already encoding",
    "torch_encoder_open": "already encoding",
    "kept_command_buffer": "has been committed",
    "torch_op_in_block": "already owned by the current thread .deadlock",
    "throw_in_block": "escaped from a dispatch_sync block .std::terminate on a Mac.: thrown in the block",
    "wait_in_block": "waitUntilCompleted before commit",
    "no_pipeline": "without a compute pipeline state",
    "unbound": "argument a .buffer 0. has no buffer bound",
    "stale_binding": "argument a .buffer 0. has the binding of an earlier dispatch",
    "bad_offset": "offset 1, not a multiple of its type's alignment 4",
    "far_offset": "not below the buffer's length",
    "freed_buffer": "message '.*' to a freed object",
    "large_bytes": "length 5000 is not in 1..4096",
    "bytes_for_writable": "argument a .buffer 0. is writable but bound with setBytes",
    "index_31": "buffer index 31 is above 30",
    "unknown_selector": r"-\[SimCommandBuffer contents\]: unrecognized selector",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake):
    with pytest.raises(RuntimeError, match=MISTAKES[mistake]):
        run(SOURCE, tensors=pair(), mistake=mistake)
    metal_sim.reset()
    a, b = pair()
    run(SOURCE, tensors=[a, b])  # and after a reset all is well
    assert torch.equal(a, b)


@pytest.mark.parametrize("size", [4, 16])
def test_parameters_of_another_size_than_the_shaders_struct(size):
    run(WITH_STRUCT, tensors=pair(), mistake="bytes_8")
    with pytest.raises(RuntimeError, match=f"argument p .buffer 2. has {size} bytes bound, but its type needs 8"):
        run(WITH_STRUCT, tensors=pair(), mistake=f"bytes_{size}")


LIMITS = [
    ((0, 1, 1), (1, 1, 1), "the grid is empty"),
    ((1, 1, 1), (0, 1, 1), "the threadgroup is empty"),
    ((64, 1, 1), (64, 17, 1), "64x17x1 threads per threadgroup, at most 1024 are possible"),
]


@pytest.mark.parametrize("grid, group, message", LIMITS)
def test_limits(grid, group, message):
    with pytest.raises(RuntimeError, match=message):
        run(SOURCE, "k0", pair(), grid, group)


@pytest.mark.parametrize("grid, group, message", LIMITS)
def test_without_validation_such_a_dispatch_is_dropped(grid, group, message):
    a, b = pair()
    a.fill_(7)
    with metal_sim.options(validate=0), metal_sim.counted() as n:
        run(SOURCE, "k0", [a, b], grid, group)
    assert n["dropped_dispatches"] == 1 and n["dispatches"] == 0 and (a == 7).all()


def test_pipelines_may_have_a_smaller_limit():
    with metal_sim.options(max_threads=32), pytest.raises(RuntimeError, match="at most 32"):
        run(SOURCE, "k0", pair())
    limited = library([]) + (
        "kernel [[max_total_threads_per_threadgroup(16)]] void k(device float* a [[buffer(0)]], "
        "uint i [[thread_position_in_grid]]) { a[i] = 1; }\n"
    )
    with pytest.raises(RuntimeError, match="at most 16"):
        run(limited, "k", pair())


def test_commands_of_another_queue_do_not_run_in_order():
    a, b = pair()
    run(SOURCE, "k0", [a, b], mistake="own_queue")
    assert not torch.equal(a, b)


def test_commands_run_after_the_call():
    faulty = library(["a[i] = b[i + 1000];"])
    a, b = pair()
    torch.ops.probe.run(faulty, "k0", (64, 1, 1), (64, 1, 1), [a, b])
    with pytest.raises(RuntimeError, match="out of bounds"):
        a.cpu()
    with metal_sim.options(eager=1), pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.probe.run(faulty, "k0", (64, 1, 1), (64, 1, 1), [a, b], "commit")


def test_between_two_operators_of_torch():
    a, b = pair()
    b += 1
    torch.ops.probe.run(SOURCE, "k0", (64, 1, 1), (64, 1, 1), [a, b])
    a *= 2
    assert torch.equal(a.cpu(), 2 * (torch.arange(64.0) + 1))


def test_a_tensor_freed_before_the_device_ran():
    """As on a Mac, a command buffer retains what is bound."""
    a, b = pair(4096)
    before = metal_sim.counters()["live_buffers"]
    torch.ops.probe.run(SOURCE, "k0", (4096, 1, 1), (64, 1, 1), [a, b])
    del b
    others = [torch.full((4096,), 9.0, device="mps") for _ in range(4)]
    assert torch.equal(a.cpu(), torch.arange(4096.0))
    del others
    assert metal_sim.counters()["live_buffers"] == before - 1


@pytest.mark.parametrize("what", ["device", "library", "function", "pipeline", "command_buffer", "encoder"])
def test_failures_on_request(what):
    a, b = pair()
    with metal_sim.failing(what, 1):
        if what in ("command_buffer", "encoder"):  # messages to nil do nothing
            run(SOURCE, "k0", [a, b])
            assert not a.any()
        else:
            with pytest.raises(RuntimeError, match=f"no {what}" if what != "library" else "failed on request"):
                run(SOURCE, "k0", [a, b])
        run(SOURCE, "k0", [a, b])  # only once
    assert torch.equal(a, b)


def test_failures_and_options_from_the_environment():
    library = metal_sim.build_extension([Path(__file__).parent / "probe.mm"], name="probe")
    code = f"""
import metal_sim
metal_sim.load()
import torch
torch.ops.load_library({str(library)!r})
from metal_sim.tests.kernels import pair, run
for _ in range(2):
    try:
        run({SOURCE!r}, tensors=pair())
    except RuntimeError as e:
        print(e)
    torch.ops.metal_sim.fail_next("device", 0)
"""
    variables = {"METAL_SIM_FAIL": "device", "METAL_SIM_MAX_THREADS": "8"}
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(metal_sim.__file__).parents[1])}
    lines = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).splitlines()
    assert "no device" in lines[0] and "at most 8 are possible" in lines[-1]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no option 'colour'"), metal_sim.options(colour=1):
        pass
    with pytest.raises(ValueError, match="nothing called 'weather'"), metal_sim.failing("weather"):
        pass

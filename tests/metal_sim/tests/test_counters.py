"""What tests may count on."""

import pytest
import torch

import metal_sim

from .kernels import library, pair, run

SOURCE = library(["a[i] = b[i];"])


def dispatch(tensors, mistake=""):
    torch.ops.probe.run(SOURCE, "k0", (64, 1, 1), (64, 1, 1), tensors, mistake)


def test_one_call():
    tensors = pair()
    with metal_sim.counted() as n:
        dispatch(tensors)
    assert n["devices"] == n["libraries"] == n["functions"] == n["pipelines"] == 1
    assert n["queue_blocks"] == n["command_buffers"] == n["encoders"] == n["dispatches"] == 1
    assert n["commits"] == n["waits"] == n["torch_commands"] == n["fallbacks"] == n["dropped_dispatches"] == 0


def test_commits_and_waits():
    tensors = pair()
    with metal_sim.counted() as n:
        dispatch(tensors, "commit")
    assert (n["commits"], n["waits"]) == (1, 0)
    with metal_sim.counted() as n:
        torch.mps.synchronize()
    assert n["waits"] == 1


@pytest.mark.parametrize(
    "waits, code",
    [
        (False, lambda x, mask: x + 1),
        (False, lambda x, mask: torch.cat([x, x]).sum()),
        (False, lambda x, mask: x.masked_fill_(mask, 0)),
        (False, lambda x, mask: x[torch.arange(3, device="mps")]),
        (False, lambda x, mask: x.copy_(x.flip(0))),
        (False, lambda x, mask: torch.zeros(3, device="mps")),
        (True, lambda x, mask: x[0].item()),
        (True, lambda x, mask: x.cpu()),
        (True, lambda x, mask: x[mask]),
        (True, lambda x, mask: x.index_put_((mask,), x[0])),
        (True, lambda x, mask: mask.nonzero()),
        (True, lambda x, mask: torch.equal(x, x)),
        (True, lambda x, mask: torch.tensor([1.0, 2.0], device="mps")),
    ],
)
def test_operators_of_torch_wait_where_a_mac_waits(waits, code):
    x = torch.arange(8.0, device="mps")
    mask = x > 3
    with metal_sim.counted() as n:
        code(x, mask)
    assert (n["waits"] > 0) == waits


def test_live_objects_do_not_grow_over_1000_calls():
    tensors = pair()
    dispatch(tensors)
    torch.mps.synchronize()
    with metal_sim.counted() as n:
        for _ in range(1000):
            dispatch(tensors)
        torch.mps.synchronize()
    assert n["dispatches"] == 1000 and n["live_objects"] == 0 and n["live_buffers"] == 0


def test_a_missing_autorelease_pool_is_growth():
    with metal_sim.counted() as n:
        torch.ops.probe.leak(10)
    assert n["live_objects"] == 10


def test_allocated_memory_comes_back():
    before = torch.mps.current_allocated_memory()
    t = torch.empty(1000, device="mps")
    assert torch.mps.current_allocated_memory() == before + 4000
    del t
    assert torch.mps.current_allocated_memory() == before


def test_a_library_that_does_nothing_at_load_counts_nothing():
    with metal_sim.counted() as n:
        torch.ops.load_library(metal_sim.build() / "libmetal_sim.so")
    assert not any(n.values())


def test_dispatches_are_listed():
    tensors = pair(128)
    with metal_sim.traced() as trace:
        torch.ops.probe.run(SOURCE, "k0", (128, 1, 1), (32, 1, 1), tensors)
    assert trace.dispatches == [("k0", (128, 1, 1), (32, 1, 1))]
    with metal_sim.traced() as trace:
        run(SOURCE, "k0", pair())
        run(SOURCE, "k0", pair())
    assert len(trace.dispatches) == 2

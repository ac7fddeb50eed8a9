"""The device "mps" as torch sees it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def test_available():
    assert torch.backends.mps.is_available() and torch.mps.is_available() and torch.mps.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "mps"
    torch.accelerator.synchronize()


def test_fresh_memory_is_poisoned():
    assert (torch.empty(3, dtype=torch.uint8, device="mps").cpu() == 0xA5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_round_trip(dtype):
    x = torch.arange(24).reshape(4, 6).to(dtype)
    y = x.to("mps")
    assert y.device == torch.device("mps:0") and torch.equal(y.cpu(), x)
    assert torch.equal(y[1:3, 2:].cpu(), x[1:3, 2:]) and y[1:3, 2:].storage_offset() == 8
    assert not y.t().is_contiguous() and torch.equal(y.t().contiguous().cpu(), x.t())


def test_operators_agree_with_the_cpu():
    def compute(device):
        x = torch.arange(20.0, device=device).reshape(4, 5) / 7
        x[1] = 7
        x[:, 2] += 1
        y = torch.cat([x, torch.where(x > 1, x, -x)])
        z = torch.nn.functional.silu(y @ y.t()).softmax(-1)
        return [x[[0, 2]], y.clone(), z, (y > 3).sum(), y.to(torch.bfloat16), y.min(), torch.topk(z, 3).indices]

    for on_cpu, on_mps in zip(compute("cpu"), compute("mps"), strict=True):
        assert on_mps.is_mps and torch.equal(on_cpu, on_mps.cpu())


def test_float64_is_refused():
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(3, device="mps").to(torch.float64)


def test_random_numbers_are_seeded():
    def draw():
        torch.manual_seed(3)
        return torch.randn(4, 5, device="mps")

    assert torch.equal(draw(), draw())


def test_autograd():
    w = torch.randn(3, 3, device="mps", requires_grad=True)
    (w * w).sum().backward()
    torch.testing.assert_close(w.grad, 2 * w.detach())


def test_fake_tensors_and_compile():
    with FakeTensorMode():
        x = torch.empty(2, 3, device="mps")
        assert (x @ x.t()).device.type == "mps"
    f = torch.compile(lambda a: torch.sin(a) + a.t() @ a, backend="aot_eager", fullgraph=True)
    q = torch.randn(3, 3, device="mps")
    torch.testing.assert_close(f(q), torch.sin(q) + q.t() @ q)


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
def test_attention(kind):
    q, k = torch.randn(1, 4, 3, 8, device="mps"), torch.randn(1, 2, 5, 8, device="mps")
    masks = {
        "bool": torch.ones(3, 5, dtype=torch.bool).tril(2),
        "float": torch.zeros(3, 5).index_fill_(1, torch.tensor(4), -1e9),
    }
    mask, options = masks.get(kind), {"enable_gqa": True, "is_causal": kind == "causal"}
    attend = torch.nn.functional.scaled_dot_product_attention
    got = attend(q, k, k, None if mask is None else mask.to("mps"), **options).cpu()
    torch.testing.assert_close(got, attend(q.cpu(), k.cpu(), k.cpu(), mask, **options))


def test_resize_and_storage():
    q = torch.randn(4, 3, device="mps")
    out = torch.empty(0, device="mps")
    torch.add(q, 1, out=out)
    assert torch.equal(out, q + 1)
    t = torch.empty(0, device="mps").set_(q.untyped_storage(), 3, (2, 2), (1, 2))
    assert torch.equal(t.cpu(), torch.as_strided(q.cpu(), (2, 2), (1, 2), 3))
    assert torch.empty(0, 4, device="mps").cpu().shape == (0, 4)

"""Bad calls: each is refused on every device and by the Meta kernels, with one error, and changes nothing."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.dflash2
B, H, HK, D, R, W, C = 2, 4, 2, 128, 3, 8, 3
K = W - 1 + R
OTHER = {"cpu": "meta", "mps": "cpu"}  # a second device for each one tested


def bf16(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


def pack():
    return {
        "ring_keys": bf16(B, HK, W, D),
        "ring_values": bf16(B, HK, W, D),
        "current_queries": torch.ones(B, R, H, D),
        "current_keys": torch.ones(B, R, HK, D),
        "current_values": torch.ones(B, R, HK, D),
        "cache_lengths": torch.ones(B, dtype=torch.int32),
        "write_positions": torch.ones(B, dtype=torch.int32),
    }


def pack_out():
    return pack() | {
        "packed_queries": bf16(B, H, R, D),
        "packed_keys": bf16(B, HK, K, D),
        "packed_values": bf16(B, HK, K, D),
    }


def mask():
    return {"cache_lengths": torch.ones(B, dtype=torch.int32), "q_heads": H, "rows": R, "window": W}


def mask_out():
    return mask() | {"mask": bf16(B, H, R, K)}


def commit():
    return {
        "new_keys": torch.ones(B, C, HK, D),
        "new_values": torch.ones(B, C, HK, D),
        "commit_counts": torch.ones(B, dtype=torch.int32),
        "write_positions": torch.ones(B, dtype=torch.int32),
        "ring_keys": bf16(B, HK, W, D),
        "ring_values": bf16(B, HK, W, D),
    }


def mask_rows():
    return {"mask_embedding": bf16(5), "hidden": torch.ones(B * R, 5), "lanes": B, "rows": R}


CALLS = {
    "pack_attention": (ops.pack_attention.default, pack),
    "pack_attention.out": (ops.pack_attention.out, pack_out),
    "fill_attention_mask": (ops.fill_attention_mask.default, mask),
    "fill_attention_mask.out": (ops.fill_attention_mask.out, mask_out),
    "commit_kv": (ops.commit_kv.default, commit),
    "set_mask_rows": (ops.set_mask_rows.default, mask_rows),
}
WRITTEN = {
    "pack_attention.out": ["packed_queries", "packed_keys", "packed_values"],
    "fill_attention_mask.out": ["mask"],
    "commit_kv": ["ring_keys", "ring_values"],
    "set_mask_rows": ["hidden"],
}


def resized(tensor, dim, size):
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_ones(shape)


def overlapping(arguments, name, other):
    """`name` and `other` as two views of one buffer, the second starting inside the first."""
    a, b = arguments[name], arguments[other]
    size = max(a.numel() * a.element_size(), b.numel() * b.element_size())
    memory = torch.zeros(2 * size, dtype=torch.uint8)
    start = (a.numel() * a.element_size() // 2) // 16 * 16
    view = lambda t, at: memory[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)  # noqa: E731
    return {name: view(a, 0), other: view(b, start)}


def table():
    """(operator, the argument that the error must name, what replaces which arguments)."""
    rows = []

    def bad(op, argument, label, **changed):
        rows.append(pytest.param(op, argument, changed, id=f"{op}-{argument}-{label}"))

    for op, (_, valid) in CALLS.items():
        tensors = {name: value for name, value in valid().items() if isinstance(value, torch.Tensor)}
        for name, tensor in tensors.items():
            wrong = torch.float32 if tensor.dtype in (torch.int32, torch.bfloat16) else torch.int16
            bad(op, name, "dtype", **{name: tensor.to(wrong)})
            if tensor.dtype == torch.int32:
                bad(op, name, "int64", **{name: tensor.long()})
            bad(op, name, "rank", **{name: tensor[None]})
            bad(op, name, "rank-0", **{name: tensor.new_ones(())})
            for dim in range(tensor.dim()):
                bad(op, None, f"{name}-size-{dim}-smaller", **{name: resized(tensor, dim, tensor.shape[dim] - 1)})
                bad(op, None, f"{name}-size-{dim}-larger", **{name: resized(tensor, dim, tensor.shape[dim] + 1)})
                bad(op, None, f"{name}-size-{dim}-zero", **{name: resized(tensor, dim, 0)})
        for name in WRITTEN.get(op, ()):
            strided = torch.ones(*tensors[name].shape[:-1], 2 * tensors[name].shape[-1], dtype=tensors[name].dtype)[..., ::2]
            bad(op, name, "strided", **{name: strided})
            bad(op, name, "expanded", **{name: tensors[name][:1].expand_as(tensors[name])})
            for other in tensors:
                if other != name:
                    bad(op, None, f"{name}-overlaps-{other}", **overlapping(valid(), name, other))

    # what leaves some sizes out of the table, as they also change shapes that must agree
    cut = lambda arguments, dim, size, names: {n: resized(arguments[n], dim, size) for n in names}  # noqa: E731
    lanes = {n: resized(t, 0, 5) for n, t in pack().items()}
    bad("pack_attention", "ring_keys", "five-lanes", **lanes)
    bad("pack_attention", "ring_keys", "head-size-64", **cut(pack(), 3, 64, list(pack())[:5]))
    bad("pack_attention", "ring_keys", "head-size-512", **cut(pack(), 3, 512, list(pack())[:5]))
    for size in (1, 17):
        rings = cut(pack(), 2, 40, ["ring_keys", "ring_values"])
        bad("pack_attention", "current_queries", f"{size}-rows", **rings, **cut(pack(), 1, size, list(pack())[2:5]))
    bad("pack_attention", "ring_keys", "window-equals-rows", **cut(pack(), 2, R, ["ring_keys", "ring_values"]))
    bad(
        "pack_attention",
        "current_queries",
        "three-heads-over-two",
        current_queries=resized(pack()["current_queries"], 2, 3),
    )
    bad("pack_attention", "current_queries", "no-heads", current_queries=resized(pack()["current_queries"], 2, 0))
    huge = {n: bf16(1, 1, 1, 1).expand(4, 2**26, 2**26, 256) for n in ("ring_keys", "ring_values")}
    bad("pack_attention", "ring_keys", "overflow", **huge, current_queries=torch.ones(1).expand(4, 2, 2**26, 256))
    bad("pack_attention", "current_keys", "mixed-currents", current_keys=pack()["current_keys"].half())
    bad("pack_attention", "current_values", "mixed-currents", current_values=pack()["current_values"].bfloat16())
    bad("commit_kv", "new_values", "mixed-dtypes", new_values=commit()["new_values"].half())
    bad("commit_kv", "ring_keys", "five-lanes", **{n: resized(t, 0, 5) for n, t in commit().items()})
    for size in (64, 512):
        names = ["new_keys", "new_values", "ring_keys", "ring_values"]
        bad("commit_kv", "ring_keys", f"head-size-{size}", **cut(commit(), 3, size, names))
    for size in (0, 17):
        rings = cut(commit(), 2, 40, ["ring_keys", "ring_values"])
        bad("commit_kv", "new_keys", f"{size}-tokens", **rings, **cut(commit(), 1, size, ["new_keys", "new_values"]))
    bad("commit_kv", "ring_keys", "window-equals-tokens", **cut(commit(), 2, C, ["ring_keys", "ring_values"]))
    for op in ("fill_attention_mask", "fill_attention_mask.out"):
        for name, numbers in {
            "q_heads": (0, -1, 2**16 + 1, 2**40, 2**63 - 1),
            "rows": (1, 0, -3, 17, 2**63 - 1),
            "window": (R, 0, -8, 2**26 + 1, 2**40, 2**63 - 1),
        }.items():
            for number in numbers:
                bad(op, name if name != "rows" or number <= 17 else None, f"{number}", **{name: number})
    bad("fill_attention_mask", "cache_lengths", "five-lanes", cache_lengths=torch.ones(5, dtype=torch.int32))
    bad("fill_attention_mask", "cache_lengths", "no-lanes", cache_lengths=torch.ones(0, dtype=torch.int32))
    for name, numbers in {"lanes": (0, 5, -1, 2**62), "rows": (1, 17, 0, -2, 2**62)}.items():
        for number in numbers:
            bad("set_mask_rows", name, f"{number}", **{name: number})
    bad("set_mask_rows", "hidden", "lanes-disagree", lanes=B + 1)
    bad("set_mask_rows", "hidden", "rows-disagree", rows=R + 1)
    return rows


# Sizes of one argument decide the geometry, so that a change of them can be a valid call.
VALID_AFTER_ALL = {
    "fill_attention_mask-None-cache_lengths-size-0-smaller",
    "fill_attention_mask-None-cache_lengths-size-0-larger",
}
BAD = [row for row in table() if row.id not in VALID_AFTER_ALL]


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())


def move(value, device, moved):
    """To the device, keeping what is strided strided and what overlaps overlapping."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    if storage._cdata not in moved:
        moved[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
    whole = moved[storage._cdata]
    return torch.empty(0, dtype=value.dtype, device=device).set_(
        whole.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )


@pytest.mark.parametrize(("op", "argument", "changed"), BAD)
def test_refused_alike_by_real_and_meta_kernels(device, op, argument, changed):
    call, valid = CALLS[op]
    moved = {}
    arguments = {name: move(value, device, moved) for name, value in (valid() | changed).items()}
    small = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.numel() < 1e6}
    before = {name: value.clone() for name, value in small.items()}
    with pytest.raises(RuntimeError) as real:
        call(**arguments)
    message = str(real.value)
    assert message.startswith(f"invalid DFlash2 attention geometry: {op.removesuffix('.out')}")
    named = re.match(r"[^:]*: [\w.]+: (\w+): expected .+, got .+", message)
    assert named, message
    assert named[1] in arguments and (argument is None or named[1] == argument), message
    for name, value in before.items():
        assert same_bits(arguments[name], value), name

    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
        with pytest.raises(RuntimeError) as fake:
            call(**fakes)
    assert str(fake.value).splitlines()[0] == message.splitlines()[0]


@pytest.mark.parametrize("op", CALLS)
def test_valid_calls_are_accepted_by_both(device, op):
    call, valid = CALLS[op]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in valid().items()}
    real = call(**arguments)
    with FakeTensorMode() as mode:
        fake = call(**{n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
    outputs = lambda result: result if isinstance(result, tuple) else () if result is None else (result,)  # noqa: E731
    assert len(outputs(real)) == len(outputs(fake)) == (0 if op in WRITTEN else 3 if op == "pack_attention" else 1)
    for r, f in zip(outputs(real), outputs(fake), strict=True):
        assert (r.shape, r.dtype, r.device, r.stride()) == (f.shape, f.dtype, f.device, f.stride())


PAIRS = [
    (op, name)
    for op, (_, valid) in CALLS.items()
    for name, value in valid().items()
    if isinstance(value, torch.Tensor) and op != "fill_attention_mask"  # its one tensor cannot disagree with another
]


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_a_tensor_on_another_device_is_refused(device, op, name):
    call, valid = CALLS[op]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in valid().items()}
    arguments[name] = arguments[name].to(OTHER[device])
    expected = rf"{op.removesuffix('.out')}.*: expected the device of \w+, .*({device}|{OTHER[device]}).*, got"
    with pytest.raises(RuntimeError, match=expected):
        call(**arguments)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=expected):
        call(**{n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})


def test_views_that_do_not_overlap_are_accepted(device):
    """One cache tensor holds every ring, packed outputs may come from one buffer: neighbours are not overlaps."""
    rings = torch.zeros(2, B, HK, W, D, dtype=torch.bfloat16, device=device)
    arguments = {n: v.to(device) for n, v in commit().items()} | {"ring_keys": rings[0], "ring_values": rings[1]}
    ops.commit_kv(**arguments)
    assert rings.sum().item() == 2 * B * HK * D


def test_messages_say_what_was_expected_and_what_came(device):
    arguments = {n: v.to(device) for n, v in pack().items()}
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            "invalid DFlash2 attention geometry: pack_attention: current_keys: expected shape "
            "[lanes, rows, kv_heads, head_dim] = [2, 3, 2, 128], got [2, 3, 2, 64]"
        ),
    ):
        ops.pack_attention(**arguments | {"current_keys": arguments["current_keys"][..., :64]})
    with pytest.raises(RuntimeError, match=re.escape("fill_attention_mask: rows: expected a number in 2..16, got 17")):
        ops.fill_attention_mask(arguments["cache_lengths"], 1, 17, 32)
    with pytest.raises(RuntimeError, match=re.escape("a window larger than rows = 3, got 3")):
        ops.fill_attention_mask(arguments["cache_lengths"], 1, 3, 3)


# ---- gradients are never lost in silence


def test_backward_through_an_operator_raises(device):
    arguments = {n: v.to(device) for n, v in pack().items()}
    arguments["current_queries"].requires_grad_()
    packed = ops.pack_attention(**arguments)
    with pytest.raises(RuntimeError, match="derivative for dflash2::pack_attention is not implemented"):
        packed[0].float().sum().backward()


@pytest.mark.parametrize(
    ("op", "name"), [("commit_kv", "new_keys"), ("pack_attention.out", "current_keys"), ("set_mask_rows", "hidden")]
)
def test_writing_operators_refuse_tensors_that_require_grad(device, op, name):
    call, valid = CALLS[op]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in valid().items()}
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: expected a tensor that does not require grad"):
        call(**arguments)
    with torch.no_grad():
        call(**arguments)


@pytest.mark.parametrize("op", WRITTEN)
def test_written_arguments_have_a_new_version(device, op):
    """Autograd can then tell that a tensor saved for backward was changed."""
    call, valid = CALLS[op]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in valid().items()}
    versions = {n: v._version for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    call(**arguments)
    for name, version in versions.items():
        assert arguments[name]._version == version + (name in WRITTEN[op]), name


def test_versions_are_new_in_inference_mode_too(device):
    """Otherwise a backward would use what was overwritten, in silence."""
    hidden = torch.ones(2, 3, device=device)
    weight = torch.ones(2, 3, device=device, requires_grad=True)
    product = (weight * hidden).sum()
    with torch.inference_mode():
        ops.set_mask_rows(torch.ones(3, dtype=torch.bfloat16, device=device), hidden, 1, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_lazily_negated_tensor_is_read_but_never_written(device):
    embedding = torch.arange(3.0, device=device).bfloat16()
    with pytest.raises(RuntimeError, match="set_mask_rows: hidden: expected a plain tensor"):
        ops.set_mask_rows(embedding, torch._neg_view(torch.ones(2, 3, device=device)), 1, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="hidden: expected a plain tensor"):
        ops.set_mask_rows(embedding, torch._neg_view(torch.ones(2, 3, device=device)), 1, 2)
    hidden = torch.zeros(2, 3, device=device)
    ops.set_mask_rows(torch._neg_view(embedding), hidden, 1, 2)
    assert hidden[1].tolist() == [0, -1, -2]

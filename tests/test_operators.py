"""What the operators compute, bit for bit, on every device."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dflash2

ops = torch.ops.dflash2
INT32 = torch.iinfo(torch.int32)
CURRENT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3.4e38, 1.00390625, 1.01171875, 65504.0]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def values(shape, dtype, generator):
    """Random numbers over many magnitudes, with every special value among them."""
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-30, 30, shape, generator=generator)
    flat = x.view(-1)
    where = torch.randperm(flat.numel(), generator=generator)[: len(SPECIAL)]
    flat[where] = torch.tensor(SPECIAL)[: len(where)]
    return x.to(dtype)


def pack_inputs(lanes, q_heads, kv_heads, head_dim, rows, window, dtype=torch.float32, lengths=None, positions=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(-2, 2 * window, (lanes,), generator=g)
    if positions is None:
        positions = torch.randint(-3 * window, 5 * window, (lanes,), generator=g)
    ring = values((2, lanes, kv_heads, window, head_dim), torch.bfloat16, g)
    return [
        ring[0],
        ring[1],
        values((lanes, rows, q_heads, head_dim), dtype, g),
        values((lanes, rows, kv_heads, head_dim), dtype, g),
        values((lanes, rows, kv_heads, head_dim), dtype, g),
        torch.as_tensor(lengths, dtype=torch.int32),
        torch.as_tensor(positions, dtype=torch.int32),
    ]


def commit_inputs(lanes, kv_heads, head_dim, tokens, window, dtype=torch.float32, counts=None, positions=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    if counts is None:
        counts = torch.randint(-1, tokens + 3, (lanes,), generator=g)
    if positions is None:
        positions = torch.randint(-3 * window, 5 * window, (lanes,), generator=g)
    return [
        values((lanes, tokens, kv_heads, head_dim), dtype, g),
        values((lanes, tokens, kv_heads, head_dim), dtype, g),
        torch.as_tensor(counts, dtype=torch.int32),
        torch.as_tensor(positions, dtype=torch.int32),
        values((lanes, kv_heads, window, head_dim), torch.bfloat16, g),
        values((lanes, kv_heads, window, head_dim), torch.bfloat16, g),
    ]


def assert_bits(got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(oracle.one_nan(oracle.bits(g)), oracle.one_nan(w), err_msg=f"output {i}")


def on(device, tensors):
    return [t.to(device) for t in tensors]


def geometry():
    """lanes, q_heads, kv_heads, head_dim, rows, window."""
    return st.tuples(
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([128, 256]),
        st.integers(2, 16),
        st.integers(1, 40),
    ).map(lambda g: (g[0], g[1] * g[2], g[2], g[3], g[4], g[4] + g[5]))


# ---- the worked example of the design


def test_worked_example(device):
    def rows(*first_elements):
        x = torch.zeros(1, len(first_elements), 1, 128)
        x[0, :, 0, 0] = torch.tensor(first_elements)
        return x

    ring_keys, ring_values = (rows(*r).transpose(1, 2).bfloat16().contiguous() for r in ((1.0, 2, 3, 4), (11.0, 12, 13, 14)))
    queries, keys, current_values = rows(40.0, 0.0), rows(20.0, 21.0), rows(30.0, 31.0)
    length, position = int32(3), int32(1)
    inputs = on(device, [ring_keys, ring_values, queries, keys, current_values, length, position])
    packed = [x.cpu() for x in ops.pack_attention(*inputs)]
    assert packed[0][0, 0, :, 0].tolist() == [40, 0]
    assert packed[1][0, 0, :, 0].tolist() == [20, 21, 1, 4, 3]
    assert packed[2][0, 0, :, 0].tolist() == [30, 31, 11, 14, 13]
    mask = ops.fill_attention_mask(inputs[5], 1, 2, 4)
    assert mask[0, 0].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, float("-inf")]]

    ops.commit_kv(inputs[3], inputs[4], int32(2).to(device), inputs[6], inputs[0], inputs[1])
    assert inputs[0][0, 0, :, 0].tolist() == [1, 20, 21, 4] and inputs[1][0, 0, :, 0].tolist() == [11, 30, 31, 14]

    hidden = torch.tensor([[7.0, 8, 9], [0, 0, 0]], device=device)
    ops.set_mask_rows(torch.tensor([2.0, 3, 4]).bfloat16().to(device), hidden, 1, 2)
    assert hidden.tolist() == [[7, 8, 9], [2, 3, 4]]


def test_rows_of_a_full_window_of_eight_see_seven_six_five_and_four(device):
    mask = ops.fill_attention_mask(int32(8).to(device), 1, 4, 8)
    assert (mask[0, 0, :, 4:] == 0).sum(-1).tolist() == [7, 6, 5, 4] and (mask[..., :4] == 0).all()


def test_a_causal_row_sees_the_history_and_the_block_up_to_itself(device):
    mask = ops.fill_attention_mask(int32(2).to(device), 1, 3, 8, causal=True)
    assert (mask[0, 0, :, :3] == 0).tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert torch.equal(mask[..., 3:], ops.fill_attention_mask(int32(2).to(device), 1, 3, 8)[..., 3:])


# ---- random geometries against numpy


@settings(max_examples=25, deadline=None)
@given(geometry(), st.sampled_from(CURRENT_DTYPES), st.integers(0, 2**31))
def test_pack_attention(device, g, dtype, seed):
    inputs = pack_inputs(*g, dtype=dtype, seed=seed)
    want = oracle.pack_attention(*inputs)
    assert_bits(ops.pack_attention(*on(device, inputs)), want)
    assert_bits(torch_dflash2.reference.pack_attention(*on(device, inputs)), want)


@settings(max_examples=25, deadline=None)
@given(geometry(), st.booleans(), st.integers(0, 2**31))
def test_fill_attention_mask(device, g, causal, seed):
    lanes, q_heads, _, _, rows, window = g
    lengths = torch.randint(-2, 2 * window, (lanes,), generator=torch.Generator().manual_seed(seed)).int()
    want = oracle.fill_attention_mask(lengths, q_heads, rows, window, causal)
    for fill in (ops.fill_attention_mask, torch_dflash2.reference.fill_attention_mask):
        assert_bits([fill(lengths.to(device), q_heads, rows, window, causal=causal)], [want])


@settings(max_examples=25, deadline=None)
@given(geometry(), st.sampled_from(CURRENT_DTYPES), st.integers(0, 2**31))
def test_commit_kv(device, g, dtype, seed):
    lanes, _, kv_heads, head_dim, rows, window = g
    inputs = commit_inputs(lanes, kv_heads, head_dim, rows, window, dtype=dtype, seed=seed)
    want = oracle.commit_kv(*inputs)
    for commit in (ops.commit_kv, torch_dflash2.reference.commit_kv):
        arguments = on(device, [x.clone() for x in inputs])
        commit(*arguments)
        assert_bits(arguments[4:], want)


@pytest.mark.parametrize("dtype", CURRENT_DTYPES)
@pytest.mark.parametrize(("lanes", "rows", "hidden_size"), [(1, 2, 3), (3, 5, 576), (4, 16, 1000)])
def test_set_mask_rows(device, dtype, lanes, rows, hidden_size):
    g = torch.Generator().manual_seed(hidden_size)
    embedding = values((hidden_size,), torch.bfloat16, g)
    hidden = values((lanes * rows, hidden_size), dtype, g)
    want = hidden.clone().view(lanes, rows, hidden_size)
    want[:, 1:] = embedding.to(dtype)
    for set_mask_rows in (ops.set_mask_rows, torch_dflash2.reference.set_mask_rows):
        got = hidden.clone().to(device)
        set_mask_rows(embedding.to(device), got, lanes, rows)
        torch.testing.assert_close(got.cpu().view_as(want), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got.cpu().view_as(want)), torch.signbit(want))


# ---- rounding


def test_every_float32_exponent_rounds_to_nearest_even(device):
    """Each exponent and sign with mantissas at, just under and just over the ties, for even and odd results."""
    mantissas = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x18001, 0x7FFFFF, 0x7F8000])
    x = (torch.arange(512)[:, None] << 23 | mantissas).to(torch.int64).where(torch.tensor(True), torch.tensor(0))
    x = (x & 0xFFFFFFFF).numpy().astype(np.uint32).view(np.float32)
    x = torch.from_numpy(x).reshape(1, 12, 4, 128)  # 6,144 values
    inputs = pack_inputs(1, 4, 4, 128, 12, 13)
    inputs[2], inputs[3], inputs[4] = x, x.flip(3).contiguous(), x.flip(1).contiguous()
    assert_bits(ops.pack_attention(*on(device, inputs)), oracle.pack_attention(*inputs))


def test_every_float16_becomes_bfloat16(device):
    x = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.float16).view(4, 16, 4, 256)
    inputs = pack_inputs(4, 4, 4, 256, 16, 17, dtype=torch.float16)
    inputs[2] = inputs[3] = inputs[4] = x
    assert_bits(ops.pack_attention(*on(device, inputs)), oracle.pack_attention(*inputs))


def test_every_bfloat16_becomes_float16(device):
    embedding = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    hidden = torch.zeros(2, 2**16, dtype=torch.float16, device=device)
    ops.set_mask_rows(embedding.to(device), hidden, 1, 2)
    torch.testing.assert_close(hidden[1].cpu(), embedding.half(), rtol=0, atol=0, equal_nan=True)
    numbers = ~embedding.isnan()
    assert torch.equal(torch.signbit(hidden[1].cpu())[numbers], torch.signbit(embedding)[numbers])


# ---- any int32 is a length, a position, a count

EXTREMES = [INT32.min, INT32.min + 1, -1, 0, 1, INT32.max - 1, INT32.max]


@pytest.mark.parametrize("window", [7, 16])
@pytest.mark.parametrize("length", EXTREMES)
def test_extreme_lengths_and_positions(device, window, length):
    positions = [*EXTREMES, window - 1]
    for start in range(0, len(positions), 4):
        inputs = pack_inputs(4, 2, 1, 128, 3, window, lengths=[length] * 4, positions=positions[start : start + 4])
        assert_bits(ops.pack_attention(*on(device, inputs)), oracle.pack_attention(*inputs))
    assert_bits(
        [ops.fill_attention_mask(int32(length).to(device), 2, 3, window)],
        [oracle.fill_attention_mask(int32(length), 2, 3, window)],
    )


@pytest.mark.parametrize("window", [7, 16])
@pytest.mark.parametrize("position", [*EXTREMES, 6, 15])
def test_extreme_counts_and_positions(device, window, position):
    for counts in ([0, 1, 5, 6], [INT32.min, -1, INT32.max, 3]):
        inputs = commit_inputs(4, 2, 128, 5, window, counts=counts, positions=[position] * 4)
        arguments = on(device, [x.clone() for x in inputs])
        ops.commit_kv(*arguments)
        assert_bits(arguments[4:], oracle.commit_kv(*inputs))


# ---- what may not be read, what may not be written


def test_slots_that_hold_no_token_are_never_read(device):
    for length in (0, 1, 5, 9, 10, 100):
        inputs = pack_inputs(2, 2, 2, 128, 4, 10, lengths=[length, 3], positions=[17, 4])
        for ring in inputs[:2]:
            for b, n in enumerate((length, 3)):
                position = int(inputs[6][b])
                live = {(position - 1 - age) % 10 for age in range(min(n, 9))}
                ring[b, :, [s for s in range(10) if s not in live]] = float("nan")
        for current in inputs[2:5]:
            current.nan_to_num_()
        for ring in inputs[:2]:
            for b, n in enumerate((length, 3)):
                live = [(int(inputs[6][b]) - 1 - age) % 10 for age in range(min(n, 9))]
                ring[b, :, live] = ring[b, :, live].nan_to_num()
        packed = ops.pack_attention(*on(device, inputs))
        assert not any(x.isnan().any().item() for x in packed)
        assert_bits(packed, oracle.pack_attention(*inputs))


def canvas(shape, dtype, device, fill=123.0, margin=64):
    """A contiguous view in the middle of a larger tensor, whose margins must stay as they are."""
    count = int(np.prod(shape))
    whole = torch.full((count + 2 * margin,), fill, dtype=dtype, device=device)
    return whole, whole[margin : margin + count].view(shape), margin


def assert_margins(whole, margin, fill=123.0):
    assert (whole[:margin] == fill).all().item() and (whole[-margin:] == fill).all().item()


@pytest.mark.parametrize("margin", [64, 1, 3])
def test_pack_attention_out_writes_its_outputs_and_nothing_else(device, margin):
    inputs = pack_inputs(3, 4, 2, 128, 5, 11)
    shapes = {"packed_queries": (3, 4, 5, 128), "packed_keys": (3, 2, 15, 128), "packed_values": (3, 2, 15, 128)}
    canvases = {name: canvas(shape, torch.bfloat16, device, margin=margin) for name, shape in shapes.items()}
    assert ops.pack_attention.out(*on(device, inputs), **{name: c[1] for name, c in canvases.items()}) is None
    assert_bits([c[1] for c in canvases.values()], oracle.pack_attention(*inputs))
    for whole, _, m in canvases.values():
        assert_margins(whole, m)


@pytest.mark.parametrize("margin", [64, 1, 8])
@pytest.mark.parametrize(("lanes", "kv_heads", "head_dim", "window"), [(1, 2, 256, 2081), (3, 3, 128, 1001)])
def test_large_outputs(device, lanes, kv_heads, head_dim, window, margin):
    """More than 2 MiB, which the CPU writes past its cache if they are aligned: full, wrapping, partial and empty rings."""
    lengths, positions = [window - 1, window // 2, 0][:lanes], [7 * window + window // 3, window // 3, 5][:lanes]
    inputs = pack_inputs(lanes, kv_heads, kv_heads, head_dim, 5, window, lengths=lengths, positions=positions)
    for ring in inputs[:2]:
        for b in range(lanes):
            ages = torch.arange(window - 1)[lengths[b] :]
            ring[b, :, (positions[b] - 1 - ages) % window] = float("nan")  # never committed, so never read
            ring[b, :, positions[b] % window] = float("nan")
    shapes = [(lanes, kv_heads, rows, head_dim) for rows in (5, window + 4, window + 4)]
    canvases = [canvas(shape, torch.bfloat16, device, margin=margin) for shape in shapes]
    names = ("packed_queries", "packed_keys", "packed_values")
    ops.pack_attention.out(*on(device, inputs), **{name: c[1] for name, c in zip(names, canvases, strict=True)})
    assert_bits([c[1] for c in canvases], oracle.pack_attention(*inputs))
    for whole, _, m in canvases:
        assert_margins(whole, m)


@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("margin", [64, 1])
def test_fill_attention_mask_out_writes_the_mask_and_nothing_else(device, margin, causal):
    whole, mask, margin = canvas((2, 3, 4, 12), torch.bfloat16, device, margin=margin)
    options = {} if causal is None else {"causal": causal}
    assert ops.fill_attention_mask.out(int32(3, 100).to(device), 3, 4, 9, **options, mask=mask) is None
    assert_bits([mask], [oracle.fill_attention_mask(int32(3, 100), 3, 4, 9, bool(causal))])
    assert_margins(whole, margin)


@pytest.mark.parametrize("margin", [64, 1, 7])
@pytest.mark.parametrize("dtype", CURRENT_DTYPES)
def test_commit_kv_writes_the_committed_rows_and_nothing_else(device, dtype, margin):
    inputs = commit_inputs(2, 2, 256, 3, 5, dtype=dtype, counts=[2, 0], positions=[4, 1])
    rings = [canvas(r.shape, torch.bfloat16, device, margin=margin) for r in inputs[4:]]
    for (_, ring, _), start in zip(rings, inputs[4:], strict=True):
        ring.copy_(start)
    ops.commit_kv(*on(device, inputs[:4]), *(ring for _, ring, _ in rings))
    assert_bits([ring for _, ring, _ in rings], oracle.commit_kv(*inputs))
    for whole, _, m in rings:
        assert_margins(whole, m)


@pytest.mark.parametrize("margin", [64, 1])
def test_set_mask_rows_leaves_anchors_and_neighbours_alone(device, margin):
    whole, hidden, margin = canvas((6, 7), torch.float32, device, margin=margin)
    ops.set_mask_rows(torch.arange(7.0).bfloat16().to(device), hidden, 2, 3)
    want = torch.arange(7.0).repeat(6, 1)
    want[[0, 3]] = 123.0
    assert torch.equal(hidden.cpu(), want)
    assert_margins(whole, margin)


# ---- layouts of what is only read


def layouts(x, device):
    """The same values: offset by one element, transposed in memory, every second element of the last dimension, expanded."""
    offset = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape)
    transposed = torch.zeros(tuple(reversed(x.shape)), dtype=x.dtype, device=device).permute(*reversed(range(x.dim())))
    spread = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=device)[..., ::2]
    for view in (offset, transposed, spread):
        view.copy_(x)
        assert x.dim() == 1 or view.storage_offset() == 1 or not view.is_contiguous()
    return offset, transposed, spread


@pytest.mark.parametrize("dtype", CURRENT_DTYPES)
def test_strided_and_offset_inputs(device, dtype):
    inputs = pack_inputs(2, 4, 2, 128, 3, 6, dtype=dtype)
    want = oracle.pack_attention(*inputs)
    variants = [layouts(x, device) for x in inputs]
    for layout in range(3):
        arguments = [v[layout] for v in variants]
        assert_bits(ops.pack_attention(*arguments), want)
        for argument, start in zip(arguments, inputs, strict=True):  # nothing that is read is changed
            np.testing.assert_array_equal(oracle.bits(argument), oracle.bits(start))
    commit = commit_inputs(2, 2, 128, 3, 6, dtype=dtype)
    variants = [layouts(x, device) for x in commit[:4]]
    for layout in range(3):
        rings = on(device, [x.clone() for x in commit[4:]])
        ops.commit_kv(*(v[layout] for v in variants), *rings)
        assert_bits(rings, oracle.commit_kv(*commit))


def test_current_rows_cut_from_one_projection(device):
    """Queries, keys and values as a fused projection gives them: three strided views of one tensor."""
    inputs = pack_inputs(2, 4, 2, 128, 3, 6)
    fused = torch.cat([x.flatten(2) for x in inputs[2:5]], dim=2).to(device)
    q, k, v = (x.unflatten(2, (-1, 128)) for x in fused.split([512, 256, 256], dim=2))
    ring_keys, ring_values, *_, lengths, positions = on(device, inputs)
    assert not q.is_contiguous()
    assert_bits(ops.pack_attention(ring_keys, ring_values, q, k, v, lengths, positions), oracle.pack_attention(*inputs))


def test_lanes_do_not_touch_each_other(device):
    inputs = pack_inputs(4, 2, 1, 128, 3, 9, lengths=[0, 3, 8, 50], positions=[0, 3, 8, 50])
    together = ops.pack_attention(*on(device, inputs))
    for b in range(4):
        alone = ops.pack_attention(*on(device, [x[b : b + 1] for x in inputs]))
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_array_equal(oracle.bits(x[b : b + 1]), oracle.bits(y))


def test_a_ring_is_what_a_list_of_tokens_is(device):
    """Many small commits past the window: packing always shows the newest window - 1 tokens, newest first."""
    window, rows, g = 7, 3, torch.Generator().manual_seed(5)
    rings = [torch.full((2, 1, window, 128), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]
    tokens, counts = [[], []], torch.zeros(2, dtype=torch.int32)
    zeros = torch.zeros(2, rows, 1, 128, device=device)
    for _ in range(20):
        new = torch.randint(1, 100, (2, rows, 1, 128), generator=g).float()
        accepted = torch.randint(0, rows + 1, (2,), generator=g).int()
        ops.commit_kv(new.to(device), -new.to(device), accepted.to(device), counts.to(device), *rings)
        for b in range(2):
            tokens[b] += [new[b, i, 0] for i in range(accepted[b])]
        counts += accepted
        _, keys, packed_values = ops.pack_attention(*rings, zeros, zeros, zeros, counts.to(device), counts.to(device))
        for b in range(2):
            newest = tokens[b][::-1][: window - 1]
            want = torch.stack(newest + [torch.zeros(128)] * (window - 1 - len(newest)))
            assert torch.equal(keys[b, 0, rows:].cpu().float(), want)
            assert torch.equal(packed_values[b, 0, rows:].cpu().float(), -want + 0.0)

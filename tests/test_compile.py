"""The operators inside torch.compile, and what torch.library.opcheck says of them."""

import pytest
import torch
import torch._dynamo.testing
from test_invalid_arguments import CALLS
from test_operators import commit_inputs, int32, on, pack_inputs

ops = torch.ops.dflash2


def backend(device):
    # Inductor on mps writes Metal shaders of its own, which only a Mac compiles.
    return "inductor" if device == "cpu" else "aot_eager"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("op", "options"),
    [(op, {}) for op in CALLS] + [(op, {"causal": True}) for op in ("fill_attention_mask", "fill_attention_mask.out")],
)
def test_opcheck(device, op, options):
    call, valid = CALLS[op]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (valid() | options).items()}
    keyword_only = {a.name for a in call._schema.arguments if a.kwarg_only}
    args = tuple(v for n, v in arguments.items() if n not in keyword_only)
    kwargs = {n: v for n, v in arguments.items() if n in keyword_only}
    results = torch.library.opcheck(call, args, kwargs)
    assert set(results) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert set(results.values()) == {"SUCCESS"}


def drafting_round(ring_keys, ring_values, q, k, v, counts, accepted, embedding, hidden):
    """All four operators around attention, as a drafter uses them."""
    lanes, rows, q_heads, _ = q.shape
    ops.set_mask_rows(embedding, hidden, lanes, rows)
    packed_q, packed_k, packed_v = ops.pack_attention(ring_keys, ring_values, q, k, v, counts, counts)
    mask = ops.fill_attention_mask(counts, q_heads, rows, ring_keys.shape[2])
    groups = q_heads // k.shape[2]
    scores = packed_q.float() @ packed_k.float().repeat_interleave(groups, 1).transpose(2, 3) / q.shape[-1] ** 0.5
    out = (scores + mask.float()).softmax(-1) @ packed_v.float().repeat_interleave(groups, 1)
    ops.commit_kv(k, v, accepted, counts, ring_keys, ring_values)
    return out, hidden * 2


def round_inputs(device, window=9, rows=3, seed=0, lanes=2):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    inputs = [normal(lanes, 2, window, 128).bfloat16(), normal(lanes, 2, window, 128).bfloat16()]
    inputs += [normal(lanes, rows, heads, 128) for heads in (4, 2, 2)]
    inputs += [
        torch.randint(0, 3 * window, (lanes,), generator=g).int(),
        torch.randint(0, rows + 1, (lanes,), generator=g).int(),
    ]
    inputs += [normal(24).bfloat16(), normal(lanes * rows, 24)]
    return on(device, inputs)


def test_compiled_round_equals_eager(device):
    compiled = torch.compile(drafting_round, backend=backend(device), fullgraph=True)
    for seed in range(3):
        eager_inputs, compiled_inputs = round_inputs(device, seed=seed), round_inputs(device, seed=seed)
        torch.testing.assert_close(compiled(*compiled_inputs), drafting_round(*eager_inputs), rtol=2e-5, atol=2e-5)
        for a, b in zip(compiled_inputs, eager_inputs, strict=True):  # what was written: rings and hidden
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_dynamic_compile_serves_every_window_and_row_count(device):
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(drafting_round, backend=graphs, fullgraph=True, dynamic=True)
    for window, rows in [(9, 3), (12, 5), (33, 8), (17, 16), (40, 2)]:
        eager_inputs, compiled_inputs = (round_inputs(device, window, rows, seed=window) for _ in range(2))
        torch.testing.assert_close(compiled(*compiled_inputs), drafting_round(*eager_inputs), rtol=2e-5, atol=2e-5)
    assert graphs.frame_count == 1


def test_dynamic_numbers_do_not_recompile(device):
    """Window and rows as Python numbers, not as sizes of a tensor."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    lengths = int32(3, 50).to(device)
    compiled = torch.compile(
        lambda heads, rows, window: ops.fill_attention_mask(lengths, heads, rows, window, causal=True) + 0,
        backend=graphs, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for heads, rows, window in [(4, 3, 9), (8, 5, 12), (6, 8, 33), (32, 16, 17)]:
        want = ops.fill_attention_mask(lengths, heads, rows, window, causal=True)
        assert torch.equal(compiled(heads, rows, window), want)
    assert graphs.frame_count == 1


def test_compiled_out_operators_write_in_place(device):
    inputs = pack_inputs(2, 4, 2, 128, 3, 9)
    for x in inputs[:5]:
        x.nan_to_num_()
    inputs = on(device, inputs)
    outputs = [torch.zeros_like(x) for x in ops.pack_attention(*inputs)]

    def pack(inputs, packed_queries, packed_keys, packed_values):
        ops.pack_attention.out(*inputs, packed_queries=packed_queries, packed_keys=packed_keys, packed_values=packed_values)
        return packed_keys + 1

    got = torch.compile(pack, backend=backend(device), fullgraph=True)(inputs, *outputs)
    want = ops.pack_attention(*inputs)
    torch.testing.assert_close(got, want[1] + 1, rtol=0, atol=0)
    for output, expected in zip(outputs, want, strict=True):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_invalid_geometry_is_reported_while_compiling(device):
    inputs = on(device, commit_inputs(1, 1, 128, 3, 8))
    compiled = torch.compile(lambda *a: ops.commit_kv(*a), backend=backend(device), fullgraph=True)
    with pytest.raises(Exception, match="invalid DFlash2 attention geometry: commit_kv: new_values: expected the dtype of"):
        compiled(inputs[0], inputs[1].half(), *inputs[2:])


def test_exported_program_keeps_the_operators(device):
    class Round(torch.nn.Module):
        def forward(self, *inputs):
            return drafting_round(*inputs)

    program = torch.export.export(Round(), tuple(round_inputs(device)), strict=False)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"dflash2.pack_attention.default", "dflash2.fill_attention_mask.default"} <= called
    torch.testing.assert_close(
        program.module()(*round_inputs(device, seed=7)),
        drafting_round(*round_inputs(device, seed=7)),
        rtol=2e-5,
        atol=2e-5,
    )

"""RingKVCache against lists of tokens in numpy, and what it refuses."""

import itertools

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dflash2 import RingKVCache

D = 128
CANARY = np.int16(0x7FD5)  # a NaN that nothing here computes
BLOCK_MASKED = np.int16(-128)  # the bits of -inf, 0xFF80


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def random_tokens(rng, *shape):
    return torch.from_numpy(rng.standard_normal((*shape, D), dtype=np.float32))


class TokenLists:
    """What the cache has to hold: for each lane every token committed, and for each slot the last that was written."""

    def __init__(self, layers, lanes, kv_heads, window):
        self.layers, self.kv_heads, self.window = layers, kv_heads, window
        self.tokens = [[] for _ in range(lanes)]  # each a [layers, 2, kv_heads, D] of bfloat16 bits
        self.slots = np.full((layers, 2, lanes, kv_heads, window, D), CANARY)

    def commit(self, lane, new):
        """new: [layers, 2, N, kv_heads, D] float32."""
        for i in range(new.shape[2]):
            token = oracle.to_bfloat16(new[:, :, i]).view(np.int16)
            self.slots[:, :, lane, :, len(self.tokens[lane]) % self.window] = token
            self.tokens[lane].append(token)

    def copy(self):
        other = TokenLists(self.layers, len(self.tokens), self.kv_heads, self.window)
        other.tokens, other.slots = [list(t) for t in self.tokens], self.slots.copy()
        return other

    def history(self, lane):
        """Newest first, as many as a block may see: [age][layers, 2, kv_heads, D]."""
        return self.tokens[lane][::-1][: self.window - 1]

    def packed(self, layer, which, current):
        """current: [lanes, R, kv_heads, D] float32."""
        lanes, rows = current.shape[:2]
        out = np.zeros((lanes, self.kv_heads, self.window - 1 + rows, D), np.int16)
        out[:, :, :rows] = oracle.to_bfloat16(current).view(np.int16).transpose(0, 2, 1, 3)
        for lane in range(lanes):
            for age, token in enumerate(self.history(lane)):
                out[lane, :, rows + age] = token[layer, which]
        return out

    def mask(self, q_heads, rows):
        out = np.zeros((len(self.tokens), q_heads, rows, self.window - 1 + rows), np.int16)
        for lane, row, age in itertools.product(range(len(self.tokens)), range(rows), range(self.window - 1)):
            # Row j is j + 1 + age tokens after the one of that age: the window takes in fewer than `window`.
            seen = age < len(self.tokens[lane]) and row + 1 + age < self.window
            out[lane, :, row, rows + age] = 0 if seen else BLOCK_MASKED
        return out


class Pair:
    """A cache and its oracle, driven and compared together."""

    def __init__(self, device, layers, lanes, kv_heads, window, seed):
        self.device, self.rng = device, np.random.default_rng(seed)
        self.lists = TokenLists(layers, lanes, kv_heads, window)
        self.cache = RingKVCache(layers, lanes, kv_heads, window, D, device=device)
        self.cache.rings.view(torch.int16).fill_(int(CANARY))

    def new(self, tokens):
        shape = self.lists.layers, 2, self.cache.lanes, tokens, self.cache.kv_heads
        return random_tokens(self.rng, *shape)

    def keep(self, new, counts):
        for lane, count in enumerate(counts):
            self.lists.commit(lane, new[:, :, lane, : max(0, min(count, new.shape[3]))])

    def commit(self, counts, tokens):
        new = self.new(tokens)
        for layer in range(self.lists.layers):
            keys, values = new[layer].to(self.device)
            self.cache.commit(layer, keys, values, int32(*counts).to(self.device))
        self.cache.advance(int32(*counts).to(self.device))
        self.keep(new, counts)

    def prefill(self, lengths, tokens):
        new = self.new(tokens)
        given = None if lengths is None else int32(*lengths).to(self.device)
        for layer in range(self.lists.layers):
            keys, values = new[layer].to(self.device)
            self.cache.prefill(layer, keys, values, given)
        self.cache.advance(given)
        self.keep(new, [tokens] * self.cache.lanes if lengths is None else lengths)

    def prefill_last(self, lengths, tokens):
        """Gives the cache each lane's last `window` tokens alone, NaN behind shorter lanes."""
        new, window = self.new(tokens), self.cache.window
        kept = torch.full((*new.shape[:3], min(tokens, window), *new.shape[4:]), float("nan"))
        for lane, length in enumerate(lengths):
            last = new[:, :, lane, max(0, length - window) : length]
            kept[:, :, lane, : last.shape[2]] = last
        given = int32(*lengths).to(self.device)
        for layer in range(self.lists.layers):
            keys, values = kept[layer].to(self.device)
            self.cache.prefill(layer, keys, values, given, tokens=tokens)
        self.cache.advance(given)
        # The oracle's slots of tokens that were never given: overwritten by later ones, or as they were.
        before = self.lists.slots.copy()
        self.keep(new, lengths)
        for lane, length in enumerate(lengths):
            if length == 0:
                self.lists.slots[:, :, lane] = before[:, :, lane]

    def check(self, rows):
        cache, lists = self.cache, self.lists
        assert cache.token_counts.tolist() == [len(t) for t in lists.tokens]
        np.testing.assert_array_equal(oracle.bits(cache.rings), lists.slots)
        q_heads = 2 * cache.kv_heads
        mask = cache.mask(q_heads, rows)
        np.testing.assert_array_equal(oracle.bits(mask), lists.mask(q_heads, rows))
        assert cache.mask(q_heads, rows) is mask
        for layer in range(lists.layers):
            queries = random_tokens(self.rng, cache.lanes, rows, q_heads)
            keys, values = random_tokens(self.rng, 2, cache.lanes, rows, cache.kv_heads)
            got = cache.pack(layer, *(x.to(self.device) for x in (queries, keys, values)))
            np.testing.assert_array_equal(oracle.bits(got[0]), oracle.to_bfloat16(queries).view(np.int16).transpose(0, 2, 1, 3))
            np.testing.assert_array_equal(oracle.bits(got[1]), lists.packed(layer, 0, keys))
            np.testing.assert_array_equal(oracle.bits(got[2]), lists.packed(layer, 1, values))


# ---- any sequence of calls


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_sequence_of_calls(device, data):
    draw = data.draw
    layers, lanes, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    window = draw(st.sampled_from([3, 5, 7, 8, 13]))
    pair = Pair(device, layers, lanes, kv_heads, window, draw(st.integers(0, 2**31)))
    lane = st.integers(0, lanes - 1)
    snapshots = []
    calls = ["commit", "commit", "commit", "prefill", "prefill last", "reset", "fork", "snapshot", "restore"]
    for _ in range(draw(st.integers(1, 12))):
        call = draw(st.sampled_from(calls))
        if call == "commit":
            tokens = draw(st.integers(1, min(16, window - 1)))
            pair.commit([draw(st.integers(-1, tokens + 2)) for _ in range(lanes)], tokens)
        elif call == "prefill":
            tokens = draw(st.integers(0, 3 * window))
            pair.prefill(draw(st.none() | st.lists(st.integers(-1, tokens + 2), min_size=lanes, max_size=lanes)), tokens)
        elif call == "prefill last":
            tokens = draw(st.integers(0, 3 * window))
            pair.prefill_last([draw(st.integers(0, tokens)) for _ in range(lanes)], tokens)
        elif call == "reset":
            which = draw(st.none() | lane)
            pair.cache.reset(which)
            for emptied in range(lanes) if which is None else [which]:
                pair.lists.tokens[emptied] = []
        elif call == "fork":
            src, dst = draw(lane), draw(lane)
            pair.cache.fork(src, dst)
            pair.lists.tokens[dst] = list(pair.lists.tokens[src])
            pair.lists.slots[:, :, dst] = pair.lists.slots[:, :, src]
        elif call == "snapshot":
            snapshots.append((pair.cache.snapshot(), pair.lists.copy()))
        elif snapshots:
            snapshot, lists = draw(st.sampled_from(snapshots))
            pair.cache.restore(snapshot)
            pair.lists = lists.copy()
        pair.check(rows=draw(st.integers(2, window - 1)))


# ---- named faults


@pytest.mark.parametrize("window", [5, 8, 12])
def test_prefill_equals_one_token_commits(device, window):
    for before, tokens in itertools.product([0, window + 2], [0, 1, window - 1, window, window + 1, 3 * window + 5]):
        at_once, one_by_one, last = (Pair(device, 2, 2, 1, window, seed=before) for _ in range(3))
        for pair in (at_once, one_by_one, last):
            pair.prefill([before, 1], before + 1)
        new = at_once.new(tokens)
        for layer in range(2):
            keys, values = new[layer].to(device)
            at_once.cache.prefill(layer, keys, values)
            last.cache.prefill(layer, keys[:, -window:], values[:, -window:], tokens=tokens)
        at_once.cache.advance()
        last.cache.advance()
        for i in range(tokens):
            for layer in range(2):
                keys, values = new[layer, :, :, i : i + 1].to(device)
                one_by_one.cache.commit(layer, keys, values, int32(1, 1).to(device))
            one_by_one.cache.advance()
        for pair in (at_once, last):
            np.testing.assert_array_equal(oracle.bits(pair.cache.rings), oracle.bits(one_by_one.cache.rings))
            assert pair.cache.token_counts.tolist() == one_by_one.cache.token_counts.tolist() == [before + tokens, 1 + tokens]


def test_long_run_of_one_token_commits(device):
    pair = Pair(device, 1, 2, 1, 7, seed=0)
    for step in range(40):
        pair.commit([1, step % 2], 1)
        pair.check(rows=3)


def test_any_int32_is_a_safe_count(device):
    pair = Pair(device, 1, 2, 1, 7, seed=0)
    for low, high in [(-(2**31), 2**31 - 1), (-1, 2**31 - 1), (-(2**31), 4)]:
        pair.prefill([low, high], 9)
        pair.check(rows=3)
        pair.prefill([high, low], 4)
        pair.check(rows=3)
        pair.commit([low, high], 4)
        pair.check(rows=3)


def test_lane_with_count_zero_keeps_every_byte(device):
    pair = Pair(device, 2, 3, 2, 6, seed=1)
    pair.prefill([9, 4, 0], 9)
    before = oracle.bits(pair.cache.rings).copy()
    pair.commit([2, 0, 0], 5)
    after = oracle.bits(pair.cache.rings)
    np.testing.assert_array_equal(after[:, :, 1:], before[:, :, 1:])
    assert (after[:, :, 0] != before[:, :, 0]).any() and pair.cache.token_counts.tolist() == [11, 4, 0]


def test_batched_lanes_equal_each_lane_alone(device):
    together = Pair(device, 1, 3, 2, 7, seed=2)
    alone = [Pair(device, 1, 1, 2, 7, seed=0) for _ in range(3)]
    g = torch.Generator().manual_seed(3)
    for _ in range(8):
        keys, values = torch.randn(2, 3, 4, 2, D, generator=g).to(device)
        counts = torch.randint(0, 5, (3,), generator=g).int().to(device)
        together.cache.commit(0, keys, values, counts)
        together.cache.advance(counts)
        packed = together.cache.pack(0, keys, keys, values)
        for lane, pair in enumerate(alone):
            own = slice(lane, lane + 1)
            pair.cache.commit(0, keys[own], values[own], counts[own])
            pair.cache.advance(counts[own])
            for a, b in zip(packed, pair.cache.pack(0, keys[own], keys[own], values[own]), strict=True):
                assert torch.equal(a[own], b)
            assert torch.equal(together.cache.mask(4, 4)[own], pair.cache.mask(4, 4))


def test_history_is_not_seen_after_reset_nor_past_a_restored_length(device):
    pair = Pair(device, 1, 2, 1, 6, seed=4)
    pair.prefill([3, 3], 3)
    prefix = pair.cache.snapshot()
    pair.prefill(None, 11)
    pair.cache.reset(1)
    keys = torch.ones(2, 2, 1, D, device=device)
    packed = pair.cache.pack(0, keys, keys, keys)[1]
    assert (packed[1, 0, 2:] == 0).all() and (packed[0, 0, 2:] != 0).any(-1).all()
    pair.cache.restore(prefix)
    packed = pair.cache.pack(0, keys, keys, keys)[1]
    assert (packed[:, 0, 2:5] != 0).any(-1).all() and (packed[:, 0, 5:] == 0).all()
    assert (pair.cache.mask(1, 2)[:, :, :, 5:] == float("-inf")).all()


def test_snapshot_is_a_copy(device):
    pair = Pair(device, 1, 1, 1, 5, seed=5)
    pair.prefill(None, 4)
    snapshot = pair.cache.snapshot()
    before = oracle.bits(snapshot.rings).copy()
    pair.prefill(None, 4)
    np.testing.assert_array_equal(oracle.bits(snapshot.rings), before)
    pair.cache.restore(snapshot)
    pair.prefill(None, 4)
    np.testing.assert_array_equal(oracle.bits(snapshot.rings), before)
    assert snapshot.token_counts.tolist() == [4]


def test_mask_is_made_once_a_round(device):
    pair = Pair(device, 1, 1, 1, 5, seed=6)
    seen = []
    for change in (
        lambda: pair.prefill(None, 2),
        lambda: pair.commit([1], 1),
        lambda: pair.cache.reset(0),
        lambda: None,
    ):
        seen.append(pair.cache.mask(2, 3))
        assert pair.cache.mask(2, 3) is seen[-1] and pair.cache.mask(2, 4).shape == (1, 2, 4, 8)
        assert pair.cache.mask(1, 4).shape == (1, 1, 4, 8)
        change()
    assert [(m[0, 0, 0] == 0).sum().item() for m in seen] == [3, 5, 6, 3]


class NoHostRead(TorchDispatchMode):
    """Fails on whatever makes the host wait for a tensor's content."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"), name
        result = func(*args, **(kwargs or {}))
        if name in ("aten::_to_copy", "aten::copy_"):
            assert result.device == args[-1].device, "a copy between devices"
        return result


def test_nothing_is_read_back_to_the_host(device):
    cache = RingKVCache(2, 2, 1, 5, D, device=device)
    keys = torch.randn(2, 13, 1, D, device=device)
    counts = int32(1, 2).to(device)
    with NoHostRead():
        for layer in range(2):
            cache.prefill(layer, keys, keys, counts)
        cache.advance(counts)
        cache.fork(0, 1)
        snapshot = cache.snapshot()
        cache.mask(2, 2)
        for layer in range(2):
            cache.pack(layer, keys[:, :2], keys[:, :2], keys[:, :2])
            cache.commit(layer, keys[:, :2], keys[:, :2], counts)
        cache.advance(counts)
        cache.reset(1)
        cache.restore(snapshot)
    assert cache.token_counts.tolist() == [1, 1]


# ---- misuse


def valid_cache(device):
    pair = Pair(device, 2, 2, 1, 6, seed=7)
    pair.prefill([4, 9], 9)
    return pair.cache


KEYS = torch.ones(2, 3, 1, D)
COUNTS = int32(1, 2)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda c, k, n: c.pack(2, k, k, k), IndexError, r"pack: layer: expected 0\.\.1, got 2"),
        (lambda c, k, n: c.pack(-1, k, k, k), IndexError, r"pack: layer: expected 0\.\.1, got -1"),
        (lambda c, k, n: c.pack(0, k[:1], k[:1], k[:1]), RuntimeError, "current_queries"),
        (lambda c, k, n: c.pack(0, *[k.repeat(1, 2, 1, 1)] * 3), RuntimeError, "window larger than rows = 6, got 6"),
        (lambda c, k, n: c.mask(1, 6), RuntimeError, "window larger than rows = 6, got 6"),
        (lambda c, k, n: c.commit(2, k, k, n), IndexError, r"commit: layer: expected 0\.\.1, got 2"),
        (lambda c, k, n: c.commit(0, k.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), n), RuntimeError, "got 6"),
        (lambda c, k, n: c.commit(0, k[:, :0], k[:, :0], n), RuntimeError, "tokens in 1..16, got 0"),
        (lambda c, k, n: c.commit(0, k[0, 0, 0], k, n), RuntimeError, "new_keys"),
        (lambda c, k, n: c.commit(0, k, k, n.long()), RuntimeError, "commit_counts: expected dtype int32"),
        (lambda c, k, n: c.commit(0, k, k, n[:1]), RuntimeError, "commit_counts"),
        (lambda c, k, n: c.commit(0, k, k.half(), n), RuntimeError, "new_values"),
        (lambda c, k, n: c.prefill(-1, k, k), IndexError, r"prefill: layer: expected 0\.\.1, got -1"),
        (lambda c, k, n: c.prefill(0, k[..., :64], k), ValueError, "prefill: keys: expected float32, bfloat16 or float16"),
        (lambda c, k, n: c.prefill(0, k, k[:, :2]), ValueError, "prefill: values: expected float32, bfloat16 or float16"),
        (lambda c, k, n: c.prefill(0, k.int(), k), ValueError, "prefill: keys: expected float32.*got torch.int32"),
        (lambda c, k, n: c.prefill(0, k, k, n.long()), ValueError, "prefill: lengths: expected int32"),
        (
            lambda c, k, n: c.prefill(0, k, k, n[:1]),
            ValueError,
            r"prefill: lengths: expected int32 of shape \[lanes\] = \[2\]",
        ),
        (
            lambda c, k, n: c.prefill(0, k, k, tokens=9),
            ValueError,
            "prefill: keys: expected the last 6 of 9 tokens, got 3",
        ),
        (
            lambda c, k, n: c.prefill(0, k, k, tokens=2),
            ValueError,
            "prefill: keys: expected the last 2 of 2 tokens, got 3",
        ),
        (lambda c, k, n: c.advance(n), RuntimeError, r"advance: expected a commit to every layer first.* \[0, 1\]"),
        (lambda c, k, n: c.reset(2), IndexError, r"reset: lane: expected 0\.\.1, got 2"),
        (lambda c, k, n: c.reset(-1), IndexError, r"reset: lane: expected 0\.\.1, got -1"),
        (lambda c, k, n: c.fork(0, 2), IndexError, r"fork: dst: expected 0\.\.1, got 2"),
        (lambda c, k, n: c.fork(-1, 0), IndexError, r"fork: src: expected 0\.\.1, got -1"),
        (
            lambda c, k, n: c.restore(RingKVCache(2, 1, 1, 6, D, device=c.device).snapshot()),
            ValueError,
            "restore: snapshot: expected rings",
        ),
        (
            lambda c, k, n: c.restore(RingKVCache(2, 2, 1, 6, D, device="meta").snapshot()),
            ValueError,
            "restore: snapshot: expected rings .* got .* on meta",
        ),
    ],
)
def test_misuse_is_refused_and_changes_nothing(device, misuse, error, message):
    cache = valid_cache(device)
    rings, counts, mask = oracle.bits(cache.rings).copy(), cache.token_counts.tolist(), cache.mask(1, 3)
    with pytest.raises(error, match=message):
        misuse(cache, KEYS.to(device), COUNTS.to(device))
    np.testing.assert_array_equal(oracle.bits(cache.rings), rings)
    assert cache.token_counts.tolist() == counts and cache.mask(1, 3) is mask
    for layer in range(2):  # and the round can go on
        cache.commit(layer, KEYS.to(device), KEYS.to(device), COUNTS.to(device))
    cache.advance(COUNTS.to(device))
    assert cache.token_counts.tolist() == [counts[0] + 1, counts[1] + 2]


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda c, k, n: c.commit(0, k, k, n), RuntimeError, "commit: layer 0 was already committed to in this round"),
        (lambda c, k, n: c.prefill(0, k, k), RuntimeError, "prefill: layer 0 was already committed to in this round"),
        (lambda c, k, n: c.commit(1, k[:, :2], k[:, :2], n), ValueError, "expected 3 tokens as for layer 0, got 2"),
        (
            lambda c, k, n: c.advance(n),
            RuntimeError,
            r"advance: expected a commit to every layer first, got none.* \[1\]",
        ),
        (lambda c, k, n: c.pack(0, k, k, k), RuntimeError, "pack: layer 0 was committed to in this round"),
        (lambda c, k, n: c.snapshot(), RuntimeError, r"snapshot: layers \[0\] were committed to in this round"),
        (lambda c, k, n: c.reset(0), RuntimeError, r"reset: layers \[0\] were committed to"),
        (lambda c, k, n: c.fork(0, 1), RuntimeError, r"fork: layers \[0\] were committed to"),
    ],
)
def test_misuse_between_commit_and_advance(device, misuse, error, message):
    cache = valid_cache(device)
    keys, counts = KEYS.to(device), COUNTS.to(device)
    cache.commit(0, keys, keys, counts)
    rings = oracle.bits(cache.rings).copy()
    with pytest.raises(error, match=message):
        misuse(cache, keys, counts)
    np.testing.assert_array_equal(oracle.bits(cache.rings), rings)
    assert cache.token_counts.tolist() == [4, 9]
    cache.commit(1, keys, keys, counts)
    for wrong in (counts.long(), counts[:1]):
        with pytest.raises(ValueError, match="advance: counts: expected int32"):
            cache.advance(wrong)
    cache.advance(counts)
    assert cache.token_counts.tolist() == [5, 11]


def test_reset_and_restore_drop_a_round_in_progress(device):
    cache = valid_cache(device)
    snapshot, keys, counts = cache.snapshot(), KEYS.to(device), COUNTS.to(device)
    for drop in (lambda: cache.restore(snapshot), cache.reset):
        cache.commit(0, keys, keys, counts)
        drop()
        cache.commit(0, keys, keys, counts)
        cache.commit(1, keys, keys, counts)
        cache.advance(counts)
    assert cache.token_counts.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ((0, 1, 1, 8, 128), "layers: expected at least 1, got 0"),
        ((1, 0, 1, 8, 128), r"lanes: expected 1\.\.4, got 0"),
        ((1, 5, 1, 8, 128), r"lanes: expected 1\.\.4, got 5"),
        ((1, 1, 0, 8, 128), "kv_heads: expected at least 1, got 0"),
        ((1, 1, 1, 2, 128), "window: expected at least 3, got 2"),
        ((1, 1, 1, 8, 64), "head_dim: expected 128 or 256, got 64"),
    ],
)
def test_geometry_is_refused(device, geometry, message):
    with pytest.raises(ValueError, match=message):
        RingKVCache(*geometry, device=device)


def test_wrong_device_is_refused():
    cache, keys = RingKVCache(1, 2, 1, 6, D), KEYS.to("meta")
    for call in (
        lambda: cache.pack(0, keys, keys, keys),
        lambda: cache.commit(0, keys, keys, COUNTS),
        lambda: cache.commit(0, KEYS, KEYS, COUNTS.to("meta")),
        lambda: cache.prefill(0, keys, keys),
        lambda: cache.prefill(0, KEYS, KEYS, COUNTS.to("meta")),
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"cpu.*meta"):
            call()
    assert cache.token_counts.tolist() == [0, 0] and (cache.rings == 0).all()


def test_cache_made_in_inference_mode_is_usable_outside(device):
    with torch.inference_mode():
        cache = RingKVCache(1, 2, 1, 6, D, device=device)
        cache.prefill(0, KEYS.to(device), KEYS.to(device))
        cache.advance()
    cache.commit(0, KEYS.to(device), KEYS.to(device), COUNTS.to(device))
    cache.advance(COUNTS.to(device))
    assert cache.token_counts.tolist() == [4, 5]


@pytest.mark.parametrize("layer", [True, torch.tensor(0), 0.0, "0"])
def test_what_only_looks_like_an_index_is_refused(layer):
    cache = RingKVCache(2, 3, 1, 8, 128)
    cache.token_counts += 1
    tokens = torch.ones(3, 2, 1, 128)
    for call in (lambda: cache.prefill(layer, tokens, tokens), lambda: cache.reset(layer), lambda: cache.fork(layer, 1)):
        with pytest.raises(IndexError, match=r"expected 0\.\."):
            call()
    assert cache.token_counts.tolist() == [1, 1, 1]


def test_a_refused_prefill_writes_nothing():
    cache = RingKVCache(1, 1, 1, 8, 128)
    keys, values = torch.ones(1, 2, 1, 128), torch.ones(1, 2, 1, 128, requires_grad=True)
    with pytest.raises(ValueError, match="values: expected a tensor that does not require grad"):
        cache.prefill(0, keys, values)
    with pytest.raises(ValueError, match="values: expected float32, bfloat16 or float16, the same for both"):
        cache.prefill(0, keys, values.detach().half())
    with pytest.raises(ValueError, match="keys: expected float32"):
        cache.prefill(0, keys.double(), values.detach().double())
    assert not cache.rings.any()

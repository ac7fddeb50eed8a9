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
from torch_dflash2 import cache as cache_module

D = 128
CANARY = np.int16(0x7FD5)  # a NaN that nothing here computes
BLOCK_MASKED = np.int16(-128)  # the bits of -inf, 0xFF80


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def bits_of(rings):
    """Of a cache whose layers have one window."""
    return oracle.bits(torch.stack(list(rings)))


def random_tokens(rng, *shape):
    return torch.from_numpy(rng.standard_normal((*shape, D), dtype=np.float32))


@pytest.fixture(autouse=True, scope="module")
def small_steps():
    """So that rings of full attention grow often."""
    growth, cache_module.GROWTH = cache_module.GROWTH, 32
    yield
    cache_module.GROWTH = growth


class TokenLists:
    """What the cache has to hold: for each lane every token committed, and for each slot the last that was written."""

    def __init__(self, lanes, kv_heads, windows):
        self.layers, self.kv_heads, self.windows = len(windows), kv_heads, windows
        self.tokens = [[] for _ in range(lanes)]  # each a [layers, 2, kv_heads, D] of bfloat16 bits
        # With full attention all tokens have their own slot, and tokens says what is there.
        self.slots = [None if w is None else np.full((2, lanes, kv_heads, w, D), CANARY) for w in windows]

    def commit(self, lane, new):
        """new: [layers, 2, N, kv_heads, D] float32."""
        for i in range(new.shape[2]):
            token = oracle.to_bfloat16(new[:, :, i]).view(np.int16)
            for layer, window in enumerate(self.windows):
                if window is not None:
                    self.slots[layer][:, lane, :, len(self.tokens[lane]) % window] = token[layer]
            self.tokens[lane].append(token)

    def copy(self):
        other = TokenLists(len(self.tokens), self.kv_heads, self.windows)
        other.tokens = [list(t) for t in self.tokens]
        other.slots = [None if s is None else s.copy() for s in self.slots]
        return other

    def fork(self, src, dst):
        self.tokens[dst] = list(self.tokens[src])
        for slots in self.slots:
            if slots is not None:
                slots[:, dst] = slots[:, src]

    def history(self, layer, lane):
        """Newest first, as many as a block may see: [age][layers, 2, kv_heads, D]."""
        window = self.windows[layer]
        return self.tokens[lane][::-1][: None if window is None else window - 1]

    def packed(self, layer, which, current, slots):
        """current: [lanes, R, kv_heads, D] float32."""
        lanes, rows = current.shape[:2]
        out = np.zeros((lanes, self.kv_heads, slots - 1 + rows, D), np.int16)
        out[:, :, :rows] = oracle.to_bfloat16(current).view(np.int16).transpose(0, 2, 1, 3)
        for lane in range(lanes):
            for age, token in enumerate(self.history(layer, lane)):
                out[lane, :, rows + age] = token[layer, which]
        return out

    def mask(self, layer, q_heads, rows, slots, causal):
        out = np.full((len(self.tokens), q_heads, rows, slots - 1 + rows), BLOCK_MASKED)
        window = self.windows[layer] or 10**9
        for lane, row in itertools.product(range(len(self.tokens)), range(rows)):
            out[lane, :, row, : row + 1 if causal else rows] = 0
            # Row j is j + 1 + age tokens after the one of that age: the window takes in fewer than `window`.
            out[lane, :, row, rows : rows + max(0, min(len(self.tokens[lane]), window - 1 - row))] = 0
        return out


class Pair:
    """A cache and its oracle, driven and compared together."""

    def __init__(self, device, layers, lanes, kv_heads, window, seed):
        self.device, self.rng = device, np.random.default_rng(seed)
        windows = tuple(window) if isinstance(window, (list, tuple)) else (window,) * layers
        self.lists = TokenLists(lanes, kv_heads, windows)
        self.cache = RingKVCache(layers, lanes, kv_heads, window, D, device=device)
        for ring in self.cache.rings:
            ring.view(torch.int16).fill_(int(CANARY))

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

    def prefill_lane(self, lane, tokens):
        """Through a cache of that lane alone."""
        new = self.new(tokens)
        part = self.cache.lane(lane)
        for layer in range(self.lists.layers):
            keys, values = new[layer][:, lane : lane + 1].to(self.device)
            part.prefill(layer, keys, values)
        part.advance()
        self.lists.commit(lane, new[:, :, lane])

    def commit_lane(self, lane, count, tokens):
        new = self.new(tokens)
        part = self.cache.lane(lane)
        for layer in range(self.lists.layers):
            keys, values = new[layer][:, lane : lane + 1].to(self.device)
            part.commit(layer, keys, values, int32(count).to(self.device))
        part.advance(int32(count).to(self.device))
        self.lists.commit(lane, new[:, :, lane, : max(0, min(count, tokens))])

    def prefill_last(self, lengths, tokens):
        """Gives each layer the tokens that its ring can hold, each lane's last, and NaN behind shorter lanes."""
        new = self.new(tokens)
        given = int32(*lengths).to(self.device)
        for layer, window in enumerate(self.lists.windows):
            size = tokens if window is None else min(tokens, window)
            kept = torch.full((*new.shape[1:3], size, *new.shape[4:]), float("nan"))
            for lane, length in enumerate(lengths):
                last = new[layer, :, lane, max(0, length - size) : length]
                kept[:, lane, : last.shape[1]] = last
            keys, values = kept.to(self.device)
            self.cache.prefill(layer, keys, values, given, tokens=tokens)
        self.cache.advance(given)
        self.keep(new, lengths)

    def check(self, rows):
        cache, lists = self.cache, self.lists
        lengths = [len(t) for t in lists.tokens]
        assert cache.token_counts.tolist() == lengths and cache.longest >= max(lengths)
        for layer, (ring, slots) in enumerate(zip(cache.rings, lists.slots, strict=True)):
            if slots is not None:
                np.testing.assert_array_equal(oracle.bits(ring), slots)
                continue
            assert ring.shape[-2] >= cache.longest + 16
            for lane, tokens in enumerate(lists.tokens):
                for i, token in enumerate(tokens):
                    np.testing.assert_array_equal(oracle.bits(ring[:, lane, :, i]), token[layer])
        self.check_what_a_block_sees(cache, lists, rows)
        for lane in range(cache.lanes):
            part = TokenLists(1, lists.kv_heads, lists.windows)
            part.tokens = [lists.tokens[lane]]
            assert cache.lane(lane).token_counts.tolist() == lengths[lane : lane + 1]
            assert cache.lane(lane).longest >= lengths[lane]
            self.check_what_a_block_sees(cache.lane(lane), part, rows)

    def check_what_a_block_sees(self, cache, lists, rows):
        q_heads = 2 * cache.kv_heads
        for layer, causal in itertools.product(range(lists.layers), (False, True)):
            slots = cache.rings[layer].shape[-2]
            mask = cache.mask(q_heads, rows, layer=layer, causal=causal)
            np.testing.assert_array_equal(oracle.bits(mask), lists.mask(layer, q_heads, rows, slots, causal))
            assert cache.mask(q_heads, rows, layer=layer, causal=causal) is mask
        for layer in range(lists.layers):
            slots = cache.rings[layer].shape[-2]
            queries = random_tokens(self.rng, cache.lanes, rows, q_heads)
            keys, values = random_tokens(self.rng, 2, cache.lanes, rows, cache.kv_heads)
            got = cache.pack(layer, *(x.to(self.device) for x in (queries, keys, values)))
            np.testing.assert_array_equal(oracle.bits(got[0]), oracle.to_bfloat16(queries).view(np.int16).transpose(0, 2, 1, 3))
            np.testing.assert_array_equal(oracle.bits(got[1]), lists.packed(layer, 0, keys, slots))
            np.testing.assert_array_equal(oracle.bits(got[2]), lists.packed(layer, 1, values, slots))


# ---- any sequence of calls


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_sequence_of_calls(device, data):
    draw = data.draw
    layers, lanes, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    windows = draw(st.lists(st.sampled_from([3, 5, 7, 8, 13, None]), min_size=layers, max_size=layers))
    window = min((w for w in windows if w is not None), default=16)
    pair = Pair(device, layers, lanes, kv_heads, windows, draw(st.integers(0, 2**31)))
    lane = st.integers(0, lanes - 1)
    snapshots = []
    calls = ["commit", "commit", "commit", "prefill", "prefill last", "reset", "fork", "snapshot", "restore"]
    calls += ["prefill lane", "commit lane", "reset lane", "longest", "reserve"]
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
        elif call == "prefill lane":
            pair.prefill_lane(draw(lane), draw(st.integers(0, 3 * window)))
        elif call == "commit lane":
            tokens = draw(st.integers(1, min(16, window - 1)))
            pair.commit_lane(draw(lane), draw(st.integers(-1, tokens + 2)), tokens)
        elif call == "reset lane":
            emptied = draw(lane)
            pair.cache.lane(emptied).reset(draw(st.sampled_from([None, 0])))
            pair.lists.tokens[emptied] = []
        elif call == "longest":
            pair.cache.longest = max(len(t) for t in pair.lists.tokens)
            assert pair.cache.longest == max(len(t) for t in pair.lists.tokens)
        elif call == "reserve":
            pair.cache.reserve(draw(st.integers(0, 80)))
        elif call == "reset":
            which = draw(st.none() | lane)
            pair.cache.reset(which)
            for emptied in range(lanes) if which is None else [which]:
                pair.lists.tokens[emptied] = []
        elif call == "fork":
            src, dst = draw(lane), draw(lane)
            pair.cache.fork(src, dst)
            pair.lists.fork(src, dst)
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
            for ring, want in zip(pair.cache.rings, one_by_one.cache.rings, strict=True):
                np.testing.assert_array_equal(oracle.bits(ring), oracle.bits(want))
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
    before = bits_of(pair.cache.rings).copy()
    pair.commit([2, 0, 0], 5)
    after = bits_of(pair.cache.rings)
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
    before = bits_of(snapshot.rings).copy()
    pair.prefill(None, 4)
    np.testing.assert_array_equal(bits_of(snapshot.rings), before)
    pair.cache.restore(snapshot)
    pair.prefill(None, 4)
    np.testing.assert_array_equal(bits_of(snapshot.rings), before)
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
    cache = RingKVCache(2, 2, 1, [5, None], D, device=device)
    keys = torch.randn(2, 13, 1, D, device=device)
    counts = int32(1, 2).to(device)
    with NoHostRead():
        for layer in range(2):
            cache.prefill(layer, keys, keys, counts)
        cache.advance(counts)
        cache.reserve(100)
        for layer in range(2):
            cache.lane(0).prefill(layer, keys[:1], keys[:1])
        cache.lane(0).advance()
        cache.lane(0).reset()
        cache.fork(1, 0)
        snapshot = cache.snapshot()
        cache.mask(2, 2)
        cache.mask(2, 2, layer=1, causal=True)
        for layer in range(2):
            cache.pack(layer, keys[:, :2], keys[:, :2], keys[:, :2])
            cache.commit(layer, keys[:, :2], keys[:, :2], counts)
        cache.advance(counts)
        cache.reset(1)
        cache.restore(snapshot)
    assert cache.token_counts.tolist() == [2, 2]


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_follows_every_change_of_token_counts(device, inference):
    with torch.inference_mode(inference):
        cache = RingKVCache(1, 2, 1, 9, D, device=device)
        view = cache.token_counts[1:]
        compiled = torch.compile(lambda counts: counts.add_(1), backend="aot_eager")
        for change in (
            lambda: cache.token_counts.add_(1),
            lambda: view.add_(1),
            lambda: cache.token_counts.__setitem__(0, 4),
            lambda: cache.lane(0).token_counts.add_(1),
            lambda: compiled(cache.token_counts),
            lambda: cache.lane(1).reset(),
            lambda: setattr(cache, "token_counts", cache.token_counts + 2),
            lambda: cache.token_counts.add_(1),
        ):
            before = cache.mask(2, 3), cache.mask(2, 3, causal=True)
            change()
            for causal in (False, True):
                mask = cache.mask(2, 3, causal=causal)
                assert not torch.equal(mask, before[causal])
                want = oracle.fill_attention_mask(cache.token_counts.cpu(), 2, 3, 9, causal)
                np.testing.assert_array_equal(oracle.bits(mask), want)


def test_layers_of_one_window_share_their_mask(device):
    cache = RingKVCache(4, 1, 1, [9, None, 9, None], D, device=device)
    assert cache.mask(2, 3) is cache.mask(2, 3, layer=2) and cache.mask(2, 3, layer=1) is cache.mask(2, 3, layer=3)
    assert cache.mask(2, 3).shape == (1, 2, 3, 11) and cache.mask(2, 3, layer=1).shape == (1, 2, 3, 34)


def test_full_attention_grows_by_half_and_never_for_tokens_that_were_not_kept(device, monkeypatch):
    monkeypatch.setattr(cache_module, "GROWTH", 256)
    cache, seen = RingKVCache(1, 1, 1, None, D, device=device), []
    keys = torch.ones(1, 16, 1, D, device=device)
    for tokens in range(1, 400):
        if not seen or seen[-1] != cache.rings[0].shape[-2]:
            seen.append(cache.rings[0].shape[-2])
        cache.commit(0, keys, keys, int32(1).to(device))
        cache.advance(int32(1).to(device))
        assert cache.longest == tokens - 1 + 16
        cache.longest = tokens
    assert seen == [256, 512]
    cache.reserve(496)
    assert cache.rings[0].shape[-2] == 512
    cache.reserve(497)
    assert cache.rings[0].shape[-2] == 768
    cache.reserve(5000)
    assert cache.rings[0].shape[-2] == 5120 and cache.token_counts.item() == 399
    assert (cache.rings[0][:, :, :, :399] == 1).all() and cache.longest == 399
    cache.longest = 1000
    assert cache.longest == 399
    for wrong in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match="longest: expected a number of tokens"):
            cache.longest = wrong
        with pytest.raises(ValueError, match="reserve: tokens: expected a number of tokens"):
            cache.reserve(wrong)
    with pytest.raises(ValueError, match=r"reserve: tokens: expected a number of tokens in 0..67108848, got 1000000000000"):
        cache.reserve(10**12)
    cache.reset()
    assert cache.longest == 0


def test_rounds_of_a_cache_and_of_its_lanes_do_not_overlap(device):
    cache, keys = RingKVCache(1, 2, 1, 6, D, device=device), KEYS.to(device)
    lane = cache.lane(1)
    assert lane is cache.lane(1) is lane.lane(0) and lane.lanes == 1
    one = COUNTS[:1].to(device)
    within = "the cache that this lane is part of is within a round"
    cache.commit(0, keys, keys, COUNTS.to(device))
    for call in (
        lambda: lane.commit(0, keys[:1], keys[:1], one),
        lambda: lane.prefill(0, keys[:1], keys[:1]),
        lambda: lane.pack(0, keys[:1], keys[:1], keys[:1]),
        lane.reset,
        lane.snapshot,
    ):
        with pytest.raises(RuntimeError, match=within):
            call()
    cache.advance(COUNTS.to(device))
    lane.prefill(0, keys[:1], keys[:1])
    for call in (
        lambda: cache.commit(0, keys, keys, COUNTS.to(device)),
        lambda: cache.prefill(0, keys, keys),
        lambda: cache.pack(0, keys, keys, keys),
        lambda: cache.reset(0),
        lambda: cache.fork(0, 1),
        cache.snapshot,
    ):
        with pytest.raises(RuntimeError, match=r"lane\(1\) is within a round of its own"):
            call()
    cache.lane(0).reset()
    lane.advance()
    assert cache.token_counts.tolist() == [0, 5]
    cache.lane(0).prefill(0, keys[:1], keys[:1])
    cache.reset()  # drops what the lane has begun
    cache.lane(0).prefill(0, keys[:1], keys[:1])
    cache.lane(0).advance()
    assert cache.token_counts.tolist() == [3, 0]
    with pytest.raises(IndexError, match=r"lane: index: expected 0\.\.1, got 2"):
        cache.lane(2)


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
            lambda c, k, n: c.restore(RingKVCache(2, 2, 1, 7, D, device=c.device).snapshot()),
            ValueError,
            r"restore: snapshot: expected windows \(6, 6\), got \(7, 7\)",
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
    rings, counts, mask = bits_of(cache.rings).copy(), cache.token_counts.tolist(), cache.mask(1, 3)
    with pytest.raises(error, match=message):
        misuse(cache, KEYS.to(device), COUNTS.to(device))
    np.testing.assert_array_equal(bits_of(cache.rings), rings)
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
    rings = bits_of(cache.rings).copy()
    with pytest.raises(error, match=message):
        misuse(cache, keys, counts)
    np.testing.assert_array_equal(bits_of(cache.rings), rings)
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
        ((0, 1, 1, 8, 128), r"layers: expected 1\.\.1024, got 0"),
        ((1.0, 1, 1, 8, 128), r"layers: expected 1\.\.1024, got 1\.0"),
        ((10**6, 1, 1, 8, 128), r"layers: expected 1\.\.1024, got 1000000"),
        ((1, "2", 1, 8, 128), r"lanes: expected 1\.\.4, got '2'"),
        ((1, True, 1, 8, 128), r"lanes: expected 1\.\.4, got True"),
        ((1, 1, None, 8, 128), r"kv_heads: expected 1\.\.65536, got None"),
        ((1, 1, 2**40, 8, 128), r"kv_heads: expected 1\.\.65536"),
        ((1, 1, 1, 8.5, 128), r"window: expected 3\.\.67108864, or None for full attention, got 8\.5"),
        ((1, 1, 1, "24", 128), "window: expected .* got '24'"),
        ((1, 1, 1, 2**40, 128), r"window: expected 3\.\.67108864"),
        ((2, 1, 1, [8], 128), "window: expected one for each of 2 layers, got 1"),
        ((2, 1, 1, [None, 2], 128), "window: expected .* got 2"),
        (
            (1024, 4, 2**16, 2**26, 256),
            "window: expected rings of at most 1099511627776 bytes in all, got 1844",
        ),
        ((1, 1, 1, 8, "128"), "head_dim: expected 128 or 256, got '128'"),
        ((1, 0, 1, 8, 128), r"lanes: expected 1\.\.4, got 0"),
        ((1, 5, 1, 8, 128), r"lanes: expected 1\.\.4, got 5"),
        ((1, 1, 0, 8, 128), r"kv_heads: expected 1\.\.65536, got 0"),
        ((1, 1, 1, 2, 128), r"window: expected 3\.\.67108864, or None for full attention, got 2"),
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
    assert cache.token_counts.tolist() == [0, 0] and all((ring == 0).all() for ring in cache.rings)


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
    keys, counts = keys.to(torch.bfloat16), torch.ones(1, dtype=torch.int32)
    for call, message in (
        (lambda: cache.prefill(0, keys.tolist(), keys), "prefill: keys: expected a tensor, got list"),
        (lambda: cache.prefill(0, keys, None), "prefill: values: expected a tensor, got NoneType"),
        (lambda: cache.prefill(0, keys, keys, [2]), "prefill: lengths: expected a tensor, got list"),
        (lambda: cache.prefill(0, keys, keys, tokens="2"), "prefill: tokens: expected a number of tokens, at least 0, got '2'"),
        (lambda: cache.commit(0, keys, keys.numpy, counts), "commit: values: expected a tensor, got builtin_function"),
        (lambda: cache.commit(0, keys, keys, 1), "commit: counts: expected a tensor, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not any(ring.any() for ring in cache.rings)

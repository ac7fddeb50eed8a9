"""The drafter's memory: for each layer and lane, a ring of the committed keys and values that a block may attend to.

A round reads with `pack` and `mask`, then writes with `commit` for every layer, then moves on with `advance`. How many
tokens each lane holds is known to the device alone: no call here waits for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _library  # noqa: F401  loads the operators

ops = torch.ops.dflash2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of keys and values that are committed
MAX_ROWS = 16  # of a block, and tokens of a commit
MAX_SLOTS = 2**26  # of a ring
GROWTH = 256  # a ring that keeps every token has a multiple of this many slots
MAX_BYTES = 2**40  # of all rings


@dataclass(frozen=True)
class CacheSnapshot:
    """What `RingKVCache.snapshot` returns: a copy, untouched by whatever happens to the cache afterwards."""

    windows: tuple[int | None, ...]
    rings: tuple[Tensor, ...]
    token_counts: Tensor
    longest: tuple[int, ...]  # of each lane


class RingKVCache:
    """Keys and values of the committed tokens that a block may attend to, for all layers and lanes of a drafter.

    layers: drafter layers. lanes: sequences of the batch, 1..4. kv_heads: key/value heads. window: slots of a ring, at
    least 3; a block of R rows needs window > R. None for full attention: the ring grows so that it keeps every token. A
    sequence gives each layer its own. head_dim: 128 or 256. Raises ValueError for anything else.

    token_counts  int32 [lanes], on the device: tokens committed to each lane so far. The token committed as number t is
                  at position t of its sequence and in slot t % window.
    rings         for each layer bfloat16 [2 (keys, values), lanes, kv_heads, slots, head_dim]; slots = window, or with
                  full attention as many as the ring has room for, at least `longest` + 16.
    longest       no lane holds more tokens than this: what the host knows without waiting for the device. `advance`
                  raises it by the most that a round may have added. Who has read token_counts may set it lower, down to
                  their largest, so that rings of full attention do not grow for tokens that were rejected.

    Every call checks its arguments first: after an error the cache is as it was before the call.
    """

    _masks_of: Tensor | None  # the token_counts that masks were made of
    _masks_version: int

    def __init__(
        self,
        layers: int,
        lanes: int,
        kv_heads: int,
        window: int | Sequence[int | None] | None,
        head_dim: int,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, got, fits, expected in (
            ("layers", layers, lambda n: 1 <= n <= 1024, "1..1024"),
            ("lanes", lanes, lambda n: 1 <= n <= 4, "1..4"),
            ("kv_heads", kv_heads, lambda n: 1 <= n <= 2**16, "1..65536"),
            ("head_dim", head_dim, lambda n: n in (128, 256), "128 or 256"),
        ):
            if not _is_whole(got) or not fits(got):
                raise ValueError(f"RingKVCache: {name}: expected {expected}, got {got!r}")
        windows = tuple(window) if isinstance(window, Sequence) and not isinstance(window, str) else (window,) * layers
        if len(windows) != layers:
            raise ValueError(f"RingKVCache: window: expected one for each of {layers} layers, got {len(windows)}")
        for slots in windows:
            if slots is not None and not (_is_whole(slots) and 3 <= slots <= MAX_SLOTS):
                raise ValueError(f"RingKVCache: window: expected 3..{MAX_SLOTS}, or None for full attention, got {slots!r}")
        shapes = [(2, lanes, kv_heads, GROWTH if slots is None else slots, head_dim) for slots in windows]
        bytes_in_all = sum(2 * torch.Size(shape).numel() for shape in shapes)
        if bytes_in_all > MAX_BYTES:
            raise ValueError(f"RingKVCache: window: expected rings of at most {MAX_BYTES} bytes in all, got {bytes_in_all}")
        self.layers, self.lanes, self.kv_heads, self.head_dim = layers, lanes, kv_heads, head_dim
        self.windows: tuple[int | None, ...] = windows
        with torch.inference_mode(False):  # else a cache made in inference mode could not be written outside of it
            self._rings = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
            self.token_counts = torch.zeros(lanes, dtype=torch.int32, device=device)
        self._kept_halves: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * layers  # of which ring, keys, values
        self._longest = [0] * lanes
        self._whole: RingKVCache | None = None  # of a cache made by `lane`: the one that it is part of
        self._first = 0  # ... and which lane of it
        self._parts: dict[int, RingKVCache] = {}  # the caches made by `lane`
        self._start_round()

    @property
    def device(self) -> torch.device:
        return self.token_counts.device

    @property
    def rings(self) -> list[Tensor]:
        return [self._ring(layer) for layer in range(self.layers)]

    @property
    def longest(self) -> int:
        return max(self._longest_of_lanes())

    @longest.setter
    def longest(self, tokens: int) -> None:
        if not _is_whole(tokens) or tokens < 0:
            raise ValueError(f"longest: expected a number of tokens, at least 0, got {tokens!r}")
        self._set_longest([min(tokens, most) for most in self._longest_of_lanes()])

    # ---- a round

    def pack(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lays out one layer's attention: the block's own rows, then the ring from the newest token to the oldest.

        queries [lanes, R, q_heads, head_dim], keys and values [lanes, R, kv_heads, head_dim], float32, bfloat16 or
        float16, 2 <= R <= 16. Returns bfloat16 queries [lanes, q_heads, R, head_dim], keys and values
        [lanes, kv_heads, slots - 1 + R, head_dim], with zeros where nothing was committed yet.
        """
        self._check_layer("pack", layer)
        if layer in self._written:  # the commit has overwritten tokens that are still in the window
            raise RuntimeError(f"pack: layer {layer} was committed to in this round; call advance first")
        self._check_relatives("pack")
        ring_keys, ring_values = self._halves(layer)
        counts = self.token_counts
        return ops.pack_attention(ring_keys, ring_values, queries, keys, values, counts, counts)

    def mask(self, q_heads: int, rows: int, *, layer: int = 0, causal: bool = False) -> Tensor:
        """What a layer's rows may attend to, bfloat16 [lanes, q_heads, rows, slots - 1 + rows]: 0 or -inf, to be added.

        causal: a row sees no later row of its block. Layers with as many slots share their masks. Each is made once and
        returned again until token_counts changes (a write through `.data` goes unnoticed): not to be written to.
        """
        self._check_layer("mask", layer)
        counts, slots = self.token_counts, self._ring(layer).shape[-2]
        if torch.compiler.is_compiling() or counts.is_inference():  # there is no version to tell a change by
            return ops.fill_attention_mask(counts, q_heads, rows, slots, causal=causal)
        if self._masks_of is not counts or self._masks_version != counts._version:
            self._masks.clear()
            self._masks_of, self._masks_version = counts, counts._version
        key = (slots, q_heads, rows, causal)
        if key not in self._masks:
            self._masks[key] = ops.fill_attention_mask(counts, q_heads, rows, slots, causal=causal)
        return self._masks[key]

    def commit(self, layer: int, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        """Writes each lane's first `counts` tokens into a layer's ring.

        keys, values  [lanes, C, kv_heads, head_dim], float32, bfloat16 or float16; C in 1..16, below the window and the
                      same for all layers.
        counts        int32 [lanes] on the device; below 0 means 0, above C means C.

        They count once `advance(counts)` is called.
        """
        for name, new in (("keys", keys), ("values", values), ("counts", counts)):
            _check_is_tensor("commit", name, new)
        self._check_write("commit", layer, keys.shape[1] if keys.dim() > 1 else 0)
        ring_keys, ring_values = self._halves(layer)
        ops.commit_kv(keys, values, counts, self.token_counts, ring_keys, ring_values)
        self._written[layer] = keys.shape[1]

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, lengths: Tensor | None = None, *, tokens: int | None = None
    ) -> None:
        """Commits any number N of tokens to a layer; the same bytes as N commits of one token each.

        keys, values  [lanes, N, kv_heads, head_dim], float32, bfloat16 or float16, N >= 0.
        lengths       int32 [lanes] on the device, tokens of each lane, clamped to 0..N; N for all if left out.
        tokens        given if keys and values hold only each lane's last `window` tokens of a longer prefill: how many
                      it has in all. `lengths` are then clamped to 0..tokens. Layers of full attention need them all.

        They count once `advance(lengths)` is called.
        """
        for name, new in (("keys", keys), ("values", values)):
            _check_is_tensor("prefill", name, new)
        shape = (self.lanes, keys.shape[1] if keys.dim() > 1 else 0, self.kv_heads, self.head_dim)
        given = shape[1]
        total = given if tokens is None else tokens
        if not _is_whole(total) or total < 0:
            raise ValueError(f"prefill: tokens: expected a number of tokens, at least 0, got {tokens!r}")
        self._check_write("prefill", layer, total)
        window = self.windows[layer]
        if tokens is not None and given != self.kept(layer, tokens):
            kept = self.kept(layer, tokens)
            raise ValueError(f"prefill: keys: expected the last {kept} of {tokens} tokens, got {given}")
        for name, new in (("keys", keys), ("values", values)):
            if new.shape != shape or new.device != self.device or new.dtype not in DTYPES or new.dtype != keys.dtype:
                raise ValueError(
                    f"prefill: {name}: expected float32, bfloat16 or float16, the same for both, of shape "
                    f"[lanes, tokens, kv_heads, head_dim] = {list(shape)} on {self.device}, "
                    f"got {new.dtype} {list(new.shape)} on {new.device}"
                )
            if torch.is_grad_enabled() and new.requires_grad:
                raise ValueError(f"prefill: {name}: expected a tensor that does not require grad, got one that does; detach it")
        if lengths is None:
            lengths = torch.full_like(self.token_counts, total)
        self._check_counts("prefill", "lengths", lengths)
        lengths = lengths.clamp(0, total)
        self.reserve(self.longest + total)
        if given:
            write = self._append if window is None else self._overwrite
            write(self._ring(layer), keys, values, lengths)
        self._written[layer] = total

    def kept(self, layer: int, tokens: int) -> int:
        """How many of that many tokens a layer's ring can hold."""
        window = self.windows[layer]
        return tokens if window is None else min(tokens, window)

    def advance(self, counts: Tensor | None = None) -> None:
        """Ends a round, after every layer was written: each lane has `counts` tokens more.

        counts: int32 [lanes] on the device, the same as given to `commit` or `prefill` and clamped as there; left out,
        every lane keeps all the tokens.
        """
        missing = [layer for layer in range(self.layers) if layer not in self._written]
        if missing:
            raise RuntimeError(f"advance: expected a commit to every layer first, got none to layers {missing}")
        total = self._written[0]
        if counts is not None:
            self._check_counts("advance", "counts", counts)
        self.reserve(self.longest + total)
        self._set_longest([most + total for most in self._longest_of_lanes()])
        self.token_counts.add_(total if counts is None else counts.clamp(0, total))
        self._start_round()

    # ---- between rounds

    def reserve(self, tokens: int) -> None:
        """Makes room for lanes of that many tokens, so that rings of full attention need not grow on the way there.

        Rings grow on their own by half their size or what is needed; each time they are copied.
        """
        if not _is_whole(tokens) or not 0 <= tokens <= MAX_SLOTS - MAX_ROWS:
            raise ValueError(f"reserve: tokens: expected a number of tokens in 0..{MAX_SLOTS - MAX_ROWS}, got {tokens!r}")
        if self._whole is not None:
            return self._whole.reserve(tokens)
        for layer, window in enumerate(self.windows):
            ring = self._rings[layer]
            # A block of 16 rows sees every token, and a commit of 16 finds its slots.
            if window is None and ring.shape[-2] < tokens + MAX_ROWS:
                slots = max(tokens + MAX_ROWS, ring.shape[-2] * 3 // 2)
                slots = min((slots + GROWTH - 1) // GROWTH * GROWTH, MAX_SLOTS)
                with torch.inference_mode(False):
                    grown = torch.zeros(*ring.shape[:-2], slots, self.head_dim, dtype=ring.dtype, device=ring.device)
                grown[:, :, :, : ring.shape[-2]] = ring
                self._rings[layer] = grown

    def lane(self, index: int) -> "RingKVCache":
        """A cache of that one lane: the same memory, so that the lane can be prefilled or reset while others go on.

        Rounds of the two may alternate, but not overlap: from the first commit to `advance`, the other cache refuses.
        """
        self._check_lane("lane", "index", index)
        if self._whole is not None:
            return self
        if index not in self._parts:
            part = object.__new__(RingKVCache)
            part.layers, part.lanes, part.kv_heads, part.head_dim = self.layers, 1, self.kv_heads, self.head_dim
            part.windows = self.windows
            part._whole, part._first, part._parts = self, index, {}
            with torch.inference_mode(False):
                part.token_counts = self.token_counts[index : index + 1]
            part._start_round()
            self._parts[index] = part
        return self._parts[index]

    def reset(self, lane: int | None = None) -> None:
        """Empties a lane, or all of them, which also drops what was committed since the last advance."""
        if lane is None:
            if self._whole is not None:
                self._check_relatives("reset")
            self.token_counts.zero_()
            self._set_longest([0] * self.lanes)
            self._drop_rounds()
            return
        self._check_lane("reset", "lane", lane)
        self._check_between_rounds("reset")
        self.token_counts[lane] = 0
        self._set_longest([0 if i == lane else most for i, most in enumerate(self._longest_of_lanes())])
        self._start_round()

    def fork(self, src: int, dst: int) -> None:
        """Makes lane `dst` a copy of lane `src`."""
        self._check_lane("fork", "src", src)
        self._check_lane("fork", "dst", dst)
        self._check_between_rounds("fork")
        if src != dst:
            longest = self._longest_of_lanes()
            for ring in self._used(self.rings, longest[src]):
                ring[:, dst] = ring[:, src]
            self.token_counts[dst] = self.token_counts[src]
            longest[dst] = longest[src]
            self._set_longest(longest)
        self._start_round()

    def snapshot(self) -> CacheSnapshot:
        """A copy of all lanes, for `restore`."""
        self._check_between_rounds("snapshot")
        rings = tuple(ring.clone() for ring in self._used(self.rings, self.longest))
        return CacheSnapshot(self.windows, rings, self.token_counts.clone(), tuple(self._longest_of_lanes()))

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts all lanes back to a snapshot of a cache like this, and drops a commit that is not advanced yet."""
        if self._whole is not None:
            self._check_relatives("restore")
        if snapshot.windows != self.windows:
            raise ValueError(f"restore: snapshot: expected windows {self.windows}, got {snapshot.windows}")
        longest = max(snapshot.longest)
        theirs = [*snapshot.rings, snapshot.token_counts]
        ours = [*self._used(self.rings, longest), self.token_counts]
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            full = index < self.layers and self.windows[index] is None
            shape = (*a.shape[:3], longest, self.head_dim) if full else a.shape
            if b.shape != shape or b.dtype != a.dtype or b.device != a.device:
                name = "token_counts" if index == self.layers else "rings"
                raise ValueError(
                    f"restore: snapshot: expected {name} {a.dtype} {list(shape)} on {a.device}, "
                    f"got {b.dtype} {list(b.shape)} on {b.device}"
                )
        self.reserve(longest)
        for a, b in zip([*self._used(self.rings, longest), self.token_counts], theirs, strict=True):
            a.copy_(b)
        self._set_longest(list(snapshot.longest))
        self._drop_rounds()

    # ---- what the calls above share

    def _ring(self, layer: int) -> Tensor:
        if self._whole is None:
            return self._rings[layer]
        return self._whole._rings[layer][:, self._first : self._first + 1]

    def _halves(self, layer: int) -> tuple[Tensor, Tensor]:
        """A ring's keys and values. Making these two views takes nearly as long as an operator's call: they are kept."""
        ring = self._ring(layer)
        if torch.compiler.is_compiling() or self._whole is not None:
            keys, values = ring
            return keys, values
        kept = self._kept_halves[layer]
        if kept is None or kept[0] is not ring:
            keys, values = ring
            self._kept_halves[layer] = kept = ring, keys, values
        return kept[1:]

    def _longest_of_lanes(self) -> list[int]:
        whole = self if self._whole is None else self._whole
        return whole._longest[self._first : self._first + self.lanes]

    def _set_longest(self, longest: list[int]) -> None:
        whole = self if self._whole is None else self._whole
        whole._longest[self._first : self._first + self.lanes] = longest

    def _used(self, rings: list[Tensor], longest: int) -> Iterator[Tensor]:
        """Of full attention's rings the slots that lanes of `longest` tokens use, and the others whole."""
        for ring, window in zip(rings, self.windows, strict=True):
            yield ring if window is not None else ring[:, :, :, :longest]

    def _overwrite(self, ring: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        """A prefill into a ring that goes round."""
        given, window = keys.shape[1], ring.shape[-2]
        # In each slot, the newest of the lane's tokens that belongs there, and its row in keys and values.
        newest = (self.token_counts + lengths - 1)[:, None]
        slots = torch.arange(window, device=self.device, dtype=torch.int32)
        position = newest - (newest - slots) % window  # [lanes, window]
        row = position - (newest + 1 - lengths.clamp(max=given)[:, None])
        new_here = (position >= self.token_counts[:, None])[:, None, :, None]
        row = row.clamp(0, given - 1)
        lane = torch.arange(self.lanes, device=self.device)[:, None]
        halves = [
            torch.where(new_here, new[lane, row].transpose(1, 2).to(half.dtype), half)
            for half, new in zip(ring, (keys, values), strict=True)
        ]
        ring.copy_(torch.stack(halves))

    def _append(self, ring: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        """A prefill into a ring that keeps every token: what is there already is not read."""
        tokens = torch.arange(keys.shape[1], device=self.device)
        slots = (self.token_counts[:, None].long() + tokens) % ring.shape[-2]  # [lanes, tokens], all different
        index = slots[:, None, :, None].expand(-1, self.kv_heads, -1, self.head_dim)
        keep = (tokens < lengths[:, None])[:, None, :, None]
        for half, new in zip(ring, (keys, values), strict=True):
            half.scatter_(2, index, torch.where(keep, new.transpose(1, 2).to(half.dtype), half.gather(2, index)))

    # ---- checks

    def _start_round(self) -> None:
        self._masks: dict[tuple[int, int, int, bool], Tensor] = {}
        self._masks_of = None
        self._masks_version = 0
        self._written: dict[int, int] = {}  # layer: tokens given to it since the last advance

    def _drop_rounds(self) -> None:
        self._start_round()
        for part in self._parts.values():
            part._start_round()

    def _check_layer(self, call: str, layer: int) -> None:
        if not _is_index(layer, self.layers):
            raise IndexError(f"{call}: layer: expected 0..{self.layers - 1}, got {layer!r}")

    def _check_lane(self, call: str, name: str, lane: int) -> None:
        if not _is_index(lane, self.lanes):
            raise IndexError(f"{call}: {name}: expected 0..{self.lanes - 1}, got {lane!r}")

    def _check_between_rounds(self, call: str) -> None:
        if self._written:
            layers = sorted(self._written)
            raise RuntimeError(f"{call}: layers {layers} were committed to in this round; call advance first")
        self._check_relatives(call)

    def _check_relatives(self, call: str) -> None:
        if self._whole is not None and self._whole._written:
            raise RuntimeError(f"{call}: the cache that this lane is part of is within a round; call its advance first")
        for index, part in self._parts.items():
            if part._written:
                raise RuntimeError(f"{call}: lane({index}) is within a round of its own; call its advance first")

    def _check_write(self, call: str, layer: int, tokens: int) -> None:
        self._check_layer(call, layer)
        if layer in self._written:
            raise RuntimeError(f"{call}: layer {layer} was already committed to in this round; call advance first")
        self._check_relatives(call)
        for other, others in self._written.items():
            if tokens != others:
                raise ValueError(f"{call}: keys: expected {others} tokens as for layer {other}, got {tokens}")

    def _check_counts(self, call: str, name: str, counts: Tensor) -> None:
        _check_is_tensor(call, name, counts)
        if counts.dtype != torch.int32 or counts.shape != (self.lanes,) or counts.device != self.device:
            raise ValueError(
                f"{call}: {name}: expected int32 of shape [lanes] = [{self.lanes}] on {self.device}, "
                f"got {counts.dtype} {list(counts.shape)} on {counts.device}"
            )


def _check_is_tensor(call: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{call}: {name}: expected a tensor, got {type(value).__name__}")


def _is_whole(value: object) -> bool:
    """True for whole numbers; bools are numbers to Python, but never meant as one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_index(value: object, size: int) -> bool:
    return _is_whole(value) and 0 <= value < size  # type: ignore[operator]

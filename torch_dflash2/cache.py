"""The drafter's memory: for each layer and lane, a ring of the last `window` committed keys and values.

A round reads with `pack` and `mask`, then writes with `commit` for every layer, then moves on with `advance`. How many
tokens each lane holds is known to the device alone: no call here waits for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _library  # noqa: F401  loads the operators

ops = torch.ops.dflash2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of keys and values that are committed


@dataclass(frozen=True)
class CacheSnapshot:
    """What `RingKVCache.snapshot` returns: a copy, untouched by whatever happens to the cache afterwards."""

    rings: Tensor
    token_counts: Tensor


class RingKVCache:
    """Keys and values of the last `window` committed tokens, for all layers and lanes of a drafter.

    layers: drafter layers. lanes: sequences of the batch, 1..4. kv_heads: key/value heads. window: slots of a ring, at
    least 3; a block of R rows needs window > R. head_dim: 128 or 256. Raises ValueError for anything else.

    token_counts  int32 [lanes], on the device: tokens committed to each lane so far. The token committed as number t is
                  at position t of its sequence and in slot t % window.
    rings         bfloat16 [layers, 2 (keys, values), lanes, kv_heads, window, head_dim].

    Every call checks its arguments first: after an error the cache is as it was before the call.
    """

    def __init__(
        self, layers: int, lanes: int, kv_heads: int, window: int, head_dim: int, *, device: torch.device | str = "cpu"
    ) -> None:
        for name, got, fits, expected in (
            ("layers", layers, layers >= 1, "at least 1"),
            ("lanes", lanes, 1 <= lanes <= 4, "1..4"),
            ("kv_heads", kv_heads, kv_heads >= 1, "at least 1"),
            ("window", window, window >= 3, "at least 3"),
            ("head_dim", head_dim, head_dim in (128, 256), "128 or 256"),
        ):
            if not fits:
                raise ValueError(f"RingKVCache: {name}: expected {expected}, got {got}")
        self.layers, self.lanes, self.kv_heads, self.window, self.head_dim = layers, lanes, kv_heads, window, head_dim
        with torch.inference_mode(False):  # else a cache made in inference mode could not be written outside of it
            self.rings = torch.zeros(layers, 2, lanes, kv_heads, window, head_dim, dtype=torch.bfloat16, device=device)
            self.token_counts = torch.zeros(lanes, dtype=torch.int32, device=device)
        self._mask: Tensor | None = None  # of the current token_counts
        self._written: dict[int, int] = {}  # layer: tokens given to it since the last advance

    @property
    def device(self) -> torch.device:
        return self.rings.device

    # ---- a round

    def pack(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lays out one layer's attention: the block's own rows, then the ring from the newest token to the oldest.

        queries [lanes, R, q_heads, head_dim], keys and values [lanes, R, kv_heads, head_dim], float32, bfloat16 or
        float16, 2 <= R <= 16. Returns bfloat16 queries [lanes, q_heads, R, head_dim], keys and values
        [lanes, kv_heads, window - 1 + R, head_dim], with zeros where nothing was committed yet.
        """
        self._check_layer("pack", layer)
        if layer in self._written:  # the commit has overwritten tokens that are still in the window
            raise RuntimeError(f"pack: layer {layer} was committed to in this round; call advance first")
        ring_keys, ring_values = self.rings[layer]
        counts = self.token_counts
        return ops.pack_attention(ring_keys, ring_values, queries, keys, values, counts, counts)

    def mask(self, q_heads: int, rows: int) -> Tensor:
        """What each row may attend to, bfloat16 [lanes, q_heads, rows, window - 1 + rows]: 0 or -inf, to be added.

        Made once and returned again until token_counts changes: not to be written to.
        """
        if self._mask is None or self._mask.shape[1] != q_heads or self._mask.shape[2] != rows:
            self._mask = ops.fill_attention_mask(self.token_counts, q_heads, rows, self.window)
        return self._mask

    def commit(self, layer: int, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        """Writes each lane's first `counts` tokens into a layer's ring.

        keys, values  [lanes, C, kv_heads, head_dim], float32, bfloat16 or float16; C in 1..16, below the window and the
                      same for all layers.
        counts        int32 [lanes] on the device; below 0 means 0, above C means C.

        They count once `advance(counts)` is called.
        """
        self._check_write("commit", layer, keys.shape[1] if keys.dim() > 1 else 0)
        ring_keys, ring_values = self.rings[layer]
        ops.commit_kv(keys, values, counts, self.token_counts, ring_keys, ring_values)
        self._written[layer] = keys.shape[1]

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, lengths: Tensor | None = None, *, tokens: int | None = None
    ) -> None:
        """Commits any number N of tokens to a layer; the same bytes as N commits of one token each.

        keys, values  [lanes, N, kv_heads, head_dim], float32, bfloat16 or float16, N >= 0.
        lengths       int32 [lanes] on the device, tokens of each lane, clamped to 0..N; N for all if left out.
        tokens        given if keys and values hold only each lane's last `window` tokens of a longer prefill: how many
                      it has in all. `lengths` are then clamped to 0..tokens.

        They count once `advance(lengths)` is called.
        """
        shape = (self.lanes, keys.shape[1] if keys.dim() > 1 else 0, self.kv_heads, self.head_dim)
        given = shape[1]
        total = given if tokens is None else tokens
        self._check_write("prefill", layer, total)
        if tokens is not None and given != min(tokens, self.window):
            kept = min(tokens, self.window)
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
        if given:
            lengths = lengths.clamp(0, total)
            # In each slot, the newest of the lane's tokens that belongs there, and its row in keys and values.
            newest = (self.token_counts + lengths - 1)[:, None]
            slots = torch.arange(self.window, device=self.device, dtype=torch.int32)
            position = newest - (newest - slots) % self.window  # [lanes, window]
            row = position - (newest + 1 - lengths.clamp(max=given)[:, None])
            new_here = (position >= self.token_counts[:, None])[:, None, :, None]
            row = row.clamp(0, given - 1)
            lane = torch.arange(self.lanes, device=self.device)[:, None]
            rings = [
                torch.where(new_here, new[lane, row].transpose(1, 2).to(ring.dtype), ring)
                for ring, new in zip(self.rings[layer], (keys, values), strict=True)
            ]
            self.rings[layer].copy_(torch.stack(rings))
        self._written[layer] = total

    def advance(self, counts: Tensor | None = None) -> None:
        """Ends a round, after every layer was written: each lane has `counts` tokens more.

        counts: int32 [lanes] on the device, the same as given to `commit` or `prefill` and clamped as there; left out,
        every lane keeps all the tokens.
        """
        missing = [layer for layer in range(self.layers) if layer not in self._written]
        if missing:
            raise RuntimeError(f"advance: expected a commit to every layer first, got none to layers {missing}")
        total = self._written[0]
        if counts is None:
            self.token_counts.add_(total)
        else:
            self._check_counts("advance", "counts", counts)
            self.token_counts.add_(counts.clamp(0, total))
        self._start_round()

    # ---- between rounds

    def reset(self, lane: int | None = None) -> None:
        """Empties a lane, or all of them, which also drops what was committed since the last advance."""
        if lane is None:
            self.token_counts.zero_()
        else:
            self._check_lane("reset", "lane", lane)
            self._check_between_rounds("reset")
            self.token_counts[lane] = 0
        self._start_round()

    def fork(self, src: int, dst: int) -> None:
        """Makes lane `dst` a copy of lane `src`."""
        self._check_lane("fork", "src", src)
        self._check_lane("fork", "dst", dst)
        self._check_between_rounds("fork")
        if src != dst:
            self.rings[:, :, dst] = self.rings[:, :, src]
            self.token_counts[dst] = self.token_counts[src]
        self._start_round()

    def snapshot(self) -> CacheSnapshot:
        """A copy of all lanes, for `restore`."""
        self._check_between_rounds("snapshot")
        return CacheSnapshot(self.rings.clone(), self.token_counts.clone())

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts all lanes back to a snapshot of a cache like this, and drops a commit that is not advanced yet."""
        for name in ("rings", "token_counts"):
            ours, theirs = getattr(self, name), getattr(snapshot, name)
            if theirs.shape != ours.shape or theirs.dtype != ours.dtype or theirs.device != ours.device:
                raise ValueError(
                    f"restore: snapshot: expected {name} {ours.dtype} {list(ours.shape)} on {ours.device}, "
                    f"got {theirs.dtype} {list(theirs.shape)} on {theirs.device}"
                )
        self.rings.copy_(snapshot.rings)
        self.token_counts.copy_(snapshot.token_counts)
        self._start_round()

    # ---- checks

    def _start_round(self) -> None:
        self._mask = None
        self._written = {}

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

    def _check_write(self, call: str, layer: int, tokens: int) -> None:
        self._check_layer(call, layer)
        if layer in self._written:
            raise RuntimeError(f"{call}: layer {layer} was already committed to in this round; call advance first")
        for other, others in self._written.items():
            if tokens != others:
                raise ValueError(f"{call}: keys: expected {others} tokens as for layer {other}, got {tokens}")

    def _check_counts(self, call: str, name: str, counts: Tensor) -> None:
        if counts.dtype != torch.int32 or counts.shape != (self.lanes,) or counts.device != self.device:
            raise ValueError(
                f"{call}: {name}: expected int32 of shape [lanes] = [{self.lanes}] on {self.device}, "
                f"got {counts.dtype} {list(counts.shape)} on {counts.device}"
            )


def _is_index(value: object, size: int) -> bool:
    """True for whole numbers; bools and tensors are numbers to Python, but would index something else."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size

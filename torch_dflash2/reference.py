"""The operators in plain PyTorch: the readable specification, and what runs on devices that have no kernels here (CUDA).

A ring holds the last `window` committed tokens of each lane; the token committed as number t lies in slot `t % window`.
Every function gives, bit for bit, what `torch.ops.dflash2` gives. Shapes: B lanes, H query heads, Hk key/value heads,
D head size, R block rows, W window, K = W - 1 + R. Arguments are taken as valid: `torch.ops.dflash2` checks them.
"""

import torch
from torch import Tensor


def pack_attention(
    ring_keys: Tensor,  # [B, Hk, W, D] bfloat16
    ring_values: Tensor,
    current_queries: Tensor,  # [B, R, H, D] float32, bfloat16 or float16
    current_keys: Tensor,  # [B, R, Hk, D]
    current_values: Tensor,
    cache_lengths: Tensor,  # [B] int32, tokens in the ring
    write_positions: Tensor,  # [B] int32, the slot that the next token will take, modulo W
) -> tuple[Tensor, Tensor, Tensor]:  # [B, H, R, D], [B, Hk, K, D], [B, Hk, K, D] bfloat16
    """Lays out one block's attention: the block's rows first, then the ring from the newest token to the oldest."""
    lanes, _, window, head_dim = ring_keys.shape
    age = torch.arange(window - 1, device=ring_keys.device)
    slots = (write_positions[:, None].long() - 1 - age) % window  # [B, W - 1]
    committed = age < cache_lengths[:, None]  # the rest is zeros, whatever the ring holds there

    def packed(ring: Tensor, current: Tensor) -> Tensor:
        index = slots[:, None, :, None].expand(lanes, ring.shape[1], window - 1, head_dim)
        history = ring.gather(2, index).masked_fill(~committed[:, None, :, None], 0)
        return torch.cat([current.transpose(1, 2).bfloat16(), history], dim=2)

    queries = current_queries.transpose(1, 2).to(torch.bfloat16, memory_format=torch.contiguous_format, copy=True)
    return queries, packed(ring_keys, current_keys), packed(ring_values, current_values)


def fill_attention_mask(
    cache_lengths: Tensor, q_heads: int, rows: int, window: int, *, causal: bool = False
) -> Tensor:  # [B, H, R, K] bfloat16
    """Row j sees the block and, of the ring, the tokens of age i with j + 1 + i < window: 0 there, else -inf.

    Of the block it sees all rows, or if causal those up to itself.
    """
    age = torch.arange(window - 1, device=cache_lengths.device)
    row = torch.arange(rows, device=cache_lengths.device)
    seen = (age < cache_lengths[:, None, None]) & (row[:, None] + 1 + age < window)  # [B, R, W - 1]
    block = seen.new_ones(cache_lengths.shape[0], rows, rows)
    seen = torch.cat([block.tril() if causal else block, seen], dim=2)
    mask = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))
    return mask[:, None].repeat(1, q_heads, 1, 1)


def commit_kv(
    new_keys: Tensor,  # [B, C, Hk, D] float32, bfloat16 or float16
    new_values: Tensor,
    commit_counts: Tensor,  # [B] int32, how many of the C tokens to keep
    write_positions: Tensor,  # [B] int32
    ring_keys: Tensor,  # [B, Hk, W, D] bfloat16, written
    ring_values: Tensor,
) -> None:
    """Writes each lane's first `commit_counts` tokens into its ring; no other byte changes."""
    lanes, kv_heads, window, head_dim = ring_keys.shape
    tokens = torch.arange(new_keys.shape[1], device=ring_keys.device)
    slots = (write_positions[:, None].long() + tokens) % window  # [B, C], all different as C < W
    index = slots[:, None, :, None].expand(lanes, kv_heads, tokens.shape[0], head_dim)
    keep = (tokens < commit_counts[:, None])[:, None, :, None]
    for ring, new in ((ring_keys, new_keys), (ring_values, new_values)):
        ring.scatter_(2, index, torch.where(keep, new.transpose(1, 2).bfloat16(), ring.gather(2, index)))


def set_mask_rows(mask_embedding: Tensor, hidden: Tensor, lanes: int, rows: int) -> None:
    """Makes rows 1.. of each lane of `hidden` [lanes * rows, hidden_size] the mask embedding [hidden_size] bfloat16."""
    hidden.view(lanes, rows, -1)[:, 1:] = mask_embedding.to(hidden.dtype)

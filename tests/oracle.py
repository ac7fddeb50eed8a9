"""The operators in numpy, written from their semantics: shares no code with the package. bfloat16 is its bits, uint16."""

import numpy as np
import torch


def to_bfloat16(x: torch.Tensor) -> np.ndarray:
    """The bits of `x` rounded to the nearest bfloat16, ties to even; a NaN stays a NaN."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(np.uint16)
    values = x.float().numpy()
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def bits(x: torch.Tensor) -> np.ndarray:
    """The bits of a tensor from any device."""
    x = x.detach().cpu().contiguous()
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).numpy()


def one_nan(bfloat16_bits: np.ndarray) -> np.ndarray:
    """The same bits with every NaN as 0x7FC0: which NaN comes out is free."""
    return np.where((bfloat16_bits & 0x7FFF) > 0x7F80, np.int16(0x7FC0), bfloat16_bits)


def pack_attention(ring_keys, ring_values, queries, keys, values, lengths, positions):
    lanes, kv_heads, window, head_dim = ring_keys.shape
    rows = queries.shape[1]

    def packed(ring, current):
        ring, current = to_bfloat16(ring), to_bfloat16(current)
        out = np.zeros((lanes, kv_heads, window - 1 + rows, head_dim), np.uint16)
        for b in range(lanes):
            for j in range(rows):
                out[b, :, j] = current[b, j]
            for age in range(min(window - 1, max(0, int(lengths[b])))):
                out[b, :, rows + age] = ring[b, :, (int(positions[b]) - 1 - age) % window]
        return out.view(np.int16)

    packed_queries = to_bfloat16(queries).transpose(0, 2, 1, 3).view(np.int16)
    return packed_queries, packed(ring_keys, keys), packed(ring_values, values)


def fill_attention_mask(lengths, q_heads, rows, window, causal=False):
    mask = np.full((len(lengths), q_heads, rows, window - 1 + rows), 0xFF80, np.uint16)
    for b, length in enumerate(lengths.tolist()):
        for j in range(rows):
            mask[b, :, j, : j + 1 if causal else rows] = 0
            for age in range(window - 1):
                if age < length and j + 1 + age < window:
                    mask[b, :, j, rows + age] = 0
    return mask.view(np.int16)


def commit_kv(new_keys, new_values, counts, positions, ring_keys, ring_values):
    window = ring_keys.shape[2]
    rings = to_bfloat16(ring_keys).copy(), to_bfloat16(ring_values).copy()
    for ring, new in zip(rings, (to_bfloat16(new_keys), to_bfloat16(new_values)), strict=True):
        for b in range(new.shape[0]):
            for i in range(min(new.shape[1], max(0, int(counts[b])))):
                ring[b, :, (int(positions[b]) + i) % window] = new[b, i]
    return rings[0].view(np.int16), rings[1].view(np.int16)

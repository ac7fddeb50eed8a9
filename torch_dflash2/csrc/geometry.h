// What every operator accepts, on every device: the one place that decides.
//
// Int is int64_t where tensors are real, and c10::SymInt in the Meta kernels, so that torch.compile keeps sizes
// symbolic. Each check_... either returns the geometry of a valid call or throws one error that names the operator, the
// argument, what was expected and what came. Nothing has been read or written by then.
#pragma once

#include <ATen/core/Tensor.h>

namespace dflash2 {

using at::Tensor;

template <class Int>
struct PackGeometry {
  Int lanes, q_heads, kv_heads, head_dim, rows, window;
  Int packed_length() const { return window - 1 + rows; }
};

template <class Int>
struct MaskGeometry {
  Int lanes, q_heads, rows, window;
  bool causal;  // a row sees no later row of its block
  Int packed_length() const { return window - 1 + rows; }
};

template <class Int>
struct CommitGeometry {
  Int lanes, kv_heads, head_dim, max_count, window;
};

template <class Int>
struct MaskRowsGeometry {
  Int lanes, rows, hidden_size;
};

template <class Int>
PackGeometry<Int> check_pack_attention(const Tensor& ring_keys, const Tensor& ring_values,
                                       const Tensor& current_queries, const Tensor& current_keys,
                                       const Tensor& current_values, const Tensor& cache_lengths,
                                       const Tensor& write_positions);

template <class Int>
PackGeometry<Int> check_pack_attention_out(const Tensor& ring_keys, const Tensor& ring_values,
                                           const Tensor& current_queries, const Tensor& current_keys,
                                           const Tensor& current_values, const Tensor& cache_lengths,
                                           const Tensor& write_positions, const Tensor& packed_queries,
                                           const Tensor& packed_keys, const Tensor& packed_values);

template <class Int>
MaskGeometry<Int> check_fill_attention_mask(const Tensor& cache_lengths, const Int& q_heads, const Int& rows,
                                            const Int& window, bool causal);

template <class Int>
MaskGeometry<Int> check_fill_attention_mask_out(const Tensor& cache_lengths, const Int& q_heads, const Int& rows,
                                                const Int& window, bool causal, const Tensor& mask);

template <class Int>
CommitGeometry<Int> check_commit_kv(const Tensor& new_keys, const Tensor& new_values, const Tensor& commit_counts,
                                    const Tensor& write_positions, const Tensor& ring_keys, const Tensor& ring_values);

template <class Int>
MaskRowsGeometry<Int> check_set_mask_rows(const Tensor& mask_embedding, const Tensor& hidden, const Int& lanes,
                                          const Int& rows);

}  // namespace dflash2

// The operators, once for every device: check the call, make what is returned, hand contiguous tensors to the kernels.
//
// A device is a class with four static kernels (see cpu.cpp and mps.mm) and, if it wants to see each output before it
// is written, a fifth, `made`. The Meta kernels of torch.compile are the same operators over kernels that do nothing,
// so they accept and refuse exactly what the real ones do.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>

#include "geometry.h"

namespace dflash2 {

template <class Kernels, class Int = int64_t>
struct Operators {
  static std::tuple<Tensor, Tensor, Tensor> pack_attention(const Tensor& ring_keys, const Tensor& ring_values,
                                                           const Tensor& current_queries, const Tensor& current_keys,
                                                           const Tensor& current_values, const Tensor& cache_lengths,
                                                           const Tensor& write_positions) {
    const auto g = check_pack_attention<Int>(ring_keys, ring_values, current_queries, current_keys, current_values,
                                             cache_lengths, write_positions);
    const auto like_ring = ring_keys.options();
    Tensor packed_queries = empty({g.lanes, g.q_heads, g.rows, g.head_dim}, like_ring);
    Tensor packed_keys = empty({g.lanes, g.kv_heads, g.packed_length(), g.head_dim}, like_ring);
    Tensor packed_values = empty({g.lanes, g.kv_heads, g.packed_length(), g.head_dim}, like_ring);
    Kernels::pack_attention(g, *ring_keys.expect_contiguous(), *ring_values.expect_contiguous(),
                            *current_queries.expect_contiguous(), *current_keys.expect_contiguous(),
                            *current_values.expect_contiguous(), *cache_lengths.expect_contiguous(),
                            *write_positions.expect_contiguous(), packed_queries, packed_keys, packed_values);
    return {packed_queries, packed_keys, packed_values};
  }

  static void pack_attention_out(const Tensor& ring_keys, const Tensor& ring_values, const Tensor& current_queries,
                                 const Tensor& current_keys, const Tensor& current_values, const Tensor& cache_lengths,
                                 const Tensor& write_positions, Tensor packed_queries, Tensor packed_keys,
                                 Tensor packed_values) {
    const auto g =
        check_pack_attention_out<Int>(ring_keys, ring_values, current_queries, current_keys, current_values,
                                      cache_lengths, write_positions, packed_queries, packed_keys, packed_values);
    Kernels::pack_attention(g, *ring_keys.expect_contiguous(), *ring_values.expect_contiguous(),
                            *current_queries.expect_contiguous(), *current_keys.expect_contiguous(),
                            *current_values.expect_contiguous(), *cache_lengths.expect_contiguous(),
                            *write_positions.expect_contiguous(), packed_queries, packed_keys, packed_values);
  }

  static Tensor fill_attention_mask(const Tensor& cache_lengths, Int q_heads, Int rows, Int window, bool causal) {
    const auto g = check_fill_attention_mask<Int>(cache_lengths, q_heads, rows, window, causal);
    Tensor mask = empty({g.lanes, g.q_heads, g.rows, g.packed_length()}, cache_lengths.options().dtype(at::kBFloat16));
    Kernels::fill_attention_mask(g, *cache_lengths.expect_contiguous(), mask);
    return mask;
  }

  static void fill_attention_mask_out(const Tensor& cache_lengths, Int q_heads, Int rows, Int window, bool causal,
                                      Tensor mask) {
    const auto g = check_fill_attention_mask_out<Int>(cache_lengths, q_heads, rows, window, causal, mask);
    Kernels::fill_attention_mask(g, *cache_lengths.expect_contiguous(), mask);
  }

  static void commit_kv(const Tensor& new_keys, const Tensor& new_values, const Tensor& commit_counts,
                        const Tensor& write_positions, Tensor ring_keys, Tensor ring_values) {
    const auto g = check_commit_kv<Int>(new_keys, new_values, commit_counts, write_positions, ring_keys, ring_values);
    Kernels::commit_kv(g, *new_keys.expect_contiguous(), *new_values.expect_contiguous(),
                       *commit_counts.expect_contiguous(), *write_positions.expect_contiguous(), ring_keys,
                       ring_values);
  }

  static void set_mask_rows(const Tensor& mask_embedding, Tensor hidden, Int lanes, Int rows) {
    const auto g = check_set_mask_rows<Int>(mask_embedding, hidden, lanes, rows);
    Kernels::set_mask_rows(g, *mask_embedding.expect_contiguous(), hidden);
  }

  static void register_on(torch::Library& library) {
    library.impl("pack_attention", pack_attention);
    library.impl("pack_attention.out", pack_attention_out);
    library.impl("fill_attention_mask", fill_attention_mask);
    library.impl("fill_attention_mask.out", fill_attention_mask_out);
    library.impl("commit_kv", commit_kv);
    library.impl("set_mask_rows", set_mask_rows);
  }

 private:
  static Tensor empty(std::initializer_list<Int> sizes, const at::TensorOptions& options) {
    if constexpr (std::is_same_v<Int, int64_t>) {
      Tensor output = at::empty(sizes, options);
      if constexpr (requires { Kernels::made(output); }) Kernels::made(output);
      return output;
    } else {
      return at::empty_symint(sizes, options);
    }
  }
};

}  // namespace dflash2

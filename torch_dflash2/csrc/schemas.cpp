// The signatures of torch.ops.dflash2. Sizes given as numbers are SymInt: with int, torch.compile would bake each
// window and row count into its graph and recompile for the next one.
#include <torch/library.h>

namespace {
const std::vector<at::Tag> kTags = {at::Tag::pt2_compliant_tag};
}

TORCH_LIBRARY(dflash2, m) {
  m.def(
      "pack_attention(Tensor ring_keys, Tensor ring_values, Tensor current_queries, Tensor current_keys, "
      "Tensor current_values, Tensor cache_lengths, Tensor write_positions) "
      "-> (Tensor packed_queries, Tensor packed_keys, Tensor packed_values)",
      kTags);
  m.def(
      "pack_attention.out(Tensor ring_keys, Tensor ring_values, Tensor current_queries, Tensor current_keys, "
      "Tensor current_values, Tensor cache_lengths, Tensor write_positions, *, "
      "Tensor(a!) packed_queries, Tensor(b!) packed_keys, Tensor(c!) packed_values) -> ()",
      kTags);
  m.def(
      "fill_attention_mask(Tensor cache_lengths, SymInt q_heads, SymInt rows, SymInt window, *, bool causal=False) "
      "-> Tensor",
      kTags);
  m.def(
      "fill_attention_mask.out(Tensor cache_lengths, SymInt q_heads, SymInt rows, SymInt window, *, bool causal=False, "
      "Tensor(a!) mask) -> ()",
      kTags);
  m.def(
      "commit_kv(Tensor new_keys, Tensor new_values, Tensor commit_counts, Tensor write_positions, "
      "Tensor(a!) ring_keys, Tensor(b!) ring_values) -> ()",
      kTags);
  m.def("set_mask_rows(Tensor mask_embedding, Tensor(a!) hidden, SymInt lanes, SymInt rows) -> ()", kTags);
}

#include "geometry.h"

#include <array>
#include <initializer_list>
#include <type_traits>

namespace dflash2 {
namespace {

constexpr int64_t kMaxLanes = 4;
constexpr int64_t kMinRows = 2, kMaxRows = 16;
// The Metal kernels number a head's rows with 32 bits. With these bounds no product of sizes overflows 64.
constexpr int64_t kMaxHeads = int64_t(1) << 16;
constexpr int64_t kMaxSize = int64_t(1) << 26;  // of windows and hidden states

struct Argument {
  const char* name;
  const Tensor& tensor;
};

template <class... Expected>
[[noreturn]] void refuse(const char* op, const char* argument, const Expected&... expected_and_got) {
  TORCH_CHECK(false, "invalid DFlash2 attention geometry: ", op, ": ", argument, ": expected ", expected_and_got...);
}

template <class Int>
c10::ArrayRef<Int> sizes_of(const Tensor& t) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return t.sizes();
  } else {
    return t.sym_sizes();
  }
}

void check_rank(const char* op, const Argument& a, int64_t rank, const char* shape) {
  if (a.tensor.dim() != rank) {
    refuse(op, a.name, rank, " dimensions ", shape, ", got ", a.tensor.dim(), " ", a.tensor.sym_sizes());
  }
}

void check_bfloat16(const char* op, const Argument& a) {
  if (a.tensor.scalar_type() != at::kBFloat16) refuse(op, a.name, "dtype bfloat16, got ", a.tensor.scalar_type());
}

void check_int32(const char* op, const Argument& a) {
  if (a.tensor.scalar_type() != at::kInt) refuse(op, a.name, "dtype int32, got ", a.tensor.scalar_type());
}

void check_current_dtype(const char* op, const Argument& a) {
  const auto dtype = a.tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
    refuse(op, a.name, "dtype float32, bfloat16 or float16, got ", dtype);
  }
}

void check_same_dtype(const char* op, const Argument& a, const Argument& as) {
  if (a.tensor.scalar_type() != as.tensor.scalar_type()) {
    refuse(op, a.name, "the dtype of ", as.name, ", ", as.tensor.scalar_type(), ", got ", a.tensor.scalar_type());
  }
}

// Inside a kernel, a fake tensor of torch.compile calls itself meta; its dispatch keys still name its device.
c10::Device device_of(const Tensor& t) {
  if (!t.is_meta()) return t.device();
  const auto key = c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, t.key_set().highestBackendKey());
  return c10::Device(c10::dispatchKeyToDeviceType(key));
}

void check_same_device(const char* op, const Argument& as, std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments) {
    if (device_of(a.tensor) != device_of(as.tensor)) {
      refuse(op, a.name, "the device of ", as.name, ", ", device_of(as.tensor), ", got ", device_of(a.tensor));
    }
  }
}

template <class Int>
void check_shape(const char* op, const Argument& a, const char* shape, std::initializer_list<Int> expected) {
  const auto got = sizes_of<Int>(a.tensor);
  bool same = got.size() == expected.size();
  for (size_t i = 0; same && i < got.size(); ++i) same = got[i] == expected.begin()[i];
  if (!same) refuse(op, a.name, "shape ", shape, " = ", c10::ArrayRef<Int>(expected), ", got ", got);
}

template <class Int>
void check_range(const char* op, const char* argument, const char* what, const Int& got, int64_t low, int64_t high) {
  if (got < low || got > high) refuse(op, argument, what, " in ", low, "..", high, ", got ", got);
}

template <class Int>
void check_window(const char* op, const char* argument, const Int& window, const char* than, const Int& rows) {
  if (window <= rows) refuse(op, argument, "a window larger than ", than, " = ", rows, ", got ", window);
  check_range<Int>(op, argument, "a window", window, kMinRows, kMaxSize);
}

template <class Int>
void check_head_dim(const char* op, const char* argument, const Int& head_dim) {
  if (head_dim != 128 && head_dim != 256) refuse(op, argument, "head size 128 or 256, got ", head_dim);
}

// The bytes that a tensor reaches from the start of its storage, as [begin, end).
template <class Int>
std::array<Int, 2> reach(const Tensor& t) {
  const auto sizes = sizes_of<Int>(t);
  Int begin, end;
  if constexpr (std::is_same_v<Int, int64_t>) {
    begin = t.storage_offset(), end = begin + 1;
    for (size_t i = 0; i < sizes.size(); ++i) end += (sizes[i] - 1) * t.stride(int64_t(i));
  } else {
    begin = t.sym_storage_offset(), end = begin + 1;
    for (size_t i = 0; i < sizes.size(); ++i) end = end + (sizes[i] - 1) * t.sym_stride(int64_t(i));
  }
  const int64_t width = int64_t(t.element_size());
  return {begin * width, end * width};
}

template <class Int>
bool overlap(const Tensor& a, const Tensor& b) {
  const void* base_a = a.storage().data();
  const void* base_b = b.storage().data();
  const bool same_storage = a.is_alias_of(b) || (base_a && base_a == base_b);
  if (!same_storage && !a.is_cpu()) return false;
  auto [begin_a, end_a] = reach<Int>(a);
  auto [begin_b, end_b] = reach<Int>(b);
  if constexpr (std::is_same_v<Int, int64_t>) {
    if (!same_storage) {  // two storages on the CPU can still wrap the same memory
      const int64_t distance = int64_t(reinterpret_cast<uintptr_t>(base_b) - reinterpret_cast<uintptr_t>(base_a));
      begin_b += distance, end_b += distance;
    }
  } else if (!same_storage) {
    return false;
  }
  return begin_a < end_b && begin_b < end_a;
}

// A written argument is used in place: it is contiguous and shares no memory with any other argument.
template <class Int>
void check_written(const char* op, std::initializer_list<Argument> written, std::initializer_list<Argument> read) {
  for (auto w = written.begin(); w != written.end(); ++w) {
    if (!w->tensor.is_contiguous()) {
      refuse(op, w->name, "a contiguous tensor, as it is written in place, got strides ", w->tensor.sym_strides());
    }
    for (auto other = w + 1; other != written.end(); ++other) {
      if (overlap<Int>(w->tensor, other->tensor)) {
        refuse(op, w->name, "memory of its own, as it is written in place, got an overlap with ", other->name);
      }
    }
    for (const Argument& r : read) {
      if (overlap<Int>(w->tensor, r.tensor)) {
        refuse(op, w->name, "memory of its own, as it is written in place, got an overlap with ", r.name);
      }
    }
  }
}

}  // namespace

template <class Int>
PackGeometry<Int> check_pack_attention(const Tensor& ring_keys, const Tensor& ring_values,
                                       const Tensor& current_queries, const Tensor& current_keys,
                                       const Tensor& current_values, const Tensor& cache_lengths,
                                       const Tensor& write_positions) {
  constexpr const char* op = "pack_attention";
  constexpr const char* ring_shape = "[lanes, kv_heads, window, head_dim]";
  constexpr const char* query_shape = "[lanes, rows, q_heads, head_dim]";
  constexpr const char* current_shape = "[lanes, rows, kv_heads, head_dim]";
  const Argument rk{"ring_keys", ring_keys}, rv{"ring_values", ring_values}, q{"current_queries", current_queries},
      k{"current_keys", current_keys}, v{"current_values", current_values}, lengths{"cache_lengths", cache_lengths},
      positions{"write_positions", write_positions};
  check_same_device(op, rk, {rv, q, k, v, lengths, positions});
  check_bfloat16(op, rk);
  check_bfloat16(op, rv);
  check_current_dtype(op, q);
  check_same_dtype(op, k, q);
  check_same_dtype(op, v, q);
  check_int32(op, lengths);
  check_int32(op, positions);
  check_rank(op, rk, 4, ring_shape);
  check_rank(op, q, 4, query_shape);

  const auto ring = sizes_of<Int>(ring_keys);
  const auto query = sizes_of<Int>(current_queries);
  const PackGeometry<Int> g{ring[0], query[2], ring[1], ring[3], query[1], ring[2]};
  check_range<Int>(op, rk.name, "lanes", g.lanes, 1, kMaxLanes);
  check_range<Int>(op, rk.name, "kv_heads", g.kv_heads, 1, kMaxHeads);
  check_head_dim<Int>(op, rk.name, g.head_dim);
  check_range<Int>(op, q.name, "rows", g.rows, kMinRows, kMaxRows);
  check_range<Int>(op, q.name, "q_heads", g.q_heads, 1, kMaxHeads);
  if (g.q_heads % g.kv_heads != 0) {
    refuse(op, q.name, "q_heads a multiple of kv_heads = ", g.kv_heads, ", got ", g.q_heads);
  }
  check_window<Int>(op, rk.name, g.window, "rows", g.rows);
  check_shape<Int>(op, rv, ring_shape, {g.lanes, g.kv_heads, g.window, g.head_dim});
  check_shape<Int>(op, q, query_shape, {g.lanes, g.rows, g.q_heads, g.head_dim});
  check_shape<Int>(op, k, current_shape, {g.lanes, g.rows, g.kv_heads, g.head_dim});
  check_shape<Int>(op, v, current_shape, {g.lanes, g.rows, g.kv_heads, g.head_dim});
  check_shape<Int>(op, lengths, "[lanes]", {g.lanes});
  check_shape<Int>(op, positions, "[lanes]", {g.lanes});
  return g;
}

template <class Int>
PackGeometry<Int> check_pack_attention_out(const Tensor& ring_keys, const Tensor& ring_values,
                                           const Tensor& current_queries, const Tensor& current_keys,
                                           const Tensor& current_values, const Tensor& cache_lengths,
                                           const Tensor& write_positions, const Tensor& packed_queries,
                                           const Tensor& packed_keys, const Tensor& packed_values) {
  constexpr const char* op = "pack_attention.out";
  constexpr const char* packed_shape = "[lanes, kv_heads, window - 1 + rows, head_dim]";
  const auto g = check_pack_attention<Int>(ring_keys, ring_values, current_queries, current_keys, current_values,
                                           cache_lengths, write_positions);
  const Argument pq{"packed_queries", packed_queries}, pk{"packed_keys", packed_keys},
      pv{"packed_values", packed_values};
  check_same_device(op, {"ring_keys", ring_keys}, {pq, pk, pv});
  check_bfloat16(op, pq);
  check_bfloat16(op, pk);
  check_bfloat16(op, pv);
  check_shape<Int>(op, pq, "[lanes, q_heads, rows, head_dim]", {g.lanes, g.q_heads, g.rows, g.head_dim});
  check_shape<Int>(op, pk, packed_shape, {g.lanes, g.kv_heads, g.packed_length(), g.head_dim});
  check_shape<Int>(op, pv, packed_shape, {g.lanes, g.kv_heads, g.packed_length(), g.head_dim});
  check_written<Int>(op, {pq, pk, pv},
                     {{"ring_keys", ring_keys},
                      {"ring_values", ring_values},
                      {"current_queries", current_queries},
                      {"current_keys", current_keys},
                      {"current_values", current_values},
                      {"cache_lengths", cache_lengths},
                      {"write_positions", write_positions}});
  return g;
}

template <class Int>
MaskGeometry<Int> check_fill_attention_mask(const Tensor& cache_lengths, const Int& q_heads, const Int& rows,
                                            const Int& window, bool causal) {
  constexpr const char* op = "fill_attention_mask";
  const Argument lengths{"cache_lengths", cache_lengths};
  check_int32(op, lengths);
  check_rank(op, lengths, 1, "[lanes]");
  const MaskGeometry<Int> g{sizes_of<Int>(cache_lengths)[0], q_heads, rows, window, causal};
  check_range<Int>(op, lengths.name, "lanes", g.lanes, 1, kMaxLanes);
  check_range<Int>(op, "q_heads", "a number", g.q_heads, 1, kMaxHeads);
  check_range<Int>(op, "rows", "a number", g.rows, kMinRows, kMaxRows);
  check_window<Int>(op, "window", g.window, "rows", g.rows);
  return g;
}

template <class Int>
MaskGeometry<Int> check_fill_attention_mask_out(const Tensor& cache_lengths, const Int& q_heads, const Int& rows,
                                                const Int& window, bool causal, const Tensor& mask) {
  constexpr const char* op = "fill_attention_mask.out";
  const auto g = check_fill_attention_mask<Int>(cache_lengths, q_heads, rows, window, causal);
  const Argument m{"mask", mask};
  check_same_device(op, {"cache_lengths", cache_lengths}, {m});
  check_bfloat16(op, m);
  check_shape<Int>(op, m, "[lanes, q_heads, rows, window - 1 + rows]", {g.lanes, g.q_heads, g.rows, g.packed_length()});
  check_written<Int>(op, {m}, {{"cache_lengths", cache_lengths}});
  return g;
}

template <class Int>
CommitGeometry<Int> check_commit_kv(const Tensor& new_keys, const Tensor& new_values, const Tensor& commit_counts,
                                    const Tensor& write_positions, const Tensor& ring_keys, const Tensor& ring_values) {
  constexpr const char* op = "commit_kv";
  constexpr const char* new_shape = "[lanes, tokens, kv_heads, head_dim]";
  constexpr const char* ring_shape = "[lanes, kv_heads, window, head_dim]";
  const Argument k{"new_keys", new_keys}, v{"new_values", new_values}, counts{"commit_counts", commit_counts},
      positions{"write_positions", write_positions}, rk{"ring_keys", ring_keys}, rv{"ring_values", ring_values};
  check_same_device(op, rk, {k, v, counts, positions, rv});
  check_current_dtype(op, k);
  check_same_dtype(op, v, k);
  check_int32(op, counts);
  check_int32(op, positions);
  check_bfloat16(op, rk);
  check_bfloat16(op, rv);
  check_rank(op, k, 4, new_shape);
  check_rank(op, rk, 4, ring_shape);

  const auto ring = sizes_of<Int>(ring_keys);
  const CommitGeometry<Int> g{ring[0], ring[1], ring[3], sizes_of<Int>(new_keys)[1], ring[2]};
  check_range<Int>(op, rk.name, "lanes", g.lanes, 1, kMaxLanes);
  check_range<Int>(op, rk.name, "kv_heads", g.kv_heads, 1, kMaxHeads);
  check_head_dim<Int>(op, rk.name, g.head_dim);
  check_range<Int>(op, k.name, "tokens", g.max_count, 1, kMaxRows);
  check_window<Int>(op, rk.name, g.window, "the tokens of new_keys", g.max_count);
  check_shape<Int>(op, k, new_shape, {g.lanes, g.max_count, g.kv_heads, g.head_dim});
  check_shape<Int>(op, v, new_shape, {g.lanes, g.max_count, g.kv_heads, g.head_dim});
  check_shape<Int>(op, counts, "[lanes]", {g.lanes});
  check_shape<Int>(op, positions, "[lanes]", {g.lanes});
  check_shape<Int>(op, rv, ring_shape, {g.lanes, g.kv_heads, g.window, g.head_dim});
  check_written<Int>(op, {rk, rv}, {k, v, counts, positions});
  return g;
}

template <class Int>
MaskRowsGeometry<Int> check_set_mask_rows(const Tensor& mask_embedding, const Tensor& hidden, const Int& lanes,
                                          const Int& rows) {
  constexpr const char* op = "set_mask_rows";
  const Argument embedding{"mask_embedding", mask_embedding}, h{"hidden", hidden};
  check_same_device(op, h, {embedding});
  check_bfloat16(op, embedding);
  check_current_dtype(op, h);
  check_rank(op, embedding, 1, "[hidden_size]");
  check_range<Int>(op, "lanes", "a number", lanes, 1, kMaxLanes);
  check_range<Int>(op, "rows", "a number", rows, kMinRows, kMaxRows);
  const MaskRowsGeometry<Int> g{lanes, rows, sizes_of<Int>(mask_embedding)[0]};
  check_range<Int>(op, embedding.name, "hidden_size", g.hidden_size, 1, kMaxSize);
  check_shape<Int>(op, h, "[lanes * rows, hidden_size]", {g.lanes * g.rows, g.hidden_size});
  check_written<Int>(op, {h}, {embedding});
  return g;
}

#define DFLASH2_INSTANTIATE(Int)                                                                                    \
  template PackGeometry<Int> check_pack_attention(const Tensor&, const Tensor&, const Tensor&, const Tensor&,       \
                                                  const Tensor&, const Tensor&, const Tensor&);                     \
  template PackGeometry<Int> check_pack_attention_out(const Tensor&, const Tensor&, const Tensor&, const Tensor&,   \
                                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&,   \
                                                      const Tensor&, const Tensor&);                                \
  template MaskGeometry<Int> check_fill_attention_mask(const Tensor&, const Int&, const Int&, const Int&, bool);    \
  template MaskGeometry<Int> check_fill_attention_mask_out(const Tensor&, const Int&, const Int&, const Int&, bool, \
                                                           const Tensor&);                                          \
  template CommitGeometry<Int> check_commit_kv(const Tensor&, const Tensor&, const Tensor&, const Tensor&,          \
                                               const Tensor&, const Tensor&);                                       \
  template MaskRowsGeometry<Int> check_set_mask_rows(const Tensor&, const Tensor&, const Int&, const Int&);

DFLASH2_INSTANTIATE(int64_t)
DFLASH2_INSTANTIATE(c10::SymInt)

}  // namespace dflash2

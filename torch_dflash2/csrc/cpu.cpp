// The kernels on the CPU. A row is one token's vector of one head: the unit that everything here copies.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "operators.h"

namespace dflash2 {
namespace {

using at::BFloat16;

constexpr int64_t kGrainBytes = 256 * 1024;  // less than this is copied sooner than a second thread wakes up
constexpr int64_t kStreamBytes = 6 << 20;    // packed keys or values of this size are better not kept in the cache
constexpr int64_t kLineBytes = 64;           // of the cache; every row of a ring is a whole number of them long

// One binary for every x86 processor, which the loader completes with what the processor at hand does best.
#if defined(__x86_64__) && defined(__GLIBC__)
#define DFLASH2_FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define DFLASH2_FOR_EACH_PROCESSOR
#endif

#define DFLASH2_DISPATCH_CURRENT(dtype, ...)                                                                \
  AT_DISPATCH_SWITCH(dtype, "dflash2",                                                                      \
                     AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) \
                         AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

// Not const_data_ptr<T>(): newer compilers and older torch libraries for macOS disagree on that symbol's name.
template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

// Rows to work on, counted from the first of a tensor.
struct Rows {
  int64_t begin, end;
};

// What a thread's share of a list of rows has of the tensor whose `count` rows stand in that list from `first` on.
Rows part(Rows share, int64_t first, int64_t count) {
  return {std::clamp<int64_t>(share.begin - first, 0, count), std::clamp<int64_t>(share.end - first, 0, count)};
}

// Threads share rows and not heads or tensors, of which there may be few; and in one list, as waiting for each other
// takes as long as copying many rows.
template <class Body>
void share_rows(int64_t rows, int64_t row_bytes, const Body& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrainBytes / row_bytes),
                   [&](int64_t begin, int64_t end) { body(Rows{begin, end}); });
}

template <class Body>
void parallel_rows(int64_t rows, int64_t row_bytes, const Body& body) {
  share_rows(rows, row_bytes, [&](Rows share) {
    for (int64_t row = share.begin; row < share.end; ++row) body(row);
  });
}

int64_t ring_slot(int64_t position, int64_t window) {
  const int64_t slot = position % window;
  return slot < 0 ? slot + window : slot;
}

DFLASH2_FOR_EACH_PROCESSOR void round_row(const float* source, BFloat16* row, int64_t size) {
  for (int64_t d = 0; d < size; ++d) row[d] = BFloat16(source[d]);
}

template <class Source, class Destination>
void copy_row(const Source* source, Destination* row, int64_t size) {
  if constexpr (std::is_same_v<Source, Destination>) {
    std::memcpy(row, source, size_t(size) * sizeof(Destination));
  } else if constexpr (std::is_same_v<Source, float>) {
    round_row(source, row, size);
  } else {
    for (int64_t d = 0; d < size; ++d) row[d] = Destination(float(source[d]));
  }
}

template <class Current>
void pack_queries(const PackGeometry<int64_t>& g, const Current* current, BFloat16* packed, Rows rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t j = row % g.rows, h = row / g.rows % g.q_heads, b = row / g.rows / g.q_heads;
    copy_row(current + ((b * g.rows + j) * g.q_heads + h) * g.head_dim, packed + row * g.head_dim, g.head_dim);
  }
}

// Can rows at this address be written past the cache? That spares reading what they replace.
bool can_stream(const BFloat16* rows) {
#ifdef __SSE2__
  return reinterpret_cast<uintptr_t>(rows) % sizeof(__m128i) == 0;
#else
  return false;
#endif
}

void stream_line(const std::byte* source, std::byte* line) {
#ifdef __SSE2__
  for (size_t i = 0; i < kLineBytes; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(line + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
#endif
}

// Copies rows of a ring from the newest back, which is down in memory. Lines go down within a row as well: the
// prefetcher then sees one stream and not a jump at every row.
void copy_backwards(const BFloat16* newest, BFloat16* packed, int64_t rows, int64_t row_bytes, bool stream) {
  const auto* source = reinterpret_cast<const std::byte*>(newest);
  auto* destination = reinterpret_cast<std::byte*>(packed);
  for (; rows > 0; --rows, source -= row_bytes, destination += row_bytes) {
    for (int64_t line = row_bytes - kLineBytes; line >= 0; line -= kLineBytes) {
      if (stream) {
        stream_line(source + line, destination + line);
      } else {
        std::memcpy(destination + line, source + line, kLineBytes);
      }
    }
  }
}

// The block's own rows, then the ring from the newest token back, then zeros for what was never committed.
template <class Current>
void pack_ring(const PackGeometry<int64_t>& g, const BFloat16* ring, const Current* current, const int32_t* lengths,
               const int32_t* positions, BFloat16* packed, Rows rows) {
  const int64_t packed_length = g.packed_length(), row_bytes = g.head_dim * 2;
  const bool stream = g.lanes * g.kv_heads * packed_length * row_bytes >= kStreamBytes && can_stream(packed);
  int64_t run;
  for (int64_t row = rows.begin; row < rows.end; row += run) {
    const int64_t j = row % packed_length, head = row / packed_length, b = head / g.kv_heads, h = head % g.kv_heads;
    const int64_t age = j - g.rows, length = std::min<int64_t>(lengths[b], g.window - 1);
    BFloat16* destination = packed + row * g.head_dim;
    run = std::min(packed_length - j, rows.end - row);  // at most: what is left of this head and of this thread's share
    if (age < 0) {
      run = 1;
      copy_row(current + ((b * g.rows + j) * g.kv_heads + h) * g.head_dim, destination, g.head_dim);
    } else if (age < length) {
      const int64_t slot = ring_slot(int64_t(positions[b]) - 1 - age, g.window);
      run = std::min({run, slot + 1, length - age});
      copy_backwards(ring + (head * g.window + slot) * g.head_dim, destination, run, row_bytes, stream);
    } else {
      std::memset(destination, 0, size_t(run * row_bytes));
    }
  }
#ifdef __SSE2__
  if (stream) _mm_sfence();  // the next reader may be another thread
#endif
}

template <class Current>
void commit_rows(const CommitGeometry<int64_t>& g, const Current* tokens, const int32_t* counts,
                 const int32_t* positions, BFloat16* ring, Rows rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t h = row % g.kv_heads, i = row / g.kv_heads % g.max_count, b = row / g.kv_heads / g.max_count;
    if (i >= counts[b]) continue;
    const int64_t slot = ring_slot(int64_t(positions[b]) + i, g.window);
    copy_row(tokens + row * g.head_dim, ring + ((b * g.kv_heads + h) * g.window + slot) * g.head_dim, g.head_dim);
  }
}

struct CpuKernels {
  // A large output is memory that the system has yet to provide, on first touch and page by page: ask for large pages.
  static void made(const Tensor& output) {
#ifdef __linux__
    constexpr uintptr_t kLargePage = 2 << 20;
    const auto address = reinterpret_cast<uintptr_t>(output.const_data_ptr());
    const uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage, end = address + output.nbytes();
    if (begin + kLargePage <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  }

  static void pack_attention(const PackGeometry<int64_t>& g, const Tensor& ring_keys, const Tensor& ring_values,
                             const Tensor& current_queries, const Tensor& current_keys, const Tensor& current_values,
                             const Tensor& cache_lengths, const Tensor& write_positions, Tensor& packed_queries,
                             Tensor& packed_keys, Tensor& packed_values) {
    const auto* lengths = data<int32_t>(cache_lengths);
    const auto* positions = data<int32_t>(write_positions);
    const int64_t query_rows = g.lanes * g.q_heads * g.rows, ring_rows = g.lanes * g.kv_heads * g.packed_length();
    DFLASH2_DISPATCH_CURRENT(current_queries.scalar_type(), [&] {
      share_rows(query_rows + 2 * ring_rows, g.head_dim * 2, [&](Rows share) {
        pack_queries(g, data<scalar_t>(current_queries), packed_queries.mutable_data_ptr<BFloat16>(),
                     part(share, 0, query_rows));
        pack_ring(g, data<BFloat16>(ring_keys), data<scalar_t>(current_keys), lengths, positions,
                  packed_keys.mutable_data_ptr<BFloat16>(), part(share, query_rows, ring_rows));
        pack_ring(g, data<BFloat16>(ring_values), data<scalar_t>(current_values), lengths, positions,
                  packed_values.mutable_data_ptr<BFloat16>(), part(share, query_rows + ring_rows, ring_rows));
      });
    });
  }

  static void fill_attention_mask(const MaskGeometry<int64_t>& g, const Tensor& cache_lengths, Tensor& mask) {
    const auto* lengths = data<int32_t>(cache_lengths);
    auto* values = mask.mutable_data_ptr<BFloat16>();
    const int64_t packed_length = g.packed_length();
    parallel_rows(g.lanes * g.q_heads * g.rows, packed_length * 2, [&](int64_t row) {
      const int64_t j = row % g.rows, b = row / g.rows / g.q_heads;
      const int64_t seen = std::clamp<int64_t>(lengths[b], 0, g.window - 1 - j);
      BFloat16* begin = values + row * packed_length;
      std::fill(begin, begin + g.rows + seen, BFloat16(0.0f));
      std::fill(begin + g.rows + seen, begin + packed_length, BFloat16(-std::numeric_limits<float>::infinity()));
      if (g.causal) std::fill(begin + j + 1, begin + g.rows, BFloat16(-std::numeric_limits<float>::infinity()));
    });
  }

  static void commit_kv(const CommitGeometry<int64_t>& g, const Tensor& new_keys, const Tensor& new_values,
                        const Tensor& commit_counts, const Tensor& write_positions, Tensor& ring_keys,
                        Tensor& ring_values) {
    const auto* counts = data<int32_t>(commit_counts);
    const auto* positions = data<int32_t>(write_positions);
    const int64_t rows = g.lanes * g.max_count * g.kv_heads;
    DFLASH2_DISPATCH_CURRENT(new_keys.scalar_type(), [&] {
      share_rows(2 * rows, g.head_dim * 2, [&](Rows share) {
        commit_rows(g, data<scalar_t>(new_keys), counts, positions, ring_keys.mutable_data_ptr<BFloat16>(),
                    part(share, 0, rows));
        commit_rows(g, data<scalar_t>(new_values), counts, positions, ring_values.mutable_data_ptr<BFloat16>(),
                    part(share, rows, rows));
      });
    });
  }

  static void set_mask_rows(const MaskRowsGeometry<int64_t>& g, const Tensor& mask_embedding, Tensor& hidden) {
    const auto* embedding = data<BFloat16>(mask_embedding);
    DFLASH2_DISPATCH_CURRENT(hidden.scalar_type(), [&] {
      auto* rows = hidden.mutable_data_ptr<scalar_t>();
      parallel_rows(g.lanes * (g.rows - 1), g.hidden_size * int64_t(sizeof(scalar_t)), [&](int64_t row) {
        const int64_t j = 1 + row % (g.rows - 1), b = row / (g.rows - 1);
        copy_row(embedding, rows + (b * g.rows + j) * g.hidden_size, g.hidden_size);
      });
    });
  }
};

}  // namespace
}  // namespace dflash2

TORCH_LIBRARY_IMPL(dflash2, CPU, m) { dflash2::Operators<dflash2::CpuKernels>::register_on(m); }

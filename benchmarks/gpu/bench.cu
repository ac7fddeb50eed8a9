// Checks the shader's kernels, rewritten as CUDA, against plain host code, then times them beside copies of the same
// bytes. Reads one row a line on standard input, OPERATOR CURRENT LANES Q_HEADS KV_HEADS HEAD_DIM ROWS WINDOW, and
// prints one JSON object a line. bench.py writes the rows and reads the answers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "metal.cuh"
namespace shader {
#include "dflash2.inc"  // the shader: written by convert.py
}

namespace {

constexpr uint32_t kMaxGroup = 256;  // as the host of the Metal path launches
constexpr size_t kAlignment = 256;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

// ---- geometry and launches

enum Current { kFloat32, kFloat16, kBFloat16 };

struct Geometry {
  Current current = kFloat32;
  uint32_t lanes, q_heads, kv_heads, head_dim, rows, window;

  size_t packed_length() const { return size_t(window) - 1 + rows; }
  size_t ring() const { return size_t(lanes) * kv_heads * window * head_dim; }  // elements, of keys or of values
  size_t packed() const { return lanes * kv_heads * packed_length() * head_dim; }
  size_t queries() const { return size_t(lanes) * rows * q_heads * head_dim; }
  size_t tokens() const { return size_t(lanes) * rows * kv_heads * head_dim; }
  size_t mask() const { return size_t(lanes) * q_heads * rows * packed_length(); }
  size_t hidden_size() const { return size_t(q_heads) * head_dim; }
  size_t hidden() const { return size_t(lanes) * rows * hidden_size(); }
  size_t current_bytes() const { return current == kFloat32 ? 4 : 2; }
};

struct Pack {
  const void *ring_keys, *ring_values, *queries, *keys, *values, *lengths, *positions;
  void *packed_queries, *packed_keys, *packed_values;
};

struct Commit {
  const void *keys, *values, *counts, *positions;
  void *ring_keys, *ring_values;
};

uint32_t aligned(std::initializer_list<const void*> buffers) {
  return std::all_of(buffers.begin(), buffers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

// One dispatch as Metal's dispatchThreads makes it: exact grid, groups along x.
template <class Kernel, class Params>
void launch(Kernel kernel, dim3 grid, std::initializer_list<const void*> buffers, Params params,
            uint32_t group = kMaxGroup) {
  group = std::min(group, grid.x);
  std::vector<const void*> pointers(buffers);
  std::vector<void*> arguments{&grid};
  for (const void*& pointer : pointers) arguments.push_back(&pointer);
  arguments.push_back(&params);
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3((grid.x + group - 1) / group, grid.y, grid.z),
                         dim3(group), arguments.data(), 0, nullptr));
}

void pack_attention(const Geometry& g, const Pack& b) {
  const shader::PackParams params{g.q_heads,
                                  g.kv_heads,
                                  g.head_dim,
                                  g.rows,
                                  g.window,
                                  aligned({b.ring_keys, b.ring_values, b.queries, b.keys, b.values, b.packed_queries,
                                           b.packed_keys, b.packed_values})};
  const size_t query_rows = g.q_heads / g.kv_heads * g.rows;  // of one key/value head
  const dim3 grid(g.head_dim / 8 * (query_rows + g.packed_length()), g.kv_heads, g.lanes);
  const auto run = [&](auto kernel) {
    launch(kernel, grid,
           {b.ring_keys, b.ring_values, b.queries, b.keys, b.values, b.lengths, b.positions, b.packed_queries,
            b.packed_keys, b.packed_values},
           params);
  };
  if (g.current == kFloat32) run(shader::dflash2_pack_attention_bf16_cuda);
  if (g.current == kFloat16) run(shader::dflash2_pack_attention_bf16_from_f16_cuda);
  if (g.current == kBFloat16) run(shader::dflash2_pack_attention_bf16_from_bf16_cuda);
}

void fill_attention_mask(const Geometry& g, const void* lengths, void* mask) {
  launch(shader::dflash2_fill_attention_mask_bf16_cuda, dim3(g.packed_length(), g.q_heads, g.lanes), {lengths, mask},
         shader::MaskParams{g.q_heads, g.rows, g.window, 0});
}

void commit_kv(const Geometry& g, const Commit& b) {
  const shader::CommitParams params{g.kv_heads, g.head_dim, g.rows, g.window,
                                    aligned({b.keys, b.values, b.ring_keys, b.ring_values})};
  const dim3 grid(g.head_dim / 8 * g.rows, g.kv_heads, g.lanes);
  const auto run = [&](auto kernel) {
    launch(kernel, grid, {b.keys, b.values, b.counts, b.positions, b.ring_keys, b.ring_values}, params);
  };
  if (g.current == kFloat32) run(shader::dflash2_commit_kv_bf16_cuda);
  if (g.current == kFloat16) run(shader::dflash2_commit_kv_bf16_from_f16_cuda);
  if (g.current == kBFloat16) run(shader::dflash2_commit_kv_bf16_from_bf16_cuda);
}

void set_mask_rows(const Geometry& g, const void* embedding, void* hidden) {
  const shader::MaskRowsParams params{g.rows, uint32_t(g.hidden_size())};
  const dim3 grid(g.hidden_size(), g.rows - 1, g.lanes);
  if (g.current == kFloat32) launch(shader::dflash2_set_mask_rows_f32_cuda, grid, {embedding, hidden}, params);
  if (g.current == kFloat16) launch(shader::dflash2_set_mask_rows_f16_cuda, grid, {embedding, hidden}, params);
  if (g.current == kBFloat16) launch(shader::dflash2_set_mask_rows_bf16_cuda, grid, {embedding, hidden}, params);
}

// ---- the port to compare with: one thread an element, indices by division

__global__ void one_thread_an_element(Geometry g, Pack b) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const auto* queries = static_cast<const float*>(b.queries);
  const auto* keys = static_cast<const float*>(b.keys);
  const auto* values = static_cast<const float*>(b.values);
  const auto* ring_keys = static_cast<const __nv_bfloat16*>(b.ring_keys);
  const auto* ring_values = static_cast<const __nv_bfloat16*>(b.ring_values);
  auto* packed_queries = static_cast<__nv_bfloat16*>(b.packed_queries);
  auto* packed_keys = static_cast<__nv_bfloat16*>(b.packed_keys);
  auto* packed_values = static_cast<__nv_bfloat16*>(b.packed_values);

  const uint32_t d = i % g.head_dim;
  if (i < g.lanes * g.q_heads * g.rows * g.head_dim) {
    const uint32_t row = i / g.head_dim % g.rows, head = i / g.head_dim / g.rows % g.q_heads;
    const uint32_t lane = i / g.head_dim / g.rows / g.q_heads;
    packed_queries[i] = __float2bfloat16_rn(queries[((lane * g.rows + row) * g.q_heads + head) * g.head_dim + d]);
  }
  const uint32_t length = g.window - 1 + g.rows;
  if (i >= g.lanes * g.kv_heads * length * g.head_dim) return;
  const uint32_t row = i / g.head_dim % length, head = i / g.head_dim / length % g.kv_heads;
  const uint32_t lane = i / g.head_dim / length / g.kv_heads;
  if (row < g.rows) {
    const uint32_t source = ((lane * g.rows + row) * g.kv_heads + head) * g.head_dim + d;
    packed_keys[i] = __float2bfloat16_rn(keys[source]);
    packed_values[i] = __float2bfloat16_rn(values[source]);
  } else if (int(row - g.rows) < static_cast<const int*>(b.lengths)[lane]) {
    const int position = static_cast<const int*>(b.positions)[lane];
    const int window = int(g.window), back = (position % window - 1 - int(row - g.rows)) % window;
    const uint32_t slot = back < 0 ? back + window : back;
    const uint32_t source = ((lane * g.kv_heads + head) * g.window + slot) * g.head_dim + d;
    packed_keys[i] = ring_keys[source];
    packed_values[i] = ring_values[source];
  } else {
    packed_keys[i] = packed_values[i] = __float2bfloat16_rn(0);
  }
}

void pack_an_element_a_thread(const Geometry& g, const Pack& b) {
  const size_t threads = std::max(g.queries(), g.packed());
  one_thread_an_element<<<(threads + kMaxGroup - 1) / kMaxGroup, kMaxGroup>>>(g, b);
  check(cudaGetLastError());
}

// ---- verification: plain loops over host memory

uint16_t bits(__nv_bfloat16 value) {
  const __nv_bfloat16_raw raw = value;
  return raw.x;
}

// A tensor on both sides, `offset` elements into its allocation, between canaries.
template <class T>
class Tensor {
 public:
  Tensor(size_t size, size_t offset) : host(size), size_(size), offset_(offset) {
    check(cudaMalloc(&allocation_, (size + 2 * kPadding) * sizeof(T)));
  }
  ~Tensor() { cudaFree(allocation_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  T* device() const { return allocation_ + kPadding / 2 + offset_; }

  void randomize(std::mt19937& random) {
    for (T& element : host)
      element = T(sizeof(T) == 4 && random() % 2 ? random() & 0xFFFF8000 : random());  // many ties
  }
  void upload() {
    std::vector<T> all(size_ + 2 * kPadding, T(kCanary));
    std::copy(host.begin(), host.end(), all.begin() + kPadding / 2 + offset_);
    check(cudaMemcpy(allocation_, all.data(), all.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // What the device holds now; false when a canary changed.
  bool download(std::vector<T>& now) const {
    std::vector<T> all(size_ + 2 * kPadding);
    check(cudaMemcpy(all.data(), allocation_, all.size() * sizeof(T), cudaMemcpyDeviceToHost));
    const auto begin = all.begin() + kPadding / 2 + offset_, end = begin + size_;
    now.assign(begin, end);
    const auto intact = [](T element) { return element == T(kCanary); };
    return std::all_of(all.begin(), begin, intact) && std::all_of(end, all.end(), intact);
  }

  std::vector<T> host;

 private:
  static constexpr size_t kPadding = 64;
  static constexpr uint32_t kCanary = 0xABCDABCD;
  size_t size_, offset_;
  T* allocation_ = nullptr;
};

template <class Bits>
uint16_t to_bfloat16(Current current, Bits element) {
  if (current == kBFloat16) return uint16_t(element);
  if (current == kFloat16) return bits(__float2bfloat16_rn(__half2float(__half(__half_raw{uint16_t(element)}))));
  float value;
  const uint32_t word = element;
  std::memcpy(&value, &word, sizeof(value));
  return bits(__float2bfloat16_rn(value));
}

uint32_t from_bfloat16(Current current, uint16_t element) {
  if (current == kBFloat16) return element;
  if (current == kFloat32) return uint32_t(element) << 16;
  const __half_raw raw = __float2half_rn(__bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{element})));
  return raw.x;
}

bool is_nan(Current current, uint32_t element) {
  if (current == kFloat32) return (element & 0x7FFFFFFF) > 0x7F800000;
  return (element & 0x7FFF) > (current == kFloat16 ? 0x7C00 : 0x7F80);
}

// Equal bits, or both NaN: a NaN's payload is free where a value is converted.
template <class T>
bool same(Current type, const std::vector<T>& got, const std::vector<T>& expected) {
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i] != expected[i] && !(is_nan(type, got[i]) && is_nan(type, expected[i]))) return false;
  return true;
}

int modulo(int64_t position, uint32_t window) { return int((position % window + window) % window); }

void randomize_counts(Tensor<int>& counts, std::mt19937& random, uint32_t window) {
  const int special[] = {INT_MIN, -1, 0, 1, int(window) - 1, int(window), INT_MAX};
  for (int& count : counts.host) count = random() % 2 ? special[random() % 7] : int(random() % (2 * window));
}

using PackFunction = std::function<void(const Geometry&, const Pack&)>;
using MaskFunction = std::function<void(const Geometry&, const void*, void*)>;

template <class Bits>
bool verify_pack(const PackFunction& pack, const Geometry& g, bool offsets, std::mt19937& random) {
  const auto offset = [&] { return offsets ? random() % 9 : 0; };
  Tensor<uint16_t> ring_keys(g.ring(), offset()), ring_values(g.ring(), offset());
  Tensor<Bits> queries(g.queries(), offset()), keys(g.tokens(), offset()), values(g.tokens(), offset());
  Tensor<int> lengths(g.lanes, 0), positions(g.lanes, 0);
  Tensor<uint16_t> packed_queries(g.queries(), offset()), packed_keys(g.packed(), offset()),
      packed_values(g.packed(), offset());
  for (auto* t : {&ring_keys, &ring_values, &packed_queries, &packed_keys, &packed_values})
    t->randomize(random), t->upload();
  for (auto* t : {&queries, &keys, &values}) t->randomize(random), t->upload();
  for (auto* t : {&lengths, &positions}) randomize_counts(*t, random, g.window), t->upload();

  pack(g, Pack{ring_keys.device(), ring_values.device(), queries.device(), keys.device(), values.device(),
               lengths.device(), positions.device(), packed_queries.device(), packed_keys.device(),
               packed_values.device()});
  check(cudaDeviceSynchronize());

  std::vector<uint16_t> expected_queries, expected_keys, expected_values;
  for (uint32_t lane = 0; lane < g.lanes; ++lane)
    for (uint32_t head = 0; head < g.q_heads; ++head)
      for (uint32_t row = 0; row < g.rows; ++row)
        for (uint32_t d = 0; d < g.head_dim; ++d)
          expected_queries.push_back(to_bfloat16(
              g.current, queries.host[((size_t(lane) * g.rows + row) * g.q_heads + head) * g.head_dim + d]));
  for (uint32_t lane = 0; lane < g.lanes; ++lane)
    for (uint32_t head = 0; head < g.kv_heads; ++head)
      for (uint32_t row = 0; row < g.packed_length(); ++row)
        for (uint32_t d = 0; d < g.head_dim; ++d) {
          const int64_t age = int64_t(row) - g.rows;
          uint16_t key = 0, value = 0;
          if (age < 0) {
            const size_t i = ((size_t(lane) * g.rows + row) * g.kv_heads + head) * g.head_dim + d;
            key = to_bfloat16(g.current, keys.host[i]);
            value = to_bfloat16(g.current, values.host[i]);
          } else if (age < lengths.host[lane]) {
            const int slot = modulo(int64_t(positions.host[lane]) - 1 - age, g.window);
            const size_t i = ((size_t(lane) * g.kv_heads + head) * g.window + slot) * g.head_dim + d;
            key = ring_keys.host[i];
            value = ring_values.host[i];
          }
          expected_keys.push_back(key);
          expected_values.push_back(value);
        }
  std::vector<uint16_t> got_queries, got_keys, got_values;
  const bool intact =
      packed_queries.download(got_queries) & packed_keys.download(got_keys) & packed_values.download(got_values);
  return intact && same(kBFloat16, got_queries, expected_queries) && same(kBFloat16, got_keys, expected_keys) &&
         same(kBFloat16, got_values, expected_values);
}

bool verify_mask(const MaskFunction& fill, const Geometry& g, bool offsets, std::mt19937& random) {
  Tensor<int> lengths(g.lanes, 0);
  Tensor<uint16_t> mask(g.mask(), offsets ? random() % 9 : 0);
  randomize_counts(lengths, random, g.window);
  lengths.upload();
  mask.randomize(random);
  mask.upload();
  fill(g, lengths.device(), mask.device());
  check(cudaDeviceSynchronize());

  std::vector<uint16_t> expected, got;
  for (uint32_t lane = 0; lane < g.lanes; ++lane)
    for (uint32_t head = 0; head < g.q_heads; ++head)
      for (uint32_t row = 0; row < g.rows; ++row)
        for (int64_t column = 0; column < int64_t(g.packed_length()); ++column) {
          const int64_t age = column - g.rows;
          expected.push_back(age < 0 || (age < lengths.host[lane] && row + 1 + age < g.window) ? 0 : 0xFF80);
        }
  return mask.download(got) && got == expected;
}

template <class Bits>
bool verify_commit(const Geometry& g, bool offsets, std::mt19937& random) {
  const auto offset = [&] { return offsets ? random() % 9 : 0; };
  Tensor<Bits> keys(g.tokens(), offset()), values(g.tokens(), offset());
  Tensor<int> counts(g.lanes, 0), positions(g.lanes, 0);
  Tensor<uint16_t> ring_keys(g.ring(), offset()), ring_values(g.ring(), offset());
  for (auto* t : {&keys, &values}) t->randomize(random), t->upload();
  for (auto* t : {&counts, &positions}) randomize_counts(*t, random, g.window), t->upload();
  for (auto* t : {&ring_keys, &ring_values}) t->randomize(random), t->upload();
  commit_kv(g, Commit{keys.device(), values.device(), counts.device(), positions.device(), ring_keys.device(),
                      ring_values.device()});
  check(cudaDeviceSynchronize());

  for (uint32_t lane = 0; lane < g.lanes; ++lane)
    for (int64_t token = 0; token < std::min<int64_t>(counts.host[lane], g.rows); ++token)
      for (uint32_t head = 0; head < g.kv_heads; ++head)
        for (uint32_t d = 0; d < g.head_dim; ++d) {
          const int slot = modulo(positions.host[lane] + token, g.window);
          const size_t ring = ((size_t(lane) * g.kv_heads + head) * g.window + slot) * g.head_dim + d;
          const size_t source = ((size_t(lane) * g.rows + token) * g.kv_heads + head) * g.head_dim + d;
          ring_keys.host[ring] = to_bfloat16(g.current, keys.host[source]);
          ring_values.host[ring] = to_bfloat16(g.current, values.host[source]);
        }
  std::vector<uint16_t> got_keys, got_values;
  const bool intact = ring_keys.download(got_keys) & ring_values.download(got_values);
  return intact && same(kBFloat16, got_keys, ring_keys.host) && same(kBFloat16, got_values, ring_values.host);
}

template <class Bits>
bool verify_mask_rows(const Geometry& g, bool offsets, std::mt19937& random) {
  Tensor<uint16_t> embedding(g.hidden_size(), offsets ? random() % 9 : 0);
  Tensor<Bits> hidden(g.hidden(), offsets ? random() % 9 : 0);
  embedding.randomize(random), embedding.upload();
  hidden.randomize(random), hidden.upload();
  set_mask_rows(g, embedding.device(), hidden.device());
  check(cudaDeviceSynchronize());

  for (size_t row = 0; row < size_t(g.lanes) * g.rows; ++row)
    for (size_t d = 0; row % g.rows != 0 && d < g.hidden_size(); ++d)
      hidden.host[row * g.hidden_size() + d] = Bits(from_bfloat16(g.current, embedding.host[d]));
  std::vector<Bits> got;
  return hidden.download(got) && same(g.current, got, hidden.host);
}

constexpr Geometry kVerified[] = {
    {kFloat32, 1, 1, 1, 128, 2, 4},    {kFloat32, 2, 4, 2, 128, 3, 17},   {kFloat32, 3, 6, 3, 256, 8, 23},
    {kFloat32, 4, 8, 1, 128, 16, 17},  {kFloat32, 1, 6, 2, 256, 16, 101}, {kFloat32, 4, 12, 4, 128, 7, 64},
    {kFloat32, 2, 16, 2, 128, 8, 257},
};

bool verify_pack_everywhere(const PackFunction& pack, bool every_current = true) {
  std::mt19937 random(20);
  bool right = true;
  for (Geometry g : kVerified)
    for (int round = 0; round < 6; ++round) {
      right &= verify_pack<uint32_t>(pack, g, round % 2, random);
      for (const Current current : {kFloat16, kBFloat16}) {
        g.current = current;
        right &= !every_current || verify_pack<uint16_t>(pack, g, round % 2, random);
      }
      g.current = kFloat32;
    }
  return right;
}

bool verify_mask_everywhere(const MaskFunction& fill) {
  std::mt19937 random(21);
  bool right = true;
  for (const Geometry& g : kVerified)
    for (int round = 0; round < 6; ++round) right &= verify_mask(fill, g, round % 2, random);
  return right;
}

bool verify_everything() {
  std::mt19937 random(22);
  bool commits = true, mask_rows = true;
  for (Geometry g : kVerified)
    for (int round = 0; round < 6; ++round) {
      g.rows = std::min(g.rows, g.window - 1);
      g.current = kFloat32;
      commits &= verify_commit<uint32_t>(g, round % 2, random);
      mask_rows &= verify_mask_rows<uint32_t>(g, round % 2, random);
      for (const Current current : {kFloat16, kBFloat16}) {
        g.current = current;
        commits &= verify_commit<uint16_t>(g, round % 2, random);
        mask_rows &= verify_mask_rows<uint16_t>(g, round % 2, random);
      }
    }
  bool right = true;
  const auto report = [&](const char* what, bool is_right) {
    std::printf("{\"verified\": \"%s\", \"right\": %s}\n", what, is_right ? "true" : "false");
    right &= is_right;
  };
  report("pack_attention", verify_pack_everywhere(pack_attention));
  report("fill_attention_mask", verify_mask_everywhere(fill_attention_mask));
  report("commit_kv", commits);
  report("set_mask_rows", mask_rows);
  report("one thread an element", verify_pack_everywhere(pack_an_element_a_thread, false));
  return right;
}

// ---- timing

__global__ void fill_randomly(uint64_t* words, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    words[i] = z ^ z >> 27;
  }
}

__global__ void spin(long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) continue;
}

__global__ void nothing() {}

// Device memory full of random bits, handed out in pieces. It grows to the largest row and is used again.
class Arena {
 public:
  void reserve(size_t bytes) {
    used_ = 0;
    bytes = rounded(bytes);
    if (bytes <= size_) return;
    if (base_) check(cudaFree(base_));
    check(cudaMalloc(&base_, bytes));
    size_ = bytes;
    fill_randomly<<<1024, 256>>>(reinterpret_cast<uint64_t*>(base_), bytes / 8);
    check(cudaDeviceSynchronize());
  }
  void* take(size_t bytes) {
    void* piece = base_ + used_;
    used_ += rounded(bytes);
    if (used_ > size_) std::fprintf(stderr, "the arena is too small\n"), std::exit(2);
    return piece;
  }
  static size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

struct Contender {
  std::string name;
  std::function<void(size_t)> run;  // given a number that rises by one a call: it picks the buffers
  std::vector<double> microseconds = {};
  size_t turn = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

class Timer {
 public:
  Timer(int samples, double batch_microseconds) : samples_(samples), batch_microseconds_(batch_microseconds) {
    check(cudaEventCreate(&start_));
    check(cudaEventCreate(&stop_));
  }

  // Samples of all contenders, interleaved. Fills in their microseconds a call and returns the calls in a sample.
  size_t measure(std::vector<Contender>& contenders) {
    for (Contender& c : contenders) time_batch(c, 4);
    const double estimate = time_batch(contenders[0], 8);
    const size_t batch = size_t(std::clamp(batch_microseconds_ / estimate, 4.0, 200.0));
    for (Contender& c : contenders) time_batch(c, batch);
    for (int sample = 0; sample < samples_; ++sample)
      for (size_t i = 0; i < contenders.size(); ++i) {
        Contender& c = contenders[(sample + i) % contenders.size()];
        c.microseconds.push_back(time_batch(c, batch));
      }
    return batch;
  }

 private:
  // The GPU spins while the host queues the batch, so that the calls then run back to back. If it stopped spinning too
  // soon, once more with a longer spin.
  double time_batch(Contender& contender, size_t calls) {
    for (;;) {
      spin<<<1, 1>>>(cycles_a_call_ * (long long)(calls + 8));
      check(cudaEventRecord(start_));
      for (size_t i = 0; i < calls; ++i) contender.run(contender.turn++);
      check(cudaEventRecord(stop_));
      const bool late = cudaEventQuery(start_) == cudaSuccess;
      check(cudaEventSynchronize(stop_));
      check(cudaGetLastError());
      if (late && cycles_a_call_ < 200000) {
        cycles_a_call_ += cycles_a_call_ / 2;
        continue;
      }
      float milliseconds;
      check(cudaEventElapsedTime(&milliseconds, start_, stop_));
      return milliseconds * 1e3 / double(calls);
    }
  }

  int samples_;
  double batch_microseconds_;
  long long cycles_a_call_ = 8000;
  cudaEvent_t start_, stop_;
};

// The buffers of one row: enough sets of them that the L2 cache holds at most a quarter.
struct Bench {
  Timer& timer;
  size_t working_set;  // bytes that a rotation must touch at least
  Arena ours = {}, copies = {}, small = {};

  size_t sets_of(size_t bytes) const { return std::max<size_t>(2, (working_set + bytes - 1) / bytes); }

  // Copies that read half of `bytes` and write the other half, over as much memory as the operator's.
  Contender copy_of(size_t bytes) {
    const size_t half = bytes / 2 / 16 * 16, sets = sets_of(bytes);
    copies.reserve(sets * 2 * Arena::rounded(half));
    std::vector<void*> buffers;
    for (size_t i = 0; i < 2 * sets; ++i) buffers.push_back(copies.take(half));
    return {"copy", [=](size_t turn) {
              const size_t set = turn % sets;
              check(cudaMemcpyAsync(buffers[2 * set + 1], buffers[2 * set], half, cudaMemcpyDeviceToDevice));
            }};
  }

  // [sets][lanes] counts in device memory.
  int* upload(const std::vector<int>& counts) {
    small.reserve(counts.size() * sizeof(int));
    int* device = static_cast<int*>(small.take(counts.size() * sizeof(int)));
    check(cudaMemcpy(device, counts.data(), counts.size() * sizeof(int), cudaMemcpyHostToDevice));
    return device;
  }

  void report(const Geometry& g, const char* op, size_t bytes, std::vector<Contender> contenders) {
    const size_t batch = timer.measure(contenders);
    static const char* currents[] = {"float32", "float16", "bfloat16"};
    std::printf(
        "{\"op\": \"%s\", \"current\": \"%s\", \"lanes\": %u, \"q_heads\": %u, \"kv_heads\": %u, \"head_dim\": %u, "
        "\"rows\": %u, \"window\": %u, \"bytes\": %zu, \"calls_a_sample\": %zu, \"buffer_sets\": %zu",
        op, currents[g.current], g.lanes, g.q_heads, g.kv_heads, g.head_dim, g.rows, g.window, bytes, batch,
        sets_of(bytes));
    for (const Contender& c : contenders) {
      const auto [least, most] = std::minmax_element(c.microseconds.begin(), c.microseconds.end());
      std::printf(", \"%s\": {\"median_us\": %.3f, \"min_us\": %.3f, \"max_us\": %.3f, \"samples\": %zu}",
                  c.name.c_str(), median(c.microseconds), *least, *most, c.microseconds.size());
    }
    std::printf("}\n");
    std::fflush(stdout);
  }

  struct PackSets {
    size_t bytes;
    std::vector<Pack> sets;
  };

  // Rings full of history, written at random positions.
  PackSets pack_sets(const Geometry& g) {
    const size_t e = g.current_bytes();
    const size_t read = 2 * size_t(g.lanes) * g.kv_heads * (g.window - 1) * g.head_dim * 2 +
                        (g.queries() + 2 * g.tokens()) * e + 8 * g.lanes;
    const size_t written = 2 * (g.queries() + 2 * g.packed());
    const size_t count = sets_of(read + written);
    std::mt19937 random(23);
    std::vector<int> positions(count * g.lanes);
    for (int& position : positions) position = int(g.window + random() % (8 * g.window));
    int* device_positions = upload(positions);

    ours.reserve(count * (2 * Arena::rounded(2 * g.ring()) + Arena::rounded(e * g.queries()) +
                          2 * Arena::rounded(e * g.tokens()) + Arena::rounded(2 * g.queries()) +
                          2 * Arena::rounded(2 * g.packed())));
    std::vector<Pack> sets;
    for (size_t i = 0; i < count; ++i) {
      const int* position = device_positions + i * g.lanes;  // a running token count: the length as well
      Pack b{};
      b.ring_keys = ours.take(2 * g.ring()), b.ring_values = ours.take(2 * g.ring());
      b.queries = ours.take(e * g.queries()), b.keys = ours.take(e * g.tokens()), b.values = ours.take(e * g.tokens());
      b.lengths = b.positions = position;
      b.packed_queries = ours.take(2 * g.queries());
      b.packed_keys = ours.take(2 * g.packed()), b.packed_values = ours.take(2 * g.packed());
      sets.push_back(b);
    }
    return {read + written, sets};
  }

  static Contender packing(std::string name, const Geometry& g, const PackSets& p, PackFunction pack) {
    return {name, [=](size_t turn) { pack(g, p.sets[turn % p.sets.size()]); }};
  }

  void pack(const Geometry& g) {
    const PackSets p = pack_sets(g);
    std::vector<Contender> contenders{packing("ours", g, p, pack_attention), copy_of(p.bytes)};
    if (g.current == kFloat32) contenders.push_back(packing("element_a_thread", g, p, pack_an_element_a_thread));
    report(g, "pack_attention", p.bytes, contenders);
  }

  struct MaskSets {
    size_t bytes;
    int* lengths;
    std::vector<void*> masks;
  };

  MaskSets mask_sets(const Geometry& g) {
    const size_t bytes = 2 * g.mask(), count = sets_of(bytes);
    std::mt19937 random(24);
    std::vector<int> lengths(g.lanes);
    for (int& length : lengths) length = int(random() % (2 * g.window));
    ours.reserve(count * Arena::rounded(bytes));
    MaskSets sets{bytes, upload(lengths), {}};
    for (size_t i = 0; i < count; ++i) sets.masks.push_back(ours.take(bytes));
    return sets;
  }

  static Contender masking(std::string name, const Geometry& g, const MaskSets& m, MaskFunction fill) {
    return {name, [=](size_t turn) { fill(g, m.lengths, m.masks[turn % m.masks.size()]); }};
  }

  static Contender memset_of(const MaskSets& m) {
    return {"memset", [=](size_t turn) { check(cudaMemsetAsync(m.masks[turn % m.masks.size()], 0x80, m.bytes)); }};
  }

  void mask(const Geometry& g) {
    const MaskSets m = mask_sets(g);
    report(g, "fill_attention_mask", m.bytes,
           {masking("ours", g, m, fill_attention_mask), copy_of(m.bytes), memset_of(m)});
  }

  // Each call commits other tokens to other slots. A ring serves as many calls as its window has room for.
  void commit(const Geometry& g) {
    const size_t e = g.current_bytes(), bytes = 2 * g.tokens() * (e + 2) + 8 * g.lanes, count = sets_of(bytes);
    const size_t calls_a_ring = g.window / g.rows, rings = (count + calls_a_ring - 1) / calls_a_ring;
    std::vector<int> counts;  // all the commit counts, then the positions
    counts.assign(g.lanes, int(g.rows));
    for (size_t i = 0; i < count; ++i) counts.insert(counts.end(), g.lanes, int(i / rings * g.rows + 3));
    const int* device_counts = upload(counts);

    ours.reserve(count * 2 * Arena::rounded(e * g.tokens()) + rings * 2 * Arena::rounded(2 * g.ring()));
    std::vector<void*> ring_keys, ring_values;
    for (size_t i = 0; i < rings; ++i)
      ring_keys.push_back(ours.take(2 * g.ring())), ring_values.push_back(ours.take(2 * g.ring()));
    std::vector<Commit> sets;
    for (size_t i = 0; i < count; ++i) {
      void *keys = ours.take(e * g.tokens()), *values = ours.take(e * g.tokens());
      sets.push_back({keys, values, device_counts, device_counts + (i + 1) * g.lanes, ring_keys[i % rings],
                      ring_values[i % rings]});
    }
    report(g, "commit_kv", bytes, {{"ours", [=](size_t turn) { commit_kv(g, sets[turn % count]); }}, copy_of(bytes)});
  }

  void mask_rows(const Geometry& g) {
    const size_t e = g.current_bytes();
    const size_t bytes = 2 * g.hidden_size() + e * g.lanes * (g.rows - 1) * g.hidden_size(), count = sets_of(bytes);
    ours.reserve(count * (Arena::rounded(2 * g.hidden_size()) + Arena::rounded(e * g.hidden())));
    std::vector<void*> embeddings, hidden;
    for (size_t i = 0; i < count; ++i)
      embeddings.push_back(ours.take(2 * g.hidden_size())), hidden.push_back(ours.take(e * g.hidden()));
    report(g, "set_mask_rows", bytes,
           {{"ours", [=](size_t turn) { set_mask_rows(g, embeddings[turn % count], hidden[turn % count]); }},
            copy_of(bytes)});
  }
};

bool read_row(const std::string& line, std::string& op, Geometry& g) {
  std::istringstream in(line);
  std::string current;
  if (!(in >> op >> current >> g.lanes >> g.q_heads >> g.kv_heads >> g.head_dim >> g.rows >> g.window)) return false;
  g.current = current == "float32" ? kFloat32 : current == "float16" ? kFloat16 : kBFloat16;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: bench SAMPLES < ROWS\n"), 2;
  cudaDeviceProp card;
  check(cudaGetDeviceProperties(&card, 0));
  int runtime, driver;
  check(cudaRuntimeGetVersion(&runtime));
  check(cudaDriverGetVersion(&driver));
  std::printf(
      "{\"card\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, \"memory_bytes\": %zu, \"cuda_runtime\": %d, "
      "\"cuda_driver\": %d}\n",
      card.name, card.multiProcessorCount, card.l2CacheSize, card.totalGlobalMem, runtime, driver);
  if (!verify_everything()) return 1;
  std::fflush(stdout);

  Timer timer(std::atoi(argv[1]), 1000);
  std::vector<Contender> empty{{"empty", [](size_t) { nothing<<<1, 32>>>(); }}};
  timer.measure(empty);
  std::printf("{\"empty_kernel_us\": %.3f}\n", median(empty[0].microseconds));

  Bench bench{timer, 4 * size_t(card.l2CacheSize)};
  for (std::string line, op; std::getline(std::cin, line);) {
    Geometry g;
    if (!read_row(line, op, g)) return std::fprintf(stderr, "not a row: %s\n", line.c_str()), 2;
    if (op == "pack_attention")
      bench.pack(g);
    else if (op == "fill_attention_mask")
      bench.mask(g);
    else if (op == "commit_kv")
      bench.commit(g);
    else if (op == "set_mask_rows")
      bench.mask_rows(g);
    else
      return std::fprintf(stderr, "no operator %s\n", op.c_str()), 2;
  }
}

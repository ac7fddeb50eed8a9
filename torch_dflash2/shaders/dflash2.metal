// The Metal kernels of torch.ops.dflash2. See reference.py for what they compute.
//
// A row is one token's vector of one head. Rows move eight elements a thread: 16 bytes of bfloat16. bfloat16 values are
// 16-bit integers here and are rounded with integer arithmetic, so that fast math cannot change a bit. Offsets into
// buffers are 64-bit. Grids are exact (dispatchThreads), so no thread checks its bounds.
#include <metal_stdlib>

#include "params.h"

using namespace metal;

constant constexpr uint kVector = 8;
constant constexpr ushort kMinusInfinity = 0xFF80;
constant constexpr ushort kNaN = 0x7FC0;

// ---- conversions

inline ushort round_to_bfloat16(uint float32_bits) {
  if ((float32_bits & 0x7FFFFFFF) > 0x7F800000) return kNaN;
  return ushort((float32_bits + 0x7FFF + (float32_bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

inline uint widen_float16(ushort half_bits) {
  const uint sign = uint(half_bits & 0x8000) << 16;
  const uint exponent = half_bits >> 10 & 0x1F;
  const uint mantissa = half_bits & 0x3FF;
  if (exponent == 31) return sign | 0x7F800000 | mantissa << 13;
  if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
  return sign | as_type<uint>(float(mantissa) * 0x1p-24f);  // a subnormal: exact, and normal as float32
}

inline ushort narrow_to_float16(ushort bfloat16_bits) {
  const ushort sign = bfloat16_bits & 0x8000;
  const int exponent = int(bfloat16_bits >> 7 & 0xFF) - 112;
  const uint mantissa = bfloat16_bits & 0x7F;
  if ((bfloat16_bits & 0x7FFF) > 0x7F80) return sign | 0x7E00;
  if (exponent >= 31) return sign | 0x7C00;
  if (exponent > 0) return sign | ushort(exponent << 10 | int(mantissa << 3));
  if (exponent < -10) return sign;
  const uint significand = (0x80 | mantissa) << 3;  // a subnormal result: shift right, to nearest, ties to even
  const uint shift = uint(1 - exponent);
  const uint half_way = 1u << (shift - 1);
  return sign | ushort((significand + half_way - 1 + (significand >> shift & 1)) >> shift);
}

// The element types of current tensors, as the integers that hold them.
struct Float32 {
  typedef uint Bits;
  static ushort to_bfloat16(uint bits) { return round_to_bfloat16(bits); }
  static uint from_bfloat16(ushort bits) { return uint(bits) << 16; }
};

struct Float16 {
  typedef ushort Bits;
  static ushort to_bfloat16(ushort bits) { return round_to_bfloat16(widen_float16(bits)); }
  static ushort from_bfloat16(ushort bits) { return narrow_to_float16(bits); }
};

struct BFloat16 {
  typedef ushort Bits;
  static ushort to_bfloat16(ushort bits) { return bits; }
  static ushort from_bfloat16(ushort bits) { return bits; }
};

// ---- rows

// Eight elements, two to a word: what one 16-byte access reads or writes.
inline uint4 load_row(device const ushort* source, bool aligned) {
  if (aligned) return *reinterpret_cast<device const uint4*>(source);
  uint4 packed;
  for (uint i = 0; i < 4; ++i) packed[i] = uint(source[2 * i]) | uint(source[2 * i + 1]) << 16;
  return packed;
}

inline void store_row(device ushort* destination, uint4 packed, bool aligned) {
  if (aligned) {
    *reinterpret_cast<device uint4*>(destination) = packed;
    return;
  }
  for (uint i = 0; i < 4; ++i) {
    destination[2 * i] = ushort(packed[i]);
    destination[2 * i + 1] = ushort(packed[i] >> 16);
  }
}

// Rounds one row of a current tensor. The threads of the row stay side by side in memory: of float32 they take four
// elements each, twice; of 16-bit types eight, once.
template <typename Current>
inline void round_row(device const uint* source, device ushort* destination, uint vector, uint vectors, bool aligned) {
  const uint offsets[2] = {vector * 4, (vectors + vector) * 4};
  uint4 halves[2];  // both read before either is written: the second need not wait for the first
  for (uint half_row = 0; half_row < 2; ++half_row) {
    device const uint* from = source + offsets[half_row];
    if (aligned)
      halves[half_row] = *reinterpret_cast<device const uint4*>(from);
    else
      halves[half_row] = uint4(from[0], from[1], from[2], from[3]);
  }
  for (uint half_row = 0; half_row < 2; ++half_row) {
    device ushort* to = destination + offsets[half_row];
    const uint4 bits = halves[half_row];
    const ushort4 rounded = ushort4(Current::to_bfloat16(bits.x), Current::to_bfloat16(bits.y),
                                    Current::to_bfloat16(bits.z), Current::to_bfloat16(bits.w));
    if (aligned) {
      *reinterpret_cast<device ushort4*>(to) = rounded;
    } else {
      for (uint i = 0; i < 4; ++i) to[i] = rounded[i];
    }
  }
}

template <typename Current>
inline void round_row(device const ushort* source, device ushort* destination, uint vector, uint, bool aligned) {
  const uint element = vector * kVector;
  uint4 packed = load_row(source + element, aligned);
  for (uint i = 0; i < 4; ++i) {
    const uint low = Current::to_bfloat16(ushort(packed[i])), high = Current::to_bfloat16(ushort(packed[i] >> 16));
    packed[i] = low | high << 16;
  }
  store_row(destination + element, packed, aligned);
}

// A row has 16 or 32 vectors of eight elements.
inline uint vector_shift(uint head_dim) { return head_dim == 128 ? 4 : 5; }

// Any int32 position is a slot: a running token count serves as a position.
inline uint ring_slot(int position, uint window) {
  const int slot = position % int(window);
  return uint(slot < 0 ? slot + int(window) : slot);
}

// ---- kernels

// Grid: (head_dim / 8 * (query rows + packed length), kv_heads, lanes). The first rows are the queries of the heads
// that share this key/value head, one a row: a thread that looped over them would end long after the others.
template <typename Current>
kernel void pack_attention(device const ushort* ring_keys [[buffer(0)]],
                           device const ushort* ring_values [[buffer(1)]],
                           device const typename Current::Bits* current_queries [[buffer(2)]],
                           device const typename Current::Bits* current_keys [[buffer(3)]],
                           device const typename Current::Bits* current_values [[buffer(4)]],
                           device const int* cache_lengths [[buffer(5)]],
                           device const int* write_positions [[buffer(6)]],
                           device ushort* packed_queries [[buffer(7)]],
                           device ushort* packed_keys [[buffer(8)]],
                           device ushort* packed_values [[buffer(9)]],
                           constant PackParams& p [[buffer(10)]],
                           uint3 thread_position [[thread_position_in_grid]]) {
  const uint shift = vector_shift(p.head_dim);
  const uint vectors = 1u << shift;
  const uint vector = thread_position.x & (vectors - 1);
  const uint head = thread_position.y;
  const uint lane = thread_position.z;
  const bool aligned = p.aligned != 0;
  uint row = thread_position.x >> shift;

  const uint group = p.q_heads / p.kv_heads;
  if (row < group * p.rows) {
    const uint block_row = row / group;
    const uint q_head = head * group + row - block_row * group;
    const ulong query = ((ulong(lane) * p.rows + block_row) * p.q_heads + q_head) * p.head_dim;
    const ulong packed_query = ((ulong(lane) * p.q_heads + q_head) * p.rows + block_row) * p.head_dim;
    round_row<Current>(current_queries + query, packed_queries + packed_query, vector, vectors, aligned);
    return;
  }

  row -= group * p.rows;
  const ulong lane_head = ulong(lane) * p.kv_heads + head;
  const ulong packed = (lane_head * (p.window - 1 + p.rows) + row) * p.head_dim;
  if (row < p.rows) {
    const ulong current = ((ulong(lane) * p.rows + row) * p.kv_heads + head) * p.head_dim;
    round_row<Current>(current_keys + current, packed_keys + packed, vector, vectors, aligned);
    round_row<Current>(current_values + current, packed_values + packed, vector, vectors, aligned);
    return;
  }

  const uint age = row - p.rows;
  const uint element = vector * kVector;
  uint4 key = uint4(0), value = uint4(0);
  if (int(age) < cache_lengths[lane]) {
    const uint next = ring_slot(write_positions[lane], p.window);
    const uint slot = next > age ? next - 1 - age : next + p.window - 1 - age;
    const ulong ring = (lane_head * p.window + slot) * p.head_dim + element;
    key = load_row(ring_keys + ring, aligned);
    value = load_row(ring_values + ring, aligned);
  }
  store_row(packed_keys + packed + element, key, aligned);
  store_row(packed_values + packed + element, value, aligned);
}

// Grid: (packed length, q_heads, lanes). A thread writes its column in every row of the block.
kernel void dflash2_fill_attention_mask_bf16(device const int* cache_lengths [[buffer(0)]],
                                             device ushort* mask [[buffer(1)]],
                                             constant MaskParams& p [[buffer(2)]],
                                             uint3 thread_position [[thread_position_in_grid]]) {
  const uint column = thread_position.x;
  const uint lane = thread_position.z;
  const uint packed_length = p.window - 1 + p.rows;
  const bool in_block = column < p.rows;
  const bool committed = !in_block && int(column - p.rows) < cache_lengths[lane];
  ulong index = (ulong(lane) * p.q_heads + thread_position.y) * p.rows * packed_length + column;
  for (uint row = 0; row < p.rows; ++row, index += packed_length) {
    const bool seen = in_block ? p.causal == 0 || column <= row : committed && row + 1 + column - p.rows < p.window;
    mask[index] = seen ? ushort(0) : kMinusInfinity;
  }
}

// Grid: (head_dim / 8 * tokens, kv_heads, lanes).
template <typename Current>
kernel void commit_kv(device const typename Current::Bits* new_keys [[buffer(0)]],
                      device const typename Current::Bits* new_values [[buffer(1)]],
                      device const int* commit_counts [[buffer(2)]],
                      device const int* write_positions [[buffer(3)]],
                      device ushort* ring_keys [[buffer(4)]],
                      device ushort* ring_values [[buffer(5)]],
                      constant CommitParams& p [[buffer(6)]],
                      uint3 thread_position [[thread_position_in_grid]]) {
  const uint shift = vector_shift(p.head_dim);
  const uint vectors = 1u << shift;
  const uint token = thread_position.x >> shift;
  const uint vector = thread_position.x & (vectors - 1);
  const uint head = thread_position.y;
  const uint lane = thread_position.z;
  if (int(token) >= commit_counts[lane]) return;

  const uint ahead = ring_slot(write_positions[lane], p.window) + token;
  const uint slot = ahead < p.window ? ahead : ahead - p.window;
  const ulong source = ((ulong(lane) * p.max_count + token) * p.kv_heads + head) * p.head_dim;
  const ulong ring = ((ulong(lane) * p.kv_heads + head) * p.window + slot) * p.head_dim;
  round_row<Current>(new_keys + source, ring_keys + ring, vector, vectors, p.aligned != 0);
  round_row<Current>(new_values + source, ring_values + ring, vector, vectors, p.aligned != 0);
}

// Grid: (hidden_size, rows - 1, lanes).
template <typename Current>
kernel void set_mask_rows(device const ushort* mask_embedding [[buffer(0)]],
                          device typename Current::Bits* hidden [[buffer(1)]],
                          constant MaskRowsParams& p [[buffer(2)]],
                          uint3 thread_position [[thread_position_in_grid]]) {
  const ulong row = ulong(thread_position.z) * p.rows + 1 + thread_position.y;  // row 0 of a lane is its anchor
  hidden[row * p.hidden_size + thread_position.x] = Current::from_bfloat16(mask_embedding[thread_position.x]);
}

// ---- what the host asks for by name: the kernels above for each element type of the current tensors

#define PACK_ATTENTION(name, Current, bits)                                                                  \
  template [[host_name(name)]] kernel void pack_attention<Current>(                                          \
      device const ushort* ring_keys [[buffer(0)]], device const ushort* ring_values [[buffer(1)]],          \
      device const bits* current_queries [[buffer(2)]], device const bits* current_keys [[buffer(3)]],       \
      device const bits* current_values [[buffer(4)]], device const int* cache_lengths [[buffer(5)]],        \
      device const int* write_positions [[buffer(6)]], device ushort* packed_queries [[buffer(7)]],          \
      device ushort* packed_keys [[buffer(8)]], device ushort* packed_values [[buffer(9)]],                  \
      constant PackParams& p [[buffer(10)]], uint3 thread_position [[thread_position_in_grid]]);

#define COMMIT_KV(name, Current, bits)                                                                       \
  template [[host_name(name)]] kernel void commit_kv<Current>(                                               \
      device const bits* new_keys [[buffer(0)]], device const bits* new_values [[buffer(1)]],                \
      device const int* commit_counts [[buffer(2)]], device const int* write_positions [[buffer(3)]],        \
      device ushort* ring_keys [[buffer(4)]], device ushort* ring_values [[buffer(5)]],                      \
      constant CommitParams& p [[buffer(6)]], uint3 thread_position [[thread_position_in_grid]]);

#define SET_MASK_ROWS(name, Current, bits)                                                                   \
  template [[host_name(name)]] kernel void set_mask_rows<Current>(                                           \
      device const ushort* mask_embedding [[buffer(0)]], device bits* hidden [[buffer(1)]],                  \
      constant MaskRowsParams& p [[buffer(2)]], uint3 thread_position [[thread_position_in_grid]]);

PACK_ATTENTION("dflash2_pack_attention_bf16", Float32, uint)
PACK_ATTENTION("dflash2_pack_attention_bf16_from_f16", Float16, ushort)
PACK_ATTENTION("dflash2_pack_attention_bf16_from_bf16", BFloat16, ushort)
COMMIT_KV("dflash2_commit_kv_bf16", Float32, uint)
COMMIT_KV("dflash2_commit_kv_bf16_from_f16", Float16, ushort)
COMMIT_KV("dflash2_commit_kv_bf16_from_bf16", BFloat16, ushort)
SET_MASK_ROWS("dflash2_set_mask_rows_f32", Float32, uint)
SET_MASK_ROWS("dflash2_set_mask_rows_f16", Float16, ushort)
SET_MASK_ROWS("dflash2_set_mask_rows_bf16", BFloat16, ushort)

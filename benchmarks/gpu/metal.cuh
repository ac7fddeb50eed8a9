// What the shader uses of Metal's standard library, for CUDA. Everything is in `namespace shader`, so that these vector
// types do not meet CUDA's own of the same names.
#pragma once
#include <cstdint>

namespace shader {

using ::uint32_t;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;
static_assert(sizeof(ushort) == 2 && sizeof(uint) == 4 && sizeof(ulong) == 8, "Metal's sizes");

struct uint3 {
  uint x, y, z;
};

template <class T>
struct alignas(2 * sizeof(T)) vector2 {
  T x, y;
  vector2() = default;
  __device__ __forceinline__ explicit vector2(T every) : x(every), y(every) {}
  __device__ __forceinline__ vector2(T x, T y) : x(x), y(y) {}
  __device__ __forceinline__ T& operator[](uint i) { return (&x)[i]; }
  __device__ __forceinline__ T operator[](uint i) const { return (&x)[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vector4 {
  T x, y, z, w;
  vector4() = default;
  __device__ __forceinline__ explicit vector4(T every) : x(every), y(every), z(every), w(every) {}
  __device__ __forceinline__ vector4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  __device__ __forceinline__ T& operator[](uint i) { return (&x)[i]; }
  __device__ __forceinline__ T operator[](uint i) const { return (&x)[i]; }
};

typedef vector2<ushort> ushort2;
typedef vector4<ushort> ushort4;
typedef vector2<uint> uint2;
typedef vector4<uint> uint4;

template <class To, class From>
__device__ __forceinline__ To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

namespace metal {
template <class T>
__device__ __forceinline__ T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ T max(T a, T b) {
  return a > b ? a : b;
}
}  // namespace metal

}  // namespace shader

// Metal Shading Language on top of clang's C++: included ahead of a shader (see compile.py).
#pragma once
#pragma clang system_header
#include <cfloat>
#include <climits>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "msl_abi.h"

// Not instrumented. noinline, since an instrumented caller would instrument what it inlines.
#define MSL_PLAIN __attribute__((noinline, no_sanitize("coverage", "undefined")))

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace msl {
template <class T>
struct traits {
  using scalar = T;
  static constexpr int n = 1;
};
template <class T>
using scalar_t = typename traits<T>::scalar;
}  // namespace msl

// No vectors of 32 bytes (long4, ulong4): their accesses would go unchecked.
#define MSL_VECTOR(T, N)                              \
  typedef T T##N __attribute__((ext_vector_type(N))); \
  template <>                                         \
  struct msl::traits<T##N> {                          \
    using scalar = T;                                 \
    static constexpr int n = N;                       \
  };
#define MSL_VECTORS(T) MSL_VECTOR(T, 2) MSL_VECTOR(T, 3) MSL_VECTOR(T, 4)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
MSL_VECTOR(long, 2)
MSL_VECTOR(ulong, 2)

namespace msl {

// T4(...): zero, splat, conversion, or concatenation of scalars and vectors.
template <class V, class A>
inline int put(V& v, int i, A a) {
  if constexpr (traits<A>::n == 1) {
    v[i] = scalar_t<V>(a);
    return i + 1;
  } else {
    for (int k = 0; k < traits<A>::n; ++k) v[i + k] = scalar_t<V>(a[k]);
    return i + traits<A>::n;
  }
}
template <class V>
inline V make() {
  return V(0);
}
template <class V, class A>
inline V make(A a) {
  if constexpr (traits<A>::n == 1) {
    return V(scalar_t<V>(a));
  } else {
    static_assert(traits<A>::n == traits<V>::n, "vector constructor: wrong number of components");
    return __builtin_convertvector(a, V);
  }
}
template <class V, class A, class B, class... C>
inline V make(A a, B b, C... c) {
  static_assert(traits<A>::n + traits<B>::n + (traits<C>::n + ... + 0) == traits<V>::n,
                "vector constructor: wrong number of components");
  V v;
  int i = put(v, put(v, 0, a), b);
  ((i = put(v, i, c)), ...);
  return v;
}

// A built-in value, for a parameter of type uint, uint2, uint3, ushort, ...
struct index : msl_index {
  operator uint() const { return x; }
  operator uint2() const { return uint2{x, y}; }
  operator uint3() const { return uint3{x, y, z}; }
  operator ushort() const { return ushort(x); }
  operator ushort2() const { return ushort2{ushort(x), ushort(y)}; }
  operator ushort3() const { return ushort3{ushort(x), ushort(y), ushort(z)}; }
};
inline index value(msl_index i) {
  index r;
  r.x = i.x, r.y = i.y, r.z = i.z;
  return r;
}
inline index value(uint32_t i) { return value(msl_index{i, 0, 0}); }

// A buffer parameter: pointer or reference.
template <class P>
struct parameter;
template <class T>
struct parameter<T*> {
  static constexpr bool pointer = true, writable = !std::is_const<T>::value;
  static constexpr unsigned size = sizeof(T), align = alignof(T);
  static T* get(void* p) { return static_cast<T*>(p); }
};
template <class T>
struct parameter<T&> : parameter<T*> {
  static constexpr bool pointer = false;
  static T& get(void* p) { return *static_cast<T*>(p); }
};

}  // namespace msl

// Function-like, so that only `float4(` is a constructor call and `float4 x` stays a type.
#define char2(...) msl::make<char2>(__VA_ARGS__)
#define char3(...) msl::make<char3>(__VA_ARGS__)
#define char4(...) msl::make<char4>(__VA_ARGS__)
#define uchar2(...) msl::make<uchar2>(__VA_ARGS__)
#define uchar3(...) msl::make<uchar3>(__VA_ARGS__)
#define uchar4(...) msl::make<uchar4>(__VA_ARGS__)
#define short2(...) msl::make<short2>(__VA_ARGS__)
#define short3(...) msl::make<short3>(__VA_ARGS__)
#define short4(...) msl::make<short4>(__VA_ARGS__)
#define ushort2(...) msl::make<ushort2>(__VA_ARGS__)
#define ushort3(...) msl::make<ushort3>(__VA_ARGS__)
#define ushort4(...) msl::make<ushort4>(__VA_ARGS__)
#define int2(...) msl::make<int2>(__VA_ARGS__)
#define int3(...) msl::make<int3>(__VA_ARGS__)
#define int4(...) msl::make<int4>(__VA_ARGS__)
#define uint2(...) msl::make<uint2>(__VA_ARGS__)
#define uint3(...) msl::make<uint3>(__VA_ARGS__)
#define uint4(...) msl::make<uint4>(__VA_ARGS__)
#define long2(...) msl::make<long2>(__VA_ARGS__)
#define ulong2(...) msl::make<ulong2>(__VA_ARGS__)
#define half2(...) msl::make<half2>(__VA_ARGS__)
#define half3(...) msl::make<half3>(__VA_ARGS__)
#define half4(...) msl::make<half4>(__VA_ARGS__)
#define bfloat2(...) msl::make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) msl::make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) msl::make<bfloat4>(__VA_ARGS__)
#define float2(...) msl::make<float2>(__VA_ARGS__)
#define float3(...) msl::make<float3>(__VA_ARGS__)
#define float4(...) msl::make<float4>(__VA_ARGS__)

template <class To, class From>
inline To as_type(From f) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  To t;
  __builtin_memcpy(&t, &f, sizeof t);
  return t;
}

namespace metal {

using ::int8_t, ::int16_t, ::int32_t, ::int64_t, ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t;
using std::conditional_t, std::enable_if_t, std::integral_constant, std::is_same, std::numeric_limits;
template <class T, class U>
constexpr bool is_same_v = std::is_same<T, U>::value;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// Both arguments of one type, as in Metal, where a mixed call is ambiguous. Scalars only.
template <class T>
inline T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T max(T a, T b) {
  return a > b ? a : b;
}
template <class T>
inline T clamp(T x, T low, T high) {
  return x < low ? low : x > high ? high : x;
}
template <class T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }

}  // namespace metal

// Address spaces. MSL_STRICT: clang's own, for a syntax-only pass that finds type errors.
#ifdef MSL_STRICT
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#else
#define device
#define constant const
#endif
#define thread
#define kernel __attribute__((used, noinline))  // noinline: its body must stay instrumented
#pragma GCC poison double goto try catch throw typeid dynamic_cast

// What the stand-in looks for in the library.
#define MSL_HIDDEN extern "C" __attribute__((visibility("hidden")))
MSL_HIDDEN const char __ehdr_start[], _end[];
#ifdef MSL_COVERAGE
MSL_HIDDEN const char __start___llvm_prf_cnts[], __stop___llvm_prf_cnts[];
#define MSL_COUNTERS __start___llvm_prf_cnts, __stop___llvm_prf_cnts
#else
#define MSL_COUNTERS nullptr, nullptr
#endif
#define MSL_LIBRARY(KERNELS, COUNT)                 \
  extern "C" __attribute__((visibility("default"))) \
  const msl_library msl_lib = {KERNELS, COUNT, __ehdr_start, _end, MSL_COUNTERS}

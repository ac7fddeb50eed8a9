// What a compiled shader library and the stand-in know about each other.
#pragma once
#include <cstddef>
#include <cstdint>

struct msl_index {
  uint32_t x, y, z;
};
struct msl_thread {  // the built-in values of one thread
  msl_index thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  msl_index threads_per_grid, threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t threads_per_simdgroup, thread_execution_width, simdgroups_per_threadgroup;
};
struct msl_argument {
  const char* name;
  unsigned index;
  bool constant;  // in constant memory
  bool writable;
  bool pointer;  // or a reference, to exactly one element
  unsigned size, align;
};
struct msl_kernel {
  const char* name;
  const msl_argument* arguments;
  unsigned argument_count;
  void (*call)(void* const* buffers, const msl_thread* thread);
  unsigned max_threads;  // [[max_total_threads_per_threadgroup(n)]] or 0
};
struct msl_library {
  const msl_kernel* kernels;
  unsigned kernel_count;
  const char *image_begin, *image_end;        // the loaded library: its constants may be read
  const char *counters_begin, *counters_end;  // of the coverage build, or null
};

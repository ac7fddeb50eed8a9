// Runs one dispatch of a compiled kernel on the CPU, thread by thread, checking every memory access.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "msl_abi.h"

namespace metal_sim {

// The storage of an MTLBuffer: ends at an inaccessible page and starts out as 0xA5 bytes, or, above 256 MiB, as pages
// that take no memory until they are used, so that offsets beyond 32 bits can be tried.
class Memory {
 public:
  explicit Memory(size_t size);
  Memory(const Memory&) = delete;
  ~Memory();
  char* base() const { return base_; }
  size_t size() const { return size_; }

 private:
  char* base_;
  size_t size_;
  void* map_;
  size_t map_size_;
};

struct Binding {
  std::shared_ptr<Memory> memory;  // a buffer, retained as Metal's command buffers retain it, or
  std::string bytes;               // a copy made by setBytes
  size_t offset = 0;
  const char* data() const { return memory ? memory->base() : bytes.data(); }
  size_t size() const { return memory ? memory->size() : bytes.size(); }
  bool bound() const { return memory || !bytes.empty(); }
};

struct Dispatch {
  const msl_library* library;
  const msl_kernel* kernel;
  std::vector<Binding> buffers;  // by index
  msl_index grid, group;         // threads in all; threads a threadgroup
};

// Memory traffic of a kernel's argument while options().trace is on. One request is one instruction of the (up to 32)
// lanes of a SIMD group.
struct Traffic {
  int64_t requests, bytes;               // bytes: those that the threads asked for
  int64_t sectors, lines;                // 32-byte and 128-byte pieces touched, counted for every request
  int64_t unique_sectors, unique_lines;  // and counted once a dispatch, as if a cache held them all
};
std::map<std::string, Traffic>& traffic();  // by "kernel/argument"

void execute(const Dispatch&);

}  // namespace metal_sim

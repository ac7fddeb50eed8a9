#include "execute.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <set>
#include <tuple>
#include <unordered_map>

#include "sim.h"

namespace metal_sim {

Memory::Memory(size_t size) : size_(size) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t body = (size + 15) / 16 * 16, pages = (body + page - 1) / page * page;
  map_size_ = pages + 2 * page;
  map_ = mmap(nullptr, map_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) throw std::bad_alloc();
  char* first = static_cast<char*>(map_) + page;
  mprotect(first, pages, PROT_READ | PROT_WRITE);
  base_ = first + pages - body;
  if (size <= size_t(256) << 20) memset(base_, 0xA5, size);
}
Memory::~Memory() { munmap(map_, map_size_); }

std::map<std::string, Traffic>& traffic() {
  static auto* t = new std::map<std::string, Traffic>;
  return *t;
}

namespace {

// Who used an element in this dispatch: 1 + the number of the thread, or 0. Without barriers, any two threads are
// unordered.
struct Cell {
  uint32_t writer, reader;
  bool several_readers;
};

// The cells of a buffer: takes no memory until it is used.
struct Cells {
  Cell* all = nullptr;
  size_t bytes = 0;
  unsigned element = 0;

  void make(size_t buffer_size, unsigned element_size) {
    element = element_size;
    bytes = (buffer_size / element + 1) * sizeof(Cell);
    void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    all = static_cast<Cell*>(map);
  }
  ~Cells() {
    if (all) munmap(all, bytes);
  }
};

// Memory that the dispatch may touch.
struct Range {
  uintptr_t begin, end;
  bool writable;
  const msl_argument* argument;  // null: the shader library itself
  Cell* cells;                   // of the whole buffer, if this kernel writes it
  uintptr_t cells_begin;
  unsigned element;
};

struct Access {
  uint32_t simdgroup, nth;  // nth execution of the instruction by this thread
  const void* pc;
  uintptr_t address;
  size_t size;
  const msl_argument* argument;
};

struct Run {
  const Dispatch& dispatch;
  std::vector<Range> ranges;
  std::vector<void*> slots;
  std::unordered_map<Memory*, Cells> cells;
  const msl_thread* thread = nullptr;
  uint32_t thread_number = 0;
  uintptr_t stack_begin = 0, stack_end = 0;
  bool trace = options().trace;
  std::vector<Access> log;  // of the current threadgroup
  std::map<std::pair<uint32_t, const void*>, uint32_t> executions;
  std::map<std::string, std::set<uintptr_t>> sectors;

  explicit Run(const Dispatch& d);
  void run_threadgroup(msl_index group, msl_index groups, uint32_t first_thread);
  void count_traffic();
  void finish_traffic();
};
Run* current;  // dispatches run one at a time, see metal.mm

std::string source_line(const void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return "";
  char command[1024], line[512] = "";
  const auto offset = reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  snprintf(command, sizeof command, "addr2line -e '%s' %#zx 2>/dev/null", info.dli_fname, size_t(offset));
  if (FILE* pipe = popen(command, "r")) {
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    pclose(pipe);
  }
  std::string s(line, strcspn(line, " \n"));
  return s.empty() ? "" : " at " + s.substr(s.rfind('/') + 1);
}

[[noreturn]] void fault(const std::string& what, const void* pc) {
  const msl_index& p = current->thread->thread_position_in_grid;
  fail("kernel " + std::string(current->dispatch.kernel->name) + source_line(pc) + ": " + what + " (thread " +
       std::to_string(p.x) + "," + std::to_string(p.y) + "," + std::to_string(p.z) + ")");
}

void race_check(const Range& r, uintptr_t address, size_t size, bool store, const void* pc) {
  const uint32_t self = current->thread_number + 1;
  const size_t first = (address - r.cells_begin) / r.element, last = (address + size - 1 - r.cells_begin) / r.element;
  for (size_t i = first; i <= last; ++i) {
    Cell& c = r.cells[i];
    const bool written = c.writer && c.writer != self;
    const bool read = store && (c.several_readers || (c.reader && c.reader != self));
    if (written || read)
      fault(std::string(written ? store ? "write/write" : "read/write" : "write/read") + " race on " +
                r.argument->name + " byte " + std::to_string(address - r.begin) + " with thread #" +
                std::to_string((written ? c.writer : c.reader) - 1),
            pc);
    if (store) {
      c.writer = self;
    } else {
      c.several_readers |= c.reader && c.reader != self;
      c.reader = self;
    }
  }
}

[[noreturn]] __attribute__((noinline, cold)) void bad_access(uintptr_t address, size_t size, bool store, bool read_only,
                                                             const void* pc) {
  const Range* nearest = nullptr;
  uintptr_t best = UINTPTR_MAX;
  for (auto& r : current->ranges) {
    const uintptr_t distance = address < r.begin        ? r.begin - address
                               : address + size > r.end ? address + size - r.end
                                                        : 0;
    if (r.argument && distance < best) best = distance, nearest = &r;
  }
  if (read_only) fault("store to read-only " + std::string(best ? "memory" : nearest->argument->name), pc);
  std::string what = std::string(store ? "store" : "load") + " of " + std::to_string(size) + " bytes out of bounds";
  if (nearest)
    what += "; nearest is '" + std::string(nearest->argument->name) + "' at byte " +
            std::to_string(intptr_t(address - nearest->begin)) + " of " + std::to_string(nearest->end - nearest->begin);
  fault(what, pc);
}

inline void access(uintptr_t address, size_t size, bool store, const void* pc) {
  Run& run = *current;
  if (address >= run.stack_begin && address + size <= run.stack_end) return;
  if (address & (size - 1))
    fault(std::string("misaligned ") + (store ? "store" : "load") + " of " + std::to_string(size) + " bytes", pc);
  bool read_only = false;
  for (auto& r : run.ranges) {
    if (address < r.begin || address + size > r.end) continue;
    read_only = store && !r.writable;
    if (read_only) continue;  // the same memory may be bound twice
    if (r.cells) race_check(r, address, size, store, pc);
    if (run.trace && r.argument)
      run.log.push_back({run.thread->simdgroup_index_in_threadgroup, run.executions[{run.thread_number, pc}]++, pc,
                         address, size, r.argument});
    return;
  }
  bad_access(address, size, store, read_only, pc);
}

Run::Run(const Dispatch& d) : dispatch(d), slots(31) {
  const msl_kernel& k = *d.kernel;
  const auto arguments = std::vector<msl_argument>(k.arguments, k.arguments + k.argument_count);
  std::unordered_map<Memory*, unsigned> written;  // the buffers that the kernel may write: size of the smallest element
  for (auto& a : arguments)
    if (a.writable) written[d.buffers[a.index].memory.get()] = 16;
  for (auto& a : arguments) {
    auto w = written.find(d.buffers[a.index].memory.get());
    if (w != written.end()) w->second = std::min(w->second, a.align);
  }
  for (unsigned i = 0; i < k.argument_count; ++i) {
    const msl_argument& a = k.arguments[i];
    const Binding& b = d.buffers[a.index];
    const auto base = reinterpret_cast<uintptr_t>(b.data());
    Range r{base + b.offset, base + b.size(), a.writable, &a, nullptr, base, 0};
    auto w = written.find(b.memory.get());
    if (w != written.end()) {
      Cells& c = cells[b.memory.get()];
      if (!c.all) c.make(b.size(), w->second);
      r.cells = c.all;
      r.element = c.element;
    }
    slots[a.index] = const_cast<char*>(b.data()) + b.offset;
    ranges.push_back(r);
  }
  auto own = [&](const char* begin, const char* end, bool writable) {
    ranges.push_back(
        {reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end), writable, nullptr, nullptr, 0, 0});
  };
  own(d.library->image_begin, d.library->image_end, false);
  own(d.library->counters_begin, d.library->counters_end, true);
}

void Run::run_threadgroup(msl_index group, msl_index groups, uint32_t first_thread) {
  const msl_index grid = dispatch.grid, size = dispatch.group;
  const msl_index origin{group.x * size.x, group.y * size.y, group.z * size.z};
  const msl_index n{std::min(size.x, grid.x - origin.x), std::min(size.y, grid.y - origin.y),
                    std::min(size.z, grid.z - origin.z)};
  const uint32_t count = n.x * n.y * n.z;
  uint32_t t = 0;
  for (uint32_t z = 0; z < n.z; ++z)
    for (uint32_t y = 0; y < n.y; ++y)
      for (uint32_t x = 0; x < n.x; ++x, ++t) {
        const msl_thread self{.thread_position_in_grid = {origin.x + x, origin.y + y, origin.z + z},
                              .thread_position_in_threadgroup = {x, y, z},
                              .threadgroup_position_in_grid = group,
                              .threads_per_grid = grid,
                              .threads_per_threadgroup = n,
                              .dispatch_threads_per_threadgroup = size,
                              .threadgroups_per_grid = groups,
                              .thread_index_in_threadgroup = t,
                              .thread_index_in_simdgroup = t % 32,
                              .simdgroup_index_in_threadgroup = t / 32,
                              .threads_per_simdgroup = 32,
                              .thread_execution_width = 32,
                              .simdgroups_per_threadgroup = (count + 31) / 32};
        thread = &self;
        thread_number = first_thread + t;
        stack_end = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
        stack_begin = stack_end - (1 << 20);
        dispatch.kernel->call(slots.data(), &self);
      }
  if (trace) count_traffic();
}

void Run::count_traffic() {
  std::map<std::tuple<uint32_t, uint32_t, const void*>, std::vector<const Access*>> requests;
  for (auto& a : log) requests[{a.simdgroup, a.nth, a.pc}].push_back(&a);
  for (auto& [key, lanes] : requests) {
    const std::string name = std::string(dispatch.kernel->name) + "/" + lanes[0]->argument->name;
    std::set<uintptr_t> touched, lines;
    Traffic& t = traffic()[name];
    for (auto* a : lanes) {
      t.bytes += int64_t(a->size);
      for (uintptr_t s = a->address / 32; s <= (a->address + a->size - 1) / 32; ++s)
        touched.insert(s), lines.insert(s / 4);
    }
    ++t.requests;
    t.sectors += int64_t(touched.size());
    t.lines += int64_t(lines.size());
    sectors[name].merge(touched);
  }
  log.clear();
  executions.clear();
}

void Run::finish_traffic() {
  for (auto& [name, touched] : sectors) {
    std::set<uintptr_t> lines;
    for (uintptr_t s : touched) lines.insert(s / 4);
    traffic()[name].unique_sectors += int64_t(touched.size());
    traffic()[name].unique_lines += int64_t(lines.size());
  }
}

}  // namespace

void execute(const Dispatch& d) {
  Run run(d);
  struct Restore {
    ~Restore() { current = nullptr; }
  } restore;
  current = &run;
  auto ceil_div = [](uint32_t a, uint32_t b) { return a / b + (a % b != 0); };
  const msl_index groups{ceil_div(d.grid.x, d.group.x), ceil_div(d.grid.y, d.group.y), ceil_div(d.grid.z, d.group.z)};
  uint32_t first_thread = 0;
  for (uint32_t z = 0; z < groups.z; ++z)
    for (uint32_t y = 0; y < groups.y; ++y)
      for (uint32_t x = 0; x < groups.x; ++x, first_thread += d.group.x * d.group.y * d.group.z)
        run.run_threadgroup({x, y, z}, groups, first_thread);
  run.finish_traffic();
}

}  // namespace metal_sim

// What clang's instrumentation calls: -fsanitize-coverage=trace-loads,trace-stores and -fsanitize-minimal-runtime.
using namespace metal_sim;
#define PC __builtin_return_address(0)
extern "C" {
#define ACCESS(N)                                                                                       \
  void __sanitizer_cov_load##N(const void* p) { access(reinterpret_cast<uintptr_t>(p), N, false, PC); } \
  void __sanitizer_cov_store##N(const void* p) { access(reinterpret_cast<uintptr_t>(p), N, true, PC); }
#define UNDEFINED(NAME, TEXT) \
  void __ubsan_handle_##NAME##_minimal_abort() { fault(TEXT, PC); }
// clang-format off
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
UNDEFINED(divrem_overflow, "integer division by zero or overflow")
UNDEFINED(shift_out_of_bounds, "shift by a negative or too large amount")
UNDEFINED(add_overflow, "signed integer overflow in +")
UNDEFINED(sub_overflow, "signed integer overflow in -")
UNDEFINED(mul_overflow, "signed integer overflow in *")
UNDEFINED(negate_overflow, "signed integer overflow in negation")
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(builtin_unreachable, "unreachable code reached")
UNDEFINED(float_cast_overflow, "float value does not fit the integer type")
// clang-format on
}

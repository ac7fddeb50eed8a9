// What every part of the stand-in shares: faults, settings, counters, failures on request.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace metal_sim {

// A mistake that Metal's validation layers report by ending the process, or that a Mac does not report at all.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] inline void fail(const std::string& what) { throw Fault("Metal validation: " + what); }

// Settings: first from METAL_SIM_<NAME>, later by set_option().
//   validate     1: a dispatch that a Mac would drop in silence is a fault; 0: it is dropped in silence
//   max_threads  what pipelines say about maxTotalThreadsPerThreadgroup
//   checks       1: shaders compiled with every access checked; 0: compiled for speed, nothing checked
//   coverage     1: shaders compiled for llvm-cov
//   eager        1: commands run when committed, not when somebody waits
//   trace        1: memory traffic and dispatches are recorded
#define METAL_SIM_OPTIONS(X) X(validate, 1) X(max_threads, 1024) X(checks, 1) X(coverage, 0) X(eager, 0) X(trace, 0)
struct Options {
#define X(name, value) std::atomic<int64_t> name{value};
  METAL_SIM_OPTIONS(X)
#undef X
  Options();
};
Options& options();
int64_t set_option(const std::string& name, int64_t value);  // the value so far

// Counts since the start, of what host code did. queue_blocks, torch_commands and fallbacks are also, or only, of
// torch's own operators; their copies and waits on behalf of a CPU fallback do not count.
// clang-format off
#define METAL_SIM_COUNTERS(X)                                                                         \
  X(devices) X(libraries) X(functions) X(pipelines) X(queue_blocks) X(command_buffers) X(encoders)    \
  X(dispatches) X(dropped_dispatches) X(commits) X(waits) X(torch_commands) X(fallbacks)
// clang-format on
struct Counters {
#define X(name) std::atomic<int64_t> name{0};
  METAL_SIM_COUNTERS(X)
#undef X
};
Counters& counters();
std::map<std::string, int64_t> read_counters();  // these, and live_objects: Objective-C objects that exist

// The next `times` requests for a device, library, function, pipeline, command_buffer or encoder fail; first from
// METAL_SIM_FAIL, a comma-separated list (each for ever).
void fail_next(const std::string& what, int64_t times);
bool must_fail(const char* what);

// Where the stand-in itself asks to be told.
extern void (*queue_block_ended)(const void* queue, bool faulted);  // a dispatch_sync block of this queue returned

}  // namespace metal_sim

extern "C" {
int64_t objc_live_objects(const char* class_name);  // nullptr: of every class
bool dispatch_queue_owned(const void* queue);       // runs a block of this queue on the calling thread?
}

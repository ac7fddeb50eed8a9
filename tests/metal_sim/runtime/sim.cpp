#include "sim.h"

#include <cstdlib>
#include <mutex>

namespace metal_sim {
namespace {

const std::pair<const char*, std::atomic<int64_t> Options::*> kOptions[] = {
#define X(name, value) {#name, &Options::name},
    METAL_SIM_OPTIONS(X)
#undef X
};
const std::pair<const char*, std::atomic<int64_t> Counters::*> kCounters[] = {
#define X(name) {#name, &Counters::name},
    METAL_SIM_COUNTERS(X)
#undef X
};

constexpr int64_t kForEver = INT64_MAX;

struct Failures {
  std::mutex mutex;
  std::map<std::string, int64_t> left;

  Failures() {
    for (const char* what : {"device", "library", "function", "pipeline", "command_buffer", "encoder"}) left[what] = 0;
    std::string list = getenv("METAL_SIM_FAIL") ? getenv("METAL_SIM_FAIL") : "";
    for (size_t from = 0, to; from < list.size(); from = to + 1) {
      to = std::min(list.find(',', from), list.size());
      entry(list.substr(from, to - from)) = kForEver;
    }
  }
  int64_t& entry(const std::string& what) {
    auto it = left.find(what);
    if (it == left.end()) throw std::invalid_argument("metal_sim: nothing called '" + what + "' can be made to fail");
    return it->second;
  }
};
Failures& failures() {
  static auto* f = new Failures;
  return *f;
}

}  // namespace

void (*queue_block_ended)(const void*, bool);

Options::Options() {
  for (auto [name, member] : kOptions) {
    std::string variable = std::string("METAL_SIM_") + name;
    for (char& c : variable) c = char(toupper(c));
    if (const char* value = getenv(variable.c_str())) this->*member = atoll(value);
  }
}
Options& options() {
  static auto* o = new Options;
  return *o;
}
int64_t set_option(const std::string& name, int64_t value) {
  for (auto [known, member] : kOptions)
    if (name == known) return (options().*member).exchange(value);
  throw std::invalid_argument("metal_sim: no option '" + name + "'");
}

Counters& counters() {
  static auto* c = new Counters;
  return *c;
}
std::map<std::string, int64_t> read_counters() {
  std::map<std::string, int64_t> all;
  for (auto [name, member] : kCounters) all[name] = counters().*member;
  all["live_objects"] = objc_live_objects(nullptr);
  all["live_buffers"] = objc_live_objects("SimBuffer");
  return all;
}

void fail_next(const std::string& what, int64_t times) {
  std::lock_guard lock(failures().mutex);
  failures().entry(what) = times;
}
bool must_fail(const char* what) {
  std::lock_guard lock(failures().mutex);
  int64_t& left = failures().entry(what);
  if (left > 0 && left != kForEver) return left-- > 0;
  return left > 0;
}

}  // namespace metal_sim

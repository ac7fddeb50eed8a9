// Metal's compute API on the CPU (compiled with ARC). Commands run only when somebody waits for them.
#import <Metal/Metal.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "foundation_private.h"
#include "metal_private.h"
#include "sim.h"

using metal_sim::counters;
using metal_sim::fail;
using metal_sim::must_fail;
using metal_sim::options;

static std::string str(NSString* s) { return s ? [s UTF8String] : ""; }
static NSString* ns(const std::string& s) { return [NSString stringWithUTF8String:s.c_str()]; }
static std::string num(size_t n) { return std::to_string(n); }
static bool give_error(NSError* __autoreleasing* error, NSString* domain, NSInteger code, const std::string& text) {
  if (error) *error = [NSError errorInDomain:domain code:code text:ns(text)];
  return false;
}
NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

static std::mutex gpu;  // one command at a time
static std::atomic<size_t> allocated_bytes;

namespace metal_sim {
size_t allocated() { return allocated_bytes; }
std::vector<std::string>& dispatches() {
  static auto* d = new std::vector<std::string>;
  return *d;
}
std::vector<std::string>& warnings() {
  static auto* w = new std::vector<std::string>;
  return *w;
}
}  // namespace metal_sim

// ---------------------------------------------------------------- buffers
@implementation SimBuffer
@synthesize label;
+ (SimBuffer*)newWithLength:(size_t)length {
  SimBuffer* b = [SimBuffer new];
  b->memory = std::make_shared<metal_sim::Memory>(length);
  allocated_bytes += length;
  return b;
}
- (void)dealloc {
  allocated_bytes -= memory->size();
}
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (NSUInteger)length {
  return memory->size();
}
- (void*)contents {
  return memory->base();
}
@end

// ---------------------------------------------------------------- libraries
@implementation MTLCompileOptions
@synthesize fastMathEnabled, mathMode, languageVersion;
@end

@interface SimLibrary : NSObject <MTLLibrary> {
 @public
  const msl_library* library;
}
@end
@interface SimFunction : NSObject <MTLFunction> {
 @public
  SimLibrary* owner;
  const msl_kernel* kernel;
}
@end
@interface SimPipeline : NSObject <MTLComputePipelineState> {
 @public
  SimFunction* function;
}
@end

@implementation SimLibrary
@synthesize label;
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  ++counters().functions;
  if (must_fail("function")) return nil;
  for (unsigned i = 0; i < library->kernel_count; ++i) {
    if (str(name) != library->kernels[i].name) continue;
    SimFunction* f = [SimFunction new];
    f->owner = self;
    f->kernel = &library->kernels[i];
    return f;
  }
  return nil;
}
@end
@implementation SimFunction
@synthesize label;
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (NSString*)name {
  return ns(kernel->name);
}
@end
@implementation SimPipeline
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (NSString*)label {
  return nil;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  const auto limit = NSUInteger(options().max_threads);
  const NSUInteger declared = function->kernel->max_threads;
  return declared && declared < limit ? declared : limit;
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
@end

namespace {

struct Compiled {
  std::string path;      // of the shared library; empty: failed
  std::string messages;  // the compiler's
};

std::string contents(const std::string& path) {
  std::stringstream s;
  s << std::ifstream(path).rdbuf();
  return s.str();
}

// Runs msl/compile.py, unless this text was compiled before (by any process).
Compiled compile(const std::string& source) {
  const char *compiler = getenv("METAL_SIM_COMPILER"), *cache = getenv("METAL_SIM_CACHE");
  if (!compiler || !cache) return {"", "METAL_SIM_COMPILER and METAL_SIM_CACHE are not set (see metal_sim.load)"};
  std::string flags;
  if (!options().checks) flags += " --fast";
  if (options().coverage) flags += " --coverage";
  uint64_t h1 = 14695981039346656037u, h2 = 7;
  for (unsigned char c : source + flags) h1 = (h1 ^ c) * 1099511628211u, h2 = (h2 + c) * 6364136223846793005u + 1;
  char name[34];
  snprintf(name, sizeof name, "/%016zx%016zx", size_t(h1), size_t(h2));
  const std::string folder = std::string(cache) + name, library = folder + "/library.so";
  if (!access(library.c_str(), R_OK)) return {library, contents(folder + "/warnings.txt")};
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&compile), &self);
  static std::atomic<size_t> nth;
  const std::string unique = folder + "." + num(size_t(getpid())) + "." + num(++nth), input = unique + ".metal",
                    log = unique + ".log";
  std::ofstream(input) << source;
  const std::string command = std::string(compiler) + " '" + folder + "' --link '" + self.dli_fname + "'" + flags +
                              " < '" + input + "' > '" + log + "' 2>&1";
  const int status = system(command.c_str());
  std::string messages = contents(log);
  unlink(input.c_str());
  unlink(log.c_str());
  return {status ? "" : library, messages};
}

}  // namespace

// ---------------------------------------------------------------- device
@interface SimDevice : NSObject <MTLDevice>
@end
@implementation SimDevice
- (NSString*)name {
  return @"Simulated Apple GPU";
}
- (id<MTLCommandQueue>)newCommandQueue {
  return [SimCommandQueue new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)n options:(MTLResourceOptions)resource_options {
  (void)resource_options;
  if (!n) fail("newBufferWithLength: 0");
  return [SimBuffer newWithLength:n];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)compile_options
                                 error:(NSError* __autoreleasing*)error {
  ++counters().libraries;
  if (compile_options && compile_options.languageVersion && compile_options.languageVersion < MTLLanguageVersion3_1)
    fail("the stand-in compiles Metal 3.1 and newer");
  Compiled c = must_fail("library") ? Compiled{"", "failed on request"} : compile(str(source));
  void* handle = c.path.empty() ? nullptr : dlopen(c.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    if (!c.path.empty()) c.messages = dlerror();
    give_error(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, "program_source: " + c.messages);
    return nil;
  }
  if (!c.messages.empty()) {  // Metal sets the error for warnings too
    metal_sim::warnings().push_back(c.messages);
    give_error(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileWarning, "program_source: " + c.messages);
  }
  if (const char* used = getenv("METAL_SIM_USED")) std::ofstream(used, std::ios::app) << c.path + "\n";
  SimLibrary* l = [SimLibrary new];
  l->library = static_cast<const msl_library*>(dlsym(handle, "msl_lib"));
  return l;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError* __autoreleasing*)error {
  if (!function) fail("newComputePipelineStateWithFunction: the function is nil");
  ++counters().pipelines;
  if (must_fail("pipeline")) {
    give_error(error, @"AGXMetalSim", 3, "failed on request");
    return nil;
  }
  SimPipeline* p = [SimPipeline new];
  p->function = (SimFunction*)function;
  return p;
}
@end

id<MTLDevice> metal_sim::the_device() {
  static SimDevice* d = [SimDevice new];
  return d;
}
id<MTLDevice> MTLCreateSystemDefaultDevice() {
  ++counters().devices;
  return must_fail("device") ? nil : metal_sim::the_device();
}

// ---------------------------------------------------------------- command buffers
@interface SimEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  SimCommandBuffer* buffer;
  bool ended;
  SimPipeline* pipeline;
  std::vector<metal_sim::Binding> slots;
  std::vector<bool> stale;  // bound before the last dispatch
}
@end

@implementation SimCommandQueue
@synthesize label;
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (id<MTLCommandBuffer>)commandBuffer {
  SimCommandBuffer* b = [SimCommandBuffer new];
  b->queue = self;
  return b;
}
- (void)run {
  std::lock_guard lock(gpu);
  while (!committed.empty()) {
    SimCommandBuffer* b = committed.front();
    committed.pop_front();
    [b execute];
  }
}
@end

@implementation SimCommandBuffer
@synthesize label, status, error;
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (id<MTLCommandQueue>)commandQueue {
  return queue;
}
- (void)requireOwner:(const char*)what {
  if (queue->owner && !dispatch_queue_owned(queue->owner))
    fail(std::string(what) + " outside a dispatch_sync block of torch::mps::get_dispatch_queue()");
}
- (void)requireNoEncoder {
  if (status >= MTLCommandBufferStatusCommitted) fail("encoding into a command buffer that has been committed");
  if (open || open_is_torchs) fail("a command encoder is already encoding to this command buffer");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  [self requireOwner:"computeCommandEncoder"];
  [self requireNoEncoder];
  if (must_fail("encoder")) return nil;
  ++counters().encoders;
  SimEncoder* e = [SimEncoder new];
  e->buffer = self;
  e->slots.resize(31);
  e->stale.resize(31);
  open = e;
  return e;
}
- (void)beginTorchs {
  if (open_is_torchs) return;
  [self requireNoEncoder];
  open_is_torchs = true;
}
- (void)endTorchs {
  open_is_torchs = false;
}
- (void)abandon {
  open = nil;
  commands.clear();
}
- (void)commit {
  if (open || open_is_torchs)
    fail("commit of a command buffer with an encoder that has not ended (endEncoding missing)");
  if (status >= MTLCommandBufferStatusCommitted) fail("commit of a command buffer that has been committed");
  status = MTLCommandBufferStatusCommitted;
  queue->committed.push_back(self);
  if (options().eager) [queue run];
}
- (void)execute {
  std::string what;
  try {
    for (auto& c : commands) c();
  } catch (const std::exception& e) {
    what = e.what();
  }
  commands.clear();
  status = what.empty() ? MTLCommandBufferStatusCompleted : MTLCommandBufferStatusError;
  if (what.empty()) return;
  error = [NSError errorInDomain:@"MTLCommandBufferErrorDomain" code:1 text:ns(what)];
  throw metal_sim::Fault(what);
}
- (void)waitUntilCompleted {
  if (status < MTLCommandBufferStatusCommitted) fail("waitUntilCompleted before commit (waits for ever)");
  ++counters().waits;
  [queue run];
}
@end

@implementation SimEncoder
@synthesize label;
- (id<MTLDevice>)device {
  return metal_sim::the_device();
}
- (void)requireOpen {
  [buffer requireOwner:"a command is encoded"];
  if (ended) fail("a command is encoded after endEncoding");
}
- (void)endEncoding {
  if (ended) fail("endEncoding called twice");
  ended = true;
  buffer->open = nil;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self requireOpen];
  if (!state) fail("setComputePipelineState: nil");
  pipeline = (SimPipeline*)state;
}
- (void)bind:(metal_sim::Binding)binding at:(NSUInteger)index {
  [self requireOpen];
  if (index > 30) fail("buffer index " + num(index) + " is above 30");
  slots[index] = std::move(binding);
  stale[index] = false;
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)n atIndex:(NSUInteger)index {
  if (!bytes || !n || n > 4096) fail("setBytes: length " + num(n) + " is not in 1..4096");
  metal_sim::Binding b;
  b.bytes.assign(static_cast<const char*>(bytes), n);
  [self bind:b at:index];
}
- (void)setBuffer:(id<MTLBuffer>)buffer_or_nil offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  metal_sim::Binding b;
  if (buffer_or_nil) {
    if (![buffer_or_nil isKindOfClass:[SimBuffer class]]) fail("setBuffer: not an MTLBuffer");
    b.memory = ((SimBuffer*)buffer_or_nil)->memory;
    b.offset = offset;
    if (offset >= b.size())
      fail("setBuffer: offset " + num(offset) + " is not below the buffer's length " + num(b.size()) + " (index " +
           num(index) + ")");
  }
  [self bind:b at:index];
}
// Mistakes that are mistakes whatever the settings.
- (void)checkArgument:(const msl_argument&)a of:(const std::string&)at {
  const metal_sim::Binding& b = slots[a.index];
  const std::string name = at + "argument " + a.name + " (buffer " + num(a.index) + ") ";
  if (!b.bound()) fail(name + "has no buffer bound");
  if (stale[a.index]) fail(name + "has the binding of an earlier dispatch");
  if (!b.memory && a.writable) fail(name + "is writable but bound with setBytes");
  const size_t room = b.size() - b.offset;
  if (room < a.size || (!b.memory && !a.pointer && room != a.size))
    fail(name + "has " + num(room) + " bytes bound, but its type needs " + num(a.size));
  if (b.offset % a.align)
    fail(name + "has offset " + num(b.offset) + ", not a multiple of its type's alignment " + num(a.align));
}
// Mistakes that make a Mac without its validation layer drop the dispatch.
- (std::string)dropReasonForGrid:(MTLSize)g group:(MTLSize)t {
  const NSUInteger limit = [pipeline maxTotalThreadsPerThreadgroup];
  if (!g.width || !g.height || !g.depth) return "the grid is empty";
  if (!t.width || !t.height || !t.depth) return "the threadgroup is empty";
  if (t.width > limit || t.height > limit || t.depth > limit || t.width * t.height * t.depth > limit)
    return num(t.width) + "x" + num(t.height) + "x" + num(t.depth) + " threads per threadgroup, at most " + num(limit) +
           " are possible";
  return "";
}
- (void)dispatchThreads:(MTLSize)g threadsPerThreadgroup:(MTLSize)t {
  [self requireOpen];
  if (!pipeline) fail("dispatch without a compute pipeline state");
  const msl_kernel* k = pipeline->function->kernel;
  const std::string at = std::string("dispatch of ") + k->name + ": ";
  const std::string reason = [self dropReasonForGrid:g group:t];
  if (!reason.empty()) {
    if (options().validate) fail(at + reason);
    ++counters().dropped_dispatches;
    return;
  }
  if (g.width >> 32 || g.height >> 32 || g.depth >> 32) fail(at + "the grid does not fit 32 bits");
  for (unsigned i = 0; i < k->argument_count; ++i) [self checkArgument:k->arguments[i] of:at];
  stale.assign(31, true);
  ++counters().dispatches;
  auto triple = [](MTLSize s) { return num(s.width) + "," + num(s.height) + "," + num(s.depth); };
  if (options().trace) metal_sim::dispatches().push_back(std::string(k->name) + " " + triple(g) + " " + triple(t));
  auto index = [](MTLSize s) { return msl_index{uint32_t(s.width), uint32_t(s.height), uint32_t(s.depth)}; };
  SimPipeline* keep = pipeline;
  metal_sim::Dispatch d{keep->function->owner->library, k, slots, index(g), index(t)};
  buffer->commands.push_back([d, keep] {
    (void)keep;
    metal_sim::execute(d);
  });
}
- (void)dispatchThreadgroups:(MTLSize)n threadsPerThreadgroup:(MTLSize)t {
  [self dispatchThreads:MTLSizeMake(n.width * t.width, n.height * t.height, n.depth * t.depth) threadsPerThreadgroup:t];
}
@end

// The device "mps" for a Linux CPU build of torch: hooks, allocator, stream, and the operators that cannot fall back to
// the CPU. As in torch on a Mac, a storage's data pointer is an id<MTLBuffer>. Load it before anything asks about MPS.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#import <Metal/Metal.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <functional>
#include <limits>

#include "metal_private.h"
#include "sim.h"

namespace {

using c10::DeviceType;
using metal_sim::counters;
const c10::Device kDevice(DeviceType::MPS, 0);

// ---------------------------------------------------------------- stream
thread_local int falling_back;  // a CPU fallback copies its arguments: that is ours, no Mac would wait

class Stream {
 public:
  Stream() {
    queue_->owner = (__bridge void*)serial_;
    metal_sim::queue_block_ended = [](const void* queue, bool faulted) {
      if (queue == (__bridge void*)instance().serial_) instance().block_ended(faulted);
    };
  }
  static Stream& instance() {
    static auto* s = new Stream;
    return *s;
  }
  dispatch_queue_t serial() const { return serial_; }

  // For an extension.
  SimCommandBuffer* command_buffer() {
    if (!dispatch_queue_owned((__bridge void*)serial_))
      metal_sim::fail(
          "torch::mps::get_command_buffer() outside a dispatch_sync block of torch::mps::get_dispatch_queue()");
    ++counters().command_buffers;
    if (metal_sim::must_fail("command_buffer")) return nil;
    [current() endTorchs];
    return current();
  }
  void commit() {
    ++counters().commits;
    on_queue(^{
      commit_current();
    });
  }
  void synchronize() {
    if (!falling_back) ++counters().waits, ++counters().commits;
    on_queue(^{
      commit_current();
      [queue_ run];
    });
  }
  // An operator of torch's own: runs later, in order with the other commands. On a Mac too, its encoder stays open.
  void enqueue(const std::function<void()>& f) {
    ++counters().torch_commands;
    @autoreleasepool {
      dispatch_sync(serial_, ^{
        [current() beginTorchs];
        current()->commands.push_back(f);
      });
    }
  }
  // After a fault: forget what has not run.
  void reset() {
    on_queue(^{
      [current_ abandon];
      current_ = nil;
      queue_->committed.clear();
    });
  }

 private:
  SimCommandBuffer* current() {
    if (!current_) current_ = (SimCommandBuffer*)[queue_ commandBuffer];
    return current_;
  }
  void commit_current() {
    SimCommandBuffer* b = current();
    current_ = nil;
    [b endTorchs];
    [b commit];
  }
  void on_queue(dispatch_block_t block) {
    @autoreleasepool {
      if (dispatch_queue_owned((__bridge void*)serial_)) {
        block();
      } else {
        dispatch_sync(serial_, block);
      }
    }
  }
  void block_ended(bool faulted) {
    ++counters().queue_blocks;
    const bool open = current_ && current_->open;
    if (open) current_->open = nil;  // after a fault, the next block starts clean
    if (open && !faulted) metal_sim::fail("a dispatch_sync block left an encoder open (endEncoding missing)");
  }

  SimCommandQueue* queue_ = (SimCommandQueue*)[metal_sim::the_device() newCommandQueue];
  dispatch_queue_t serial_ = dispatch_queue_create("metal gpu stream", DISPATCH_QUEUE_SERIAL);
  SimCommandBuffer* current_ = nil;
};
Stream& stream() { return Stream::instance(); }

// ---------------------------------------------------------------- allocator
struct Allocator final : c10::Allocator {
  static void release(void* p) {
    if (p) (void)(__bridge_transfer id)p;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? (__bridge_retained void*)[SimBuffer newWithLength:n] : nullptr;
    return {p, p, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    stream().synchronize();
    memcpy([(__bridge SimBuffer*)to contents], [(__bridge SimBuffer*)const_cast<void*>(from) contents], n);
  }
};
Allocator& allocator() {
  static Allocator a;
  return a;
}
[[maybe_unused]] const bool allocator_is_set = (c10::SetAllocator(DeviceType::MPS, &allocator()), true);

// ---------------------------------------------------------------- guard and hooks
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::MPS> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
  void synchronizeDevice(const c10::DeviceIndex) const override { stream().synchronize(); }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard)

struct MPSHooks final : at::MPSHooksInterface {
  MPSHooks() = default;
  explicit MPSHooks(const at::MPSHooksArgs&) {}  // torch 2.10 asks for it
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned) const override { return major <= 15; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator g = at::detail::createCPUGenerator();
    return g;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getMPSDeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize() const override { stream().synchronize(); }
  void commitStream() const override { stream().commit(); }
  void* getCommandBuffer() const override { return (__bridge void*)stream().command_buffer(); }
  void* getDispatchQueue() const override { return (__bridge void*)stream().serial(); }
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return metal_sim::allocated(); }
  size_t getDriverAllocatedMemory() const override { return metal_sim::allocated(); }
  size_t getRecommendedMaxMemory() const override { return size_t(1) << 34; }
  void setMemoryFraction(double) const override {}
};

}  // namespace
namespace at {
REGISTER_MPS_HOOKS(MPSHooks)
}

// ---------------------------------------------------------------- operators
namespace {

// A CPU tensor over the memory of an MPS tensor; keeps the memory, not the tensor.
struct Alias {
  std::shared_ptr<metal_sim::Memory> memory;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  bool conj, neg;
  explicit Alias(const at::Tensor& t)
      : sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        offset(t.storage_offset() * int64_t(t.element_size())),
        dtype(t.scalar_type()),
        conj(t.is_conj()),
        neg(t.is_neg()) {
    if (const void* p = t.storage().data()) memory = ((__bridge SimBuffer*)const_cast<void*>(p))->memory;
  }
  at::Tensor tensor() const {
    char* data = memory ? memory->base() + offset : nullptr;
    at::Tensor t = at::for_blob(data, sizes)
                       .strides(strides)
                       .options(at::TensorOptions().dtype(dtype))
                       .target_device(at::kCPU)
                       .make_tensor();
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    return t;
  }
};

// Commands run at any time, also inside somebody's dispatch mode or grad mode: keep those out.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
};
template <class F>
void later(F f) {
  stream().enqueue([f] {
    Plain plain;
    f();
  });
}

at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  const auto t = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(t != at::kDouble && t != at::kComplexDouble, "the MPS device has no float64");
  return t;
}
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS), checked(dtype),
                                   format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS),
                                           checked(dtype));
}
at::Tensor& copy_(at::Tensor& to, const at::Tensor& source, bool) {
  if (to.numel() == 0) return to;
  const at::Tensor from = source.expand_as(to);
  if (from.is_mps() && to.is_mps()) {
    later([a = Alias(from), b = Alias(to)] { b.tensor().copy_(a.tensor()); });
    return to;
  }
  stream().synchronize();
  Plain plain;
  (to.is_mps() ? Alias(to).tensor() : to).copy_(from.is_mps() ? Alias(from).tensor() : from);
  return to;
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  at::Tensor t = to;
  return copy_(t, source, non_blocking);
}
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t need =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), size_t(self.storage_offset()));
  const c10::Storage& storage = self.storage();
  if (need > storage.nbytes()) {
    c10::DataPtr grown = allocator().allocate(need);
    if (storage.nbytes()) allocator().copy_data(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  if (to.sizes() != source.sizes()) resize_(to, source.sizes(), std::nullopt);
  return copy_from(source, to, false);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}
at::Tensor& set_source(at::Tensor& t, at::Storage storage) {
  const int64_t n = int64_t(storage.nbytes() / t.element_size());
  return set_storage(t, std::move(storage), 0, n, {});
}
at::Tensor& fill(at::Tensor& t, const at::Scalar& value) {
  if (t.numel()) later([a = Alias(t), value] { a.tensor().fill_(value); });
  return t;
}
at::Tensor& zero(at::Tensor& t) { return fill(t, 0); }
at::Scalar item(const at::Tensor& t) {
  stream().synchronize();
  Plain plain;
  return at::native::_local_scalar_dense_cpu(Alias(t).tensor());
}
// The composite kernel asks a dispatch stub that a CPU build has not for MPS.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool gqa) {
  std::optional<at::Tensor> bias = mask;
  if (mask && mask->scalar_type() == at::kBool) {  // true: may attend; the kernel below would add it as a number
    const double hidden = -std::numeric_limits<double>::infinity();
    bias = q.new_zeros(mask->sizes()).masked_fill_(mask->logical_not(), hidden);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
}

// Does this call make the host of a Mac wait for its result: a shape or a value that only the device knows?
bool reads_back(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.operator_name().name;
  if (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_") {  // only with masks
    for (auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
      if (!argument.isOptionalTensorList()) continue;
      for (const std::optional<at::Tensor>& i : argument.toOptionalTensorList())
        if (i && i->defined() && (i->scalar_type() == at::kBool || i->scalar_type() == at::kByte)) return true;
    }
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++counters().fallbacks;
  if (!falling_back && reads_back(op, *stack)) ++counters().waits;
  struct Mark {
    Mark() { ++falling_back; }
    ~Mark() { --falling_back; }
  } mark;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("_local_scalar_dense", item);
  m.impl("scaled_dot_product_attention", attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", attention); }
TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// ---------------------------------------------------------------- what tests ask and set (see metal_sim/__init__.py)
TORCH_LIBRARY(metal_sim, m) {
  m.def("counters() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> all;
    for (auto& [name, n] : metal_sim::read_counters()) all.insert(name, n);
    return all;
  });
  m.def("traffic() -> Dict(str, int[])", [] {
    c10::Dict<std::string, c10::List<int64_t>> all;
    for (auto& [name, t] : metal_sim::traffic())
      all.insert(name, c10::List<int64_t>({t.requests, t.bytes, t.sectors, t.lines, t.unique_sectors, t.unique_lines}));
    return all;
  });
  m.def("dispatches() -> str[]", [] { return c10::List<std::string>(metal_sim::dispatches()); });
  m.def("warnings() -> str[]", [] { return c10::List<std::string>(metal_sim::warnings()); });
  m.def("set_option(str name, int value) -> int", [](const std::string& name, int64_t value) {
    if (name == "trace" && value) metal_sim::traffic().clear(), metal_sim::dispatches().clear();
    return metal_sim::set_option(name, value);
  });
  m.def("fail_next(str what, int times) -> ()", &metal_sim::fail_next);
  m.def("reset() -> ()", [] { stream().reset(); });
}

// The kernels on mps: each operator encodes one dispatch of the shader onto PyTorch's own command buffer.
//
// Nothing here waits for the GPU or commits: PyTorch flushes its command buffer when it must, in order with its own
// kernels.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <torch/mps.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <string>
#include <unordered_map>

#include "../shaders/params.h"
#include "operators.h"

namespace dflash2 {
namespace {

constexpr const char* kShader =
#include "dflash2_metal.inc"
    ;
constexpr NSUInteger kMaxGroup = 256;
constexpr int64_t kVectorBytes = 16, kVectorElements = 8;

std::string reason(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no reason given"; }

// The shader's pipelines by kernel name: made at first use, kept until the process ends. They are never destroyed,
// because at exit Metal may be gone before they are.
class Pipelines {
 public:
  static Pipelines& instance() {
    static Pipelines* pipelines = new Pipelines;
    return *pipelines;
  }

  id<MTLComputePipelineState> get(const std::string& kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pipelines_.find(kernel);
    if (found != pipelines_.end()) return found->second;

    NSError* error = nil;
    if (library_ == nil) compile();
    id<MTLFunction> function = [library_ newFunctionWithName:[NSString stringWithUTF8String:kernel.c_str()]];
    TORCH_CHECK(function != nil, "dflash2: the Metal library has no kernel ", kernel);
    id<MTLComputePipelineState> pipeline = [[library_ device] newComputePipelineStateWithFunction:function
                                                                                            error:&error];
    TORCH_CHECK(pipeline != nil, "dflash2: Metal made no pipeline of ", kernel, ": ", reason(error));
    return pipelines_.emplace(kernel, pipeline).first->second;
  }

 private:
  void compile() {
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    TORCH_CHECK(device != nil, "dflash2: this machine has no Metal device");
    MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
    options.languageVersion = MTLLanguageVersion3_1;
    NSError* error = nil;
    library_ = [device newLibraryWithSource:[NSString stringWithUTF8String:kShader] options:options error:&error];
    TORCH_CHECK(library_ != nil, "dflash2: Metal did not compile the shader: ", reason(error));
  }

  std::mutex mutex_;
  id<MTLLibrary> library_ = nil;
  std::unordered_map<std::string, id<MTLComputePipelineState>> pipelines_;
};

NSUInteger byte_offset(const Tensor& t) { return NSUInteger(t.storage_offset()) * t.element_size(); }

bool is_aligned(std::initializer_list<const Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const Tensor* t) { return byte_offset(*t) % kVectorBytes == 0; });
}

// Encodes one dispatch: tensors take the first buffer slots in order, the parameters the next.
template <class Params>
void launch(const std::string& kernel, MTLSize grid, std::initializer_list<const Tensor*> tensors,
            const Params& params) {
  @autoreleasepool {
    id<MTLComputePipelineState> pipeline = Pipelines::instance().get(kernel);
    const NSUInteger group = std::min<NSUInteger>({kMaxGroup, [pipeline maxTotalThreadsPerThreadgroup], grid.width});
    __block bool encoded = false;
    dispatch_sync(torch::mps::get_dispatch_queue(), ^{  // nothing in this block may throw
      id<MTLCommandBuffer> commands = torch::mps::get_command_buffer();
      id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
      if (encoder == nil) return;
      [encoder setComputePipelineState:pipeline];
      NSUInteger slot = 0;
      for (const Tensor* t : tensors) {
        // PyTorch keeps a tensor's MTLBuffer where other devices keep an address.
        id<MTLBuffer> buffer = (__bridge id<MTLBuffer>)const_cast<void*>(t->storage().data());
        [encoder setBuffer:buffer offset:byte_offset(*t) atIndex:slot++];
      }
      [encoder setBytes:&params length:sizeof(params) atIndex:slot];
      [encoder dispatchThreads:grid threadsPerThreadgroup:MTLSizeMake(group, 1, 1)];
      [encoder endEncoding];
      encoded = true;
    });
    TORCH_CHECK(encoded, "dflash2: ", kernel, ": Metal gave no command encoder");
  }
}

std::string for_current(const char* kernel, const Tensor& current) {
  switch (current.scalar_type()) {
    case at::kHalf:
      return std::string(kernel) + "_from_f16";
    case at::kBFloat16:
      return std::string(kernel) + "_from_bf16";
    default:
      return kernel;
  }
}

struct MetalKernels {
  static void pack_attention(const PackGeometry<int64_t>& g, const Tensor& ring_keys, const Tensor& ring_values,
                             const Tensor& current_queries, const Tensor& current_keys, const Tensor& current_values,
                             const Tensor& cache_lengths, const Tensor& write_positions, const Tensor& packed_queries,
                             const Tensor& packed_keys, const Tensor& packed_values) {
    const bool aligned = is_aligned({&ring_keys, &ring_values, &current_queries, &current_keys, &current_values,
                                     &packed_queries, &packed_keys, &packed_values});
    const PackParams params{uint32_t(g.q_heads), uint32_t(g.kv_heads), uint32_t(g.head_dim),
                            uint32_t(g.rows),    uint32_t(g.window),   aligned};
    const int64_t query_rows = g.q_heads / g.kv_heads * g.rows;  // of one key/value head
    launch(for_current("dflash2_pack_attention_bf16", current_queries),
           MTLSizeMake(NSUInteger(g.head_dim / kVectorElements * (query_rows + g.packed_length())),
                       NSUInteger(g.kv_heads), NSUInteger(g.lanes)),
           {&ring_keys, &ring_values, &current_queries, &current_keys, &current_values, &cache_lengths,
            &write_positions, &packed_queries, &packed_keys, &packed_values},
           params);
  }

  static void fill_attention_mask(const MaskGeometry<int64_t>& g, const Tensor& cache_lengths, const Tensor& mask) {
    const MaskParams params{uint32_t(g.q_heads), uint32_t(g.rows), uint32_t(g.window), g.causal};
    launch("dflash2_fill_attention_mask_bf16",
           MTLSizeMake(NSUInteger(g.packed_length()), NSUInteger(g.q_heads), NSUInteger(g.lanes)),
           {&cache_lengths, &mask}, params);
  }

  static void commit_kv(const CommitGeometry<int64_t>& g, const Tensor& new_keys, const Tensor& new_values,
                        const Tensor& commit_counts, const Tensor& write_positions, const Tensor& ring_keys,
                        const Tensor& ring_values) {
    const CommitParams params{uint32_t(g.kv_heads), uint32_t(g.head_dim), uint32_t(g.max_count), uint32_t(g.window),
                              is_aligned({&new_keys, &new_values, &ring_keys, &ring_values})};
    launch(for_current("dflash2_commit_kv_bf16", new_keys),
           MTLSizeMake(NSUInteger(g.head_dim / kVectorElements * g.max_count), NSUInteger(g.kv_heads),
                       NSUInteger(g.lanes)),
           {&new_keys, &new_values, &commit_counts, &write_positions, &ring_keys, &ring_values}, params);
  }

  static void set_mask_rows(const MaskRowsGeometry<int64_t>& g, const Tensor& mask_embedding, const Tensor& hidden) {
    const char* kernel = hidden.scalar_type() == at::kHalf       ? "dflash2_set_mask_rows_f16"
                         : hidden.scalar_type() == at::kBFloat16 ? "dflash2_set_mask_rows_bf16"
                                                                 : "dflash2_set_mask_rows_f32";
    const MaskRowsParams params{uint32_t(g.rows), uint32_t(g.hidden_size)};
    launch(kernel, MTLSizeMake(NSUInteger(g.hidden_size), NSUInteger(g.rows - 1), NSUInteger(g.lanes)),
           {&mask_embedding, &hidden}, params);
  }
};

}  // namespace
}  // namespace dflash2

TORCH_LIBRARY_IMPL(dflash2, MPS, m) { dflash2::Operators<dflash2::MetalKernels>::register_on(m); }

// Runs any kernel text on tensors, and makes on request the host mistakes that the stand-in must report.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#include <torch/mps.h>

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

namespace {

id<MTLBuffer> buffer_of(const at::Tensor& t) { return (__bridge id<MTLBuffer>)const_cast<void*>(t.storage().data()); }
NSString* ns(const std::string& s) { return [NSString stringWithUTF8String:s.c_str()]; }
const char* text(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no error"; }

id<MTLComputePipelineState> pipeline(const std::string& source, const std::string& name) {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  TORCH_CHECK(device, "no device");
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:ns(source) options:nil error:&error];
  TORCH_CHECK(library, text(error));
  id<MTLFunction> function = [library newFunctionWithName:ns(name)];
  TORCH_CHECK(function, "no function ", name);
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, "no pipeline: ", text(error));
  return state;
}

MTLSize size(at::IntArrayRef n) { return MTLSizeMake(NSUInteger(n[0]), NSUInteger(n[1]), NSUInteger(n[2])); }

// Binds the tensors to slots 0, 1, ... and dispatches once. `mistake` says what to do wrong.
void run(const std::string& source, const std::string& name, at::IntArrayRef grid, at::IntArrayRef group,
         at::TensorList tensors, const std::string& mistake) {
  @autoreleasepool {
    auto makes = [&](const char* m) { return mistake == m; };
    id<MTLComputePipelineState> state = pipeline(source, name);
    const auto queue = torch::mps::get_dispatch_queue();
    __block id<MTLCommandBuffer> commands = nil;
    if (makes("command_buffer_outside")) commands = torch::mps::get_command_buffer();
    if (makes("encoder_outside") || makes("kept_command_buffer") || makes("torch_encoder_open")) {
      dispatch_sync(queue, ^{
        commands = torch::mps::get_command_buffer();
      });
      if (makes("encoder_outside")) [commands computeCommandEncoder];
      if (makes("kept_command_buffer")) torch::mps::commit();
      if (makes("torch_encoder_open")) at::zeros({4}, tensors[0].options());
    }
    if (makes("own_queue")) commands = [[MTLCreateSystemDefaultDevice() newCommandQueue] commandBuffer];
    __unsafe_unretained id<MTLBuffer> freed = nil;
    if (makes("freed_buffer")) freed = buffer_of(at::zeros({4}, tensors[0].options()));
    __block id<MTLComputeCommandEncoder> escaped = nil;

    dispatch_sync(queue, ^{
      if (!commands) commands = torch::mps::get_command_buffer();
      if (makes("throw_in_block")) TORCH_CHECK(false, "thrown in the block");
      if (makes("torch_op_in_block")) at::zeros({4}, tensors[0].options());
      id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
      if (makes("second_encoder")) [commands computeCommandEncoder];
      if (!makes("no_pipeline")) [encoder setComputePipelineState:state];
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (makes("unbound") && i == 0) continue;
        NSUInteger offset = NSUInteger(tensors[i].storage_offset()) * tensors[i].element_size();
        if (makes("bad_offset")) offset += 1;
        if (makes("far_offset")) offset += 1 << 20;
        [encoder setBuffer:buffer_of(tensors[i]) offset:offset atIndex:i];
      }
      if (makes("freed_buffer")) [encoder setBuffer:freed offset:0 atIndex:0];
      const char bytes[5000] = {};
      if (makes("large_bytes")) [encoder setBytes:bytes length:sizeof bytes atIndex:30];
      if (makes("bytes_for_writable")) [encoder setBytes:bytes length:256 atIndex:0];
      if (makes("bytes_4")) [encoder setBytes:bytes length:4 atIndex:2];
      if (makes("bytes_8")) [encoder setBytes:bytes length:8 atIndex:2];
      if (makes("bytes_16")) [encoder setBytes:bytes length:16 atIndex:2];
      if (makes("index_31")) [encoder setBuffer:buffer_of(tensors[0]) offset:0 atIndex:31];
      if (makes("threadgroups")) {
        [encoder dispatchThreadgroups:size(grid) threadsPerThreadgroup:size(group)];
      } else {
        [encoder dispatchThreads:size(grid) threadsPerThreadgroup:size(group)];
      }
      if (makes("stale_binding")) [encoder dispatchThreads:size(grid) threadsPerThreadgroup:size(group)];
      if (!makes("no_end") && !makes("end_outside")) [encoder endEncoding];
      if (makes("end_twice")) [encoder endEncoding];
      if (makes("dispatch_after_end")) [encoder dispatchThreads:size(grid) threadsPerThreadgroup:size(group)];
      if (makes("wait_in_block")) [commands waitUntilCompleted];
      if (makes("commit")) torch::mps::commit();
      if (makes("unknown_selector")) [(id<MTLBuffer>)commands contents];
      escaped = encoder;
    });
    if (makes("bind_outside")) [escaped setBuffer:buffer_of(tensors[0]) offset:0 atIndex:0];
    if (makes("own_queue")) [commands commit];
  }
}

// A host function that forgets its autorelease pool.
void leak(int64_t n) {
  for (int64_t i = 0; i < n; ++i) (void)[[ns("leaked") description] length];
}

}  // namespace

TORCH_LIBRARY(probe, m) {
  m.def("run(str source, str name, int[] grid, int[] group, Tensor(a!)[] tensors, str mistake='') -> ()");
  m.def("leak(int n) -> ()", &leak);
}
TORCH_LIBRARY_IMPL(probe, MPS, m) { m.impl("run", &run); }

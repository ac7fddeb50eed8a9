// The stand-in's classes that its torch side uses too.
#pragma once
#import <Metal/Metal.h>

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "execute.h"

@class SimCommandBuffer, SimEncoder;

@interface SimBuffer : NSObject <MTLBuffer> {
 @public
  std::shared_ptr<metal_sim::Memory> memory;
}
+ (SimBuffer*)newWithLength:(size_t)length;
@end

@interface SimCommandQueue : NSObject <MTLCommandQueue> {
 @public
  std::deque<SimCommandBuffer*> committed;
  const void* owner;  // torch's stream: the dispatch queue on which alone it may be used
}
- (void)run;  // everything committed so far
@end

@interface SimCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  SimCommandQueue* queue;
  SimEncoder* open;     // the encoder that has not ended
  bool open_is_torchs;  // it takes torch's own operators
  std::vector<std::function<void()>> commands;
}
- (void)execute;
- (void)beginTorchs;
- (void)endTorchs;
- (void)abandon;
@end

namespace metal_sim {
id<MTLDevice> the_device();
size_t allocated();                      // bytes in buffers
std::vector<std::string>& dispatches();  // "kernel x,y,z x,y,z": grid and threadgroup, while options().trace is on
std::vector<std::string>& warnings();    // of shader compilations
}  // namespace metal_sim

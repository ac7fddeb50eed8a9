// libdispatch: serial queues. A queue knows the thread that runs a block of it, so that a deadlock is reported.
#import <Foundation/Foundation.h>

#include <mutex>
#include <thread>

#include "sim.h"

@interface SimDispatchQueue : NSObject <OS_dispatch_queue> {
 @public
  std::mutex mutex;
  std::atomic<std::thread::id> owner;
}
@end
@implementation SimDispatchQueue
@end

extern "C" {

dispatch_queue_t dispatch_queue_create(const char*, dispatch_queue_attr_t) { return [[SimDispatchQueue alloc] init]; }

bool dispatch_queue_owned(const void* queue) {
  return ((__bridge SimDispatchQueue*)queue)->owner == std::this_thread::get_id();
}

void dispatch_sync(dispatch_queue_t queue, DISPATCH_NOESCAPE dispatch_block_t block) {
  auto* q = (SimDispatchQueue*)queue;
  if (!q) metal_sim::fail("dispatch_sync on a nil queue");
  if (dispatch_queue_owned((__bridge void*)q))
    metal_sim::fail("dispatch_sync called on a queue already owned by the current thread (deadlock)");
  std::lock_guard lock(q->mutex);
  struct Own {
    SimDispatchQueue* q;
    explicit Own(SimDispatchQueue* queue) : q(queue) { q->owner = std::this_thread::get_id(); }
    ~Own() { q->owner = std::thread::id(); }
  } own(q);
  auto ended = [&](bool faulted) {
    if (metal_sim::queue_block_ended) metal_sim::queue_block_ended((__bridge void*)q, faulted);
  };
  try {
    block();
  } catch (const metal_sim::Fault&) {
    ended(true);
    throw;
  } catch (const std::exception& e) {  // libdispatch ends the process
    ended(true);
    metal_sim::fail(std::string("a C++ exception escaped from a dispatch_sync block (std::terminate on a Mac): ") +
                    e.what());
  }
  ended(false);
}
}

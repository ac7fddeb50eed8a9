// In place of libdispatch's: serial queues and dispatch_sync.
#pragma once
#include <objc/NSObject.h>

@protocol OS_dispatch_queue <NSObject>
@end
typedef NSObject<OS_dispatch_queue>* dispatch_queue_t;  // an object, to ARC and to blocks
@protocol OS_dispatch_queue_attr <NSObject>
@end
typedef NSObject<OS_dispatch_queue_attr>* dispatch_queue_attr_t;
typedef void (^dispatch_block_t)(void);
#define DISPATCH_QUEUE_SERIAL nil
#define DISPATCH_NOESCAPE __attribute__((noescape))

#ifdef __cplusplus
extern "C" {
#endif
dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attr)
    __attribute__((ns_returns_retained));
void dispatch_sync(dispatch_queue_t queue, DISPATCH_NOESCAPE dispatch_block_t block);
#ifdef __cplusplus
}
#endif

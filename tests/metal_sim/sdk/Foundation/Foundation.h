// The part of <Foundation/Foundation.h> that a torch extension for Metal touches, declared as Apple declares it.
// Used twice: by the stand-in (with sdk/linux in place of Apple's lower headers) and by tests/mac_check (with Apple's).
#pragma once
#include <Availability.h>
#include <TargetConditionals.h>
#include <dispatch/dispatch.h>
#include <objc/NSObject.h>
#include <stdarg.h>
#include <stdint.h>

#ifdef __cplusplus
#define FOUNDATION_EXPORT extern "C"
#else
#define FOUNDATION_EXPORT extern
#endif
#define NS_INLINE static __inline__ __attribute__((always_inline))
#define NS_RETURNS_INNER_POINTER __attribute__((objc_returns_inner_pointer))
#define NS_RETURNS_RETAINED __attribute__((ns_returns_retained))
#define NS_FORMAT_FUNCTION(F, A) __attribute__((format(__NSString__, F, A)))
#define NS_ENUM(_type, _name)                                         \
  enum __attribute__((enum_extensibility(open))) _name : _type _name; \
  enum _name : _type
#define NS_OPTIONS(_type, _name) \
  _type _name;                   \
  enum __attribute__((flag_enum, enum_extensibility(open))) : _type

#pragma clang assume_nonnull begin

typedef NSUInteger NSStringEncoding;
enum : NSStringEncoding { NSASCIIStringEncoding = 1, NSUTF8StringEncoding = 4 };

@class NSString;
typedef NSString* NSErrorDomain;

@protocol NSCopying
- (id)copyWithZone:(nullable struct _NSZone*)zone;
@end

@interface NSString : NSObject <NSCopying>
@property(readonly) NSUInteger length;
@property(nullable, readonly) const char* UTF8String NS_RETURNS_INNER_POINTER;
+ (nullable instancetype)stringWithUTF8String:(const char*)nullTerminatedCString;
+ (instancetype)stringWithFormat:(NSString*)format, ... NS_FORMAT_FUNCTION(1, 2);
- (nullable instancetype)initWithUTF8String:(const char*)nullTerminatedCString;
- (nullable instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)len encoding:(NSStringEncoding)encoding;
- (BOOL)isEqualToString:(NSString*)aString;
@end

@interface NSError : NSObject <NSCopying>
@property(readonly, copy) NSErrorDomain domain;
@property(readonly) NSInteger code;
@property(readonly, copy) NSString* localizedDescription;
@end

#pragma clang assume_nonnull end

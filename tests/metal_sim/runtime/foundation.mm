// The classes of sdk/Foundation/Foundation.h (compiled without ARC).
#import <Foundation/Foundation.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "foundation_private.h"

extern "C" {
id objc_allocate(Class);
void objc_dispose(id);
bool objc_opt_isKindOfClass(id, Class);
bool objc_opt_respondsToSelector(id, SEL);
const char* object_getClassName(id);
Class object_getClass(id);
id objc_autorelease(id);
void* _Block_copy(const void*);
void _Block_release(const void*);
}

// What a freed object becomes: it answers to nothing.
__attribute__((objc_root_class))
@interface Deallocated {
  Class isa;
}
@end
@implementation Deallocated
@end

@implementation NSObject
+ (instancetype)alloc {
  return objc_allocate(self);
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  objc_dispose(self);
}
- (instancetype)retain {
  __atomic_add_fetch(&extra_references, 1, __ATOMIC_SEQ_CST);
  return self;
}
- (oneway void)release {
  if (__atomic_fetch_sub(&extra_references, 1, __ATOMIC_SEQ_CST) == 0) [self dealloc];
}
- (instancetype)autorelease {
  return objc_autorelease(self);
}
- (NSUInteger)retainCount {
  return NSUInteger(extra_references + 1);
}
- (instancetype)self {
  return self;
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)c {
  return objc_opt_isKindOfClass(self, c);
}
- (BOOL)respondsToSelector:(SEL)s {
  return objc_opt_respondsToSelector(self, s);
}
- (BOOL)isEqual:(id)other {
  return self == other;
}
- (NSUInteger)hash {
  return NSUInteger(self) / 16;
}
- (id)copyWithZone:(struct _NSZone*)zone {
  return (void)zone, [self retain];
}
- (id)copy {
  return [self copyWithZone:nullptr];
}
- (NSString*)description {
  return [NSString stringWithFormat:@"<%s: %p>", object_getClassName(self), self];
}
@end

@interface NSBlock : NSObject
@end
@implementation NSBlock
- (id)retain {
  return static_cast<id>(_Block_copy(self));
}
- (oneway void)release {
  _Block_release(self);
}
- (id)copyWithZone:(struct _NSZone*)zone {
  return (void)zone, static_cast<id>(_Block_copy(self));
}
@end
// The names under which the compiler knows the classes of blocks and of @"literals".
#define ALIAS(NAME, CLASS) asm(".globl " NAME "\n.set " NAME ", OBJC_CLASS_$_" CLASS "\n")
ALIAS("_NSConcreteStackBlock", "NSBlock");
ALIAS("_NSConcreteGlobalBlock", "NSBlock");
ALIAS("_NSConcreteMallocBlock", "NSBlock");
ALIAS("__CFConstantStringClassReference", "NSConstantString");

// ---------------------------------------------------------------- strings
@interface SimString : NSString {
  std::string text;
}
@end
@interface NSConstantString : NSString
@end

static std::string format(NSString* pattern, va_list arguments) {
  std::string out;
  for (const char* p = [pattern UTF8String]; *p; ++p) {
    if (*p != '%') {
      out += *p;
      continue;
    }
    std::string spec = "%";
    while (*++p && !strchr("@diuxXfgesp%", *p)) spec += *p;
    spec += *p;
    char buffer[64];
    const bool wide = spec.find_first_of("lzq") != std::string::npos;
    switch (*p) {
      case '%':
        out += '%';
        break;
      case '@': {
        id object = va_arg(arguments, id);
        out += object ? [[object description] UTF8String] : "(null)";
        break;
      }
      case 's':
        out += va_arg(arguments, const char*);
        break;
      case 'p':
        snprintf(buffer, sizeof buffer, "%p", va_arg(arguments, void*));
        out += buffer;
        break;
      case 'f':
      case 'g':
      case 'e':
        snprintf(buffer, sizeof buffer, spec.c_str(), va_arg(arguments, double));
        out += buffer;
        break;
      default:
        if (wide) {
          snprintf(buffer, sizeof buffer, spec.c_str(), va_arg(arguments, long));
        } else {
          snprintf(buffer, sizeof buffer, spec.c_str(), va_arg(arguments, int));
        }
        out += buffer;
    }
  }
  return out;
}

#pragma clang diagnostic ignored "-Wincomplete-implementation"  // left to the two classes below
@implementation NSString
+ (instancetype)alloc {
  return self == [NSString class] ? (id)[SimString alloc] : [super alloc];
}
+ (instancetype)stringWithUTF8String:(const char*)s {
  return [[[NSString alloc] initWithUTF8String:s] autorelease];
}
+ (instancetype)stringWithFormat:(NSString*)pattern, ... {
  va_list arguments;
  va_start(arguments, pattern);
  std::string text = format(pattern, arguments);
  va_end(arguments);
  return [self stringWithUTF8String:text.c_str()];
}
- (instancetype)initWithUTF8String:(const char*)s {
  return [self initWithBytes:s length:strlen(s) encoding:NSUTF8StringEncoding];
}
- (NSUInteger)length {
  return strlen([self UTF8String]);
}  // of ASCII
- (NSString*)description {
  return self;
}
- (BOOL)isEqualToString:(NSString*)other {
  return other && !strcmp([self UTF8String], [other UTF8String]);
}
- (BOOL)isEqual:(id)other {
  return [other isKindOfClass:[NSString class]] && [self isEqualToString:other];
}
- (NSUInteger)hash {
  return std::hash<std::string>()([self UTF8String]);
}
@end
@implementation SimString
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)n encoding:(NSStringEncoding)encoding {
  if (encoding != NSUTF8StringEncoding && encoding != NSASCIIStringEncoding) return [self release], nil;
  text.assign(static_cast<const char*>(bytes), n);
  return self;
}
- (const char*)UTF8String {
  return text.c_str();
}
@end
@implementation NSConstantString  // @"literal": {isa, flags, bytes, length}, laid out by the compiler, never released
- (id)retain {
  return self;
}
- (oneway void)release {
}
- (const char*)UTF8String {
  return reinterpret_cast<const char* const*>(self)[2];
}
@end

// ---------------------------------------------------------------- errors
@implementation NSError
@synthesize domain = _domain, code = _code, localizedDescription = _description;
+ (instancetype)errorInDomain:(NSString*)domain code:(NSInteger)code text:(NSString*)text {
  NSError* e = [[self alloc] init];
  e->_domain = [domain copy];
  e->_code = code;
  e->_description = [text copy];
  return [e autorelease];
}
- (void)dealloc {
  [_domain release];
  [_description release];
  [super dealloc];
}
- (NSString*)description {
  return _description;
}
@end

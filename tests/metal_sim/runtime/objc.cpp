// A small Objective-C runtime for Apple's object layout on ELF.
//
// clang -fobjc-runtime=macosx emits the code that it emits for a Mac (ARC, blocks, C++ exceptions). Classes,
// metaclasses and ivar offsets are complete in the static data; what is left to do is message lookup, reference
// counting, autorelease pools and blocks. No +load, no categories, no weak references, no @catch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim.h"

namespace {

// Apple's layout.
struct Method {
  const char* name;
  const char* types;
  void* imp;
};
struct MethodList {
  uint32_t entry_size, count;
  Method first[1];
};
struct ClassData {
  uint32_t flags, instance_start, instance_size, reserved;
  const uint8_t* ivar_layout;
  const char* name;
  MethodList* methods;
};
struct Class {
  Class* isa;
  Class* super;
  void* cache;
  void* vtable;
  uintptr_t data;
  const ClassData* get() const { return reinterpret_cast<const ClassData*>(data & ~uintptr_t(7)); }
};
struct Object {
  Class* isa;
};
using id = Object*;
using SEL = const char*;
constexpr uint32_t kMeta = 1;

Method* own_method(const Class* c, SEL selector) {
  if (MethodList* list = c->get()->methods)
    for (uint32_t i = 0; i < list->count; ++i) {
      auto* m = reinterpret_cast<Method*>(reinterpret_cast<char*>(list->first) + size_t(list->entry_size & 0xfffc) * i);
      if (m->name == selector || !strcmp(m->name, selector)) return m;
    }
  return nullptr;
}

void* find_method(const Class* c, SEL selector) {
  for (; c; c = c->super)
    if (Method* m = own_method(c, selector)) return m->imp;
  return nullptr;
}

}  // namespace

// ---------------------------------------------------------------- messages
extern "C" {
extern Class OBJC_CLASS_$_Deallocated;  // what freed objects become, see foundation.mm
void _objc_empty_cache() {}             // only its address is used

void* objc_lookup_in(Class* c, SEL selector) {
  struct Slot {
    Class* c;
    SEL selector;
    void* imp;
  };
  static thread_local Slot cache[1024];
  Slot& slot = cache[(reinterpret_cast<uintptr_t>(c) / 8 * 31 + reinterpret_cast<uintptr_t>(selector)) % 1024];
  if (slot.c != c || slot.selector != selector) {
    void* imp = find_method(c, selector);
    if (c == &OBJC_CLASS_$_Deallocated) metal_sim::fail(std::string("message '") + selector + "' to a freed object");
    if (!imp)
      metal_sim::fail(std::string(c->get()->flags & kMeta ? "+[" : "-[") + c->get()->name + " " + selector +
                      "]: unrecognized selector");
    slot = {c, selector, imp};
  }
  return slot.imp;
}
void* objc_lookup(id self, SEL selector) { return objc_lookup_in(self->isa, selector); }
struct Super {
  id self;
  Class* current;
};
void* objc_lookup_super(Super* s, SEL selector) { return objc_lookup_in(s->current->super, selector); }
}

// The entry points that the compiler calls: keep every argument register, find the method, jump to it. Nil answers
// zero.
#if defined(__x86_64__)
#define ENTRY_POINT(NAME, TESTED, RECEIVER, SELECTOR, LOOKUP, AFTER)                                             \
  asm(".text\n.globl " NAME "\n.type " NAME ",@function\n" NAME                                                  \
      ":\n.cfi_startproc\n"                                                                                      \
      "test %" TESTED ", %" TESTED                                                                               \
      "\nje 1f\n"                                                                                                \
      "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset %rbp, -16\nmov %rsp, %rbp\n.cfi_def_cfa_register %rbp\n"   \
      "sub $0xc0, %rsp\n"                                                                                        \
      "mov %rdi,0x00(%rsp)\nmov %rsi,0x08(%rsp)\nmov %rdx,0x10(%rsp)\nmov %rcx,0x18(%rsp)\nmov %r8,0x20(%rsp)\n" \
      "mov %r9,0x28(%rsp)\nmov %rax,0x30(%rsp)\n"                                                                \
      "movups %xmm0,0x40(%rsp)\nmovups %xmm1,0x50(%rsp)\nmovups %xmm2,0x60(%rsp)\nmovups %xmm3,0x70(%rsp)\n"     \
      "movups %xmm4,0x80(%rsp)\nmovups %xmm5,0x90(%rsp)\nmovups %xmm6,0xa0(%rsp)\nmovups %xmm7,0xb0(%rsp)\n"     \
      "mov %" SELECTOR ", %r11\nmov %" RECEIVER ", %rdi\nmov %r11, %rsi\ncall " LOOKUP                           \
      "@PLT\nmov %rax, %r11\n"                                                                                   \
      "mov 0x00(%rsp),%rdi\nmov 0x08(%rsp),%rsi\nmov 0x10(%rsp),%rdx\nmov 0x18(%rsp),%rcx\nmov 0x20(%rsp),%r8\n" \
      "mov 0x28(%rsp),%r9\nmov 0x30(%rsp),%rax\n"                                                                \
      "movups 0x40(%rsp),%xmm0\nmovups 0x50(%rsp),%xmm1\nmovups 0x60(%rsp),%xmm2\nmovups 0x70(%rsp),%xmm3\n"     \
      "movups 0x80(%rsp),%xmm4\nmovups 0x90(%rsp),%xmm5\nmovups 0xa0(%rsp),%xmm6\nmovups 0xb0(%rsp),%xmm7\n"     \
      "leave\n.cfi_def_cfa %rsp, 8\n" AFTER                                                                      \
      "jmp *%r11\n"                                                                                              \
      "1: xor %eax,%eax\nxor %edx,%edx\npxor %xmm0,%xmm0\npxor %xmm1,%xmm1\nret\n.cfi_endproc\n.size " NAME      \
      ", .-" NAME "\n")
ENTRY_POINT("objc_msgSend", "rdi", "rdi", "rsi", "objc_lookup", "");
ENTRY_POINT("objc_msgSend_stret", "rsi", "rsi", "rdx", "objc_lookup", "");  // the result's address comes first
ENTRY_POINT("objc_msgSendSuper2", "rdi", "rdi", "rsi", "objc_lookup_super", "mov (%rdi), %rdi\n");
#elif defined(__aarch64__)
#define ENTRY_POINT(NAME, LOOKUP, AFTER)                                                                              \
  asm(".text\n.globl " NAME "\n.type " NAME ",%function\n" NAME                                                       \
      ":\n.cfi_startproc\ncbz x0, 1f\n"                                                                               \
      "stp x29, x30, [sp, #-16]!\n.cfi_def_cfa_offset 16\n.cfi_offset x29, -16\n.cfi_offset x30, -8\nmov x29, sp\n"   \
      ".cfi_def_cfa_register x29\nsub sp, sp, #208\n"                                                                 \
      "stp x0, x1, [sp]\nstp x2, x3, [sp, #16]\nstp x4, x5, [sp, #32]\nstp x6, x7, [sp, #48]\nstr x8, [sp, #64]\n"    \
      "stp q0, q1, [sp, #80]\nstp q2, q3, [sp, #112]\nstp q4, q5, [sp, #144]\nstp q6, q7, [sp, #176]\n"               \
      "bl " LOOKUP                                                                                                    \
      "\nmov x16, x0\n"                                                                                               \
      "ldp x0, x1, [sp]\nldp x2, x3, [sp, #16]\nldp x4, x5, [sp, #32]\nldp x6, x7, [sp, #48]\nldr x8, [sp, #64]\n"    \
      "ldp q0, q1, [sp, #80]\nldp q2, q3, [sp, #112]\nldp q4, q5, [sp, #144]\nldp q6, q7, [sp, #176]\n"               \
      "mov sp, x29\nldp x29, x30, [sp], #16\n.cfi_def_cfa sp, 0\n" AFTER                                              \
      "br x16\n"                                                                                                      \
      "1: mov x1, #0\nmovi v0.2d, #0\nmovi v1.2d, #0\nmovi v2.2d, #0\nmovi v3.2d, #0\nret\n.cfi_endproc\n.size " NAME \
      ", .-" NAME "\n")
ENTRY_POINT("objc_msgSend", "objc_lookup", "");
ENTRY_POINT("objc_msgSendSuper2", "objc_lookup_super", "ldr x0, [x0]\n");
#else
#error "x86-64 and arm64 only"
#endif

extern "C" {
void* objc_msgSend(...);
static id send(id self, SEL selector) { return reinterpret_cast<id (*)(id, SEL)>(objc_msgSend)(self, selector); }

// ---------------------------------------------------------------- objects
static std::mutex census;
static std::unordered_map<std::string, int64_t> live;
static std::deque<id> graves;  // the last objects that died stay, so that a message to one of them is noticed
constexpr size_t kGraves = 1024;

int64_t objc_live_objects(const char* class_name) {
  std::lock_guard lock(census);
  if (class_name) return live[class_name];
  int64_t sum = 0;
  for (auto& [name, n] : live) sum += n;
  return sum;
}

id objc_allocate(Class* c) {
  auto* o = static_cast<id>(calloc(1, c->get()->instance_size));
  o->isa = c;
  std::vector<Class*> chain;
  for (Class* k = c; k; k = k->super) chain.push_back(k);
  for (size_t i = chain.size(); i--;)
    if (Method* m = own_method(chain[i], ".cxx_construct")) reinterpret_cast<id (*)(id, SEL)>(m->imp)(o, m->name);
  std::lock_guard lock(census);
  ++live[c->get()->name];
  return o;
}
void objc_dispose(id o) {
  for (Class* k = o->isa; k; k = k->super)
    if (Method* m = own_method(k, ".cxx_destruct")) reinterpret_cast<void (*)(id, SEL)>(m->imp)(o, m->name);
  std::lock_guard lock(census);
  --live[o->isa->get()->name];
  o->isa = &OBJC_CLASS_$_Deallocated;
  graves.push_back(o);
  if (graves.size() > kGraves) {
    free(graves.front());
    graves.pop_front();
  }
}
bool objc_opt_isKindOfClass(id o, Class* k) {
  for (Class* c = o ? o->isa : nullptr; c; c = c->super)
    if (c == k) return true;
  return false;
}
bool objc_opt_respondsToSelector(id o, SEL selector) { return o && find_method(o->isa, selector); }
Class* object_getClass(id o) { return o ? o->isa : nullptr; }
const char* object_getClassName(id o) { return o ? o->isa->get()->name : "nil"; }
id objc_alloc(id c) { return send(c, "alloc"); }
id objc_alloc_init(id c) { return send(send(c, "alloc"), "init"); }
id objc_opt_new(id c) { return objc_alloc_init(c); }
id objc_opt_class(id o) { return send(o, "class"); }
id objc_opt_self(id o) { return o; }

// ---------------------------------------------------------------- reference counting
id objc_retain(id o) { return send(o, "retain"); }
void objc_release(id o) { send(o, "release"); }
static thread_local std::vector<id> pool;
static thread_local std::vector<size_t> pools;  // where each began
id objc_autorelease(id o) {
  if (o) pool.push_back(o);
  return o;
}
void* objc_autoreleasePoolPush() {
  pools.push_back(pool.size());
  return reinterpret_cast<void*>(pools.size());
}
void objc_autoreleasePoolPop(void* token) {
  while (pools.size() >= reinterpret_cast<size_t>(token)) {
    while (pool.size() > pools.back()) {
      id o = pool.back();
      pool.pop_back();
      objc_release(o);
    }
    pools.pop_back();
  }
}
id objc_retainAutorelease(id o) { return objc_autorelease(objc_retain(o)); }
id objc_autoreleaseReturnValue(id o) { return objc_autorelease(o); }
id objc_retainAutoreleaseReturnValue(id o) { return objc_retainAutorelease(o); }
id objc_retainAutoreleasedReturnValue(id o) { return objc_retain(o); }
id objc_claimAutoreleasedReturnValue(id o) { return objc_retain(o); }
id objc_unsafeClaimAutoreleasedReturnValue(id o) { return o; }
void objc_storeStrong(id* p, id value) {
  id old = *p;
  objc_retain(value);
  *p = value;
  objc_release(old);
}
id objc_getProperty(id self, SEL, ptrdiff_t offset, bool) {
  return objc_autorelease(objc_retain(*reinterpret_cast<id*>(reinterpret_cast<char*>(self) + offset)));
}
static void set_property(id self, id value, ptrdiff_t offset, bool copy) {
  auto* p = reinterpret_cast<id*>(reinterpret_cast<char*>(self) + offset);
  id old = *p;
  *p = copy ? send(value, "copy") : objc_retain(value);
  objc_release(old);
}
void objc_setProperty_atomic(id self, SEL, id v, ptrdiff_t offset) { set_property(self, v, offset, false); }
void objc_setProperty_nonatomic(id self, SEL, id v, ptrdiff_t offset) { set_property(self, v, offset, false); }
void objc_setProperty_atomic_copy(id self, SEL, id v, ptrdiff_t offset) { set_property(self, v, offset, true); }
void objc_setProperty_nonatomic_copy(id self, SEL, id v, ptrdiff_t offset) { set_property(self, v, offset, true); }

// ---------------------------------------------------------------- blocks
struct BlockDescriptor {
  unsigned long reserved, size;
  void (*copy)(void*, const void*);
  void (*dispose)(const void*);
};
struct Block {
  void* isa;
  int flags, reserved;
  void* invoke;
  BlockDescriptor* descriptor;
};
struct Byref {  // a __block variable
  void* isa;
  Byref* forwarding;
  int flags;
  unsigned size;
  void (*keep)(void*, void*);
  void (*destroy)(void*);
};
enum { kRefs = 0xfffe, kOnHeap = 1 << 24, kHasHelpers = 1 << 25, kGlobal = 1 << 28 };
enum { kObject = 3, kBlock = 7, kByref = 8, kFromByref = 128 };
extern Class _NSConcreteStackBlock, _NSConcreteGlobalBlock, _NSConcreteMallocBlock;  // classes, see foundation.mm

static bool drop_reference(int* flags) {  // was it the last one?
  return *flags & kOnHeap && !(__atomic_sub_fetch(flags, 2, __ATOMIC_SEQ_CST) & kRefs);
}
void* _Block_copy(const void* p) {
  auto* b = static_cast<Block*>(const_cast<void*>(p));
  if (!b || b->flags & kGlobal) return b;
  if (b->flags & kOnHeap) {
    __atomic_add_fetch(&b->flags, 2, __ATOMIC_SEQ_CST);
    return b;
  }
  auto* copy = static_cast<Block*>(malloc(b->descriptor->size));
  memcpy(copy, b, b->descriptor->size);
  copy->isa = &_NSConcreteMallocBlock;
  copy->flags = (copy->flags & ~kRefs) | kOnHeap | 2;
  if (copy->flags & kHasHelpers) copy->descriptor->copy(copy, b);
  return copy;
}
void _Block_release(const void* p) {
  auto* b = static_cast<Block*>(const_cast<void*>(p));
  if (!b || !drop_reference(&b->flags)) return;
  if (b->flags & kHasHelpers) b->descriptor->dispose(b);
  free(b);
}
void _Block_object_assign(void* to, const void* from, int kind) {
  auto** slot = static_cast<const void**>(to);
  if (kind == kObject) {
    *slot = objc_retain(static_cast<id>(const_cast<void*>(from)));
  } else if (kind == kBlock) {
    *slot = _Block_copy(from);
  } else if (kind == kByref) {
    auto* v = static_cast<Byref*>(const_cast<void*>(from));
    if (v->forwarding->flags & kOnHeap) {
      __atomic_add_fetch(&v->forwarding->flags, 2, __ATOMIC_SEQ_CST);
    } else {
      auto* copy = static_cast<Byref*>(malloc(v->size));
      memcpy(copy, v, v->size);
      copy->flags = (v->flags & ~kRefs) | kOnHeap | 4;
      copy->forwarding = v->forwarding = copy;
      if (v->flags & kHasHelpers) copy->keep(copy, v);
    }
    *slot = v->forwarding;
  } else {
    *slot = from;
  }
}
void _Block_object_dispose(const void* p, int kind) {
  if (kind == kObject) objc_release(static_cast<id>(const_cast<void*>(p)));
  if (kind == kBlock) _Block_release(p);
  if (kind == kByref) {
    Byref* v = static_cast<const Byref*>(p)->forwarding;
    if (!drop_reference(&v->flags)) return;
    if (v->flags & kHasHelpers) v->destroy(v);
    free(v);
  }
}
id objc_retainBlock(id b) { return static_cast<id>(_Block_copy(b)); }
}

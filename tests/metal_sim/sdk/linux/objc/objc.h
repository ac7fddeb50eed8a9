// In place of Apple's; `id`, `Class` and `SEL` are the compiler's.
#pragma once
#include <stdbool.h>
#include <stddef.h>

typedef bool BOOL;  // as on arm64
#define OBJC_BOOL_IS_BOOL 1
#define YES __objc_yes
#define NO __objc_no
#define nil nullptr
#define Nil nullptr
typedef long NSInteger;
typedef unsigned long NSUInteger;

// In place of Apple's: nothing is too new for the stand-in. tests/mac_check compiles against the real header.
#pragma once
#define API_AVAILABLE(...)
#define API_DEPRECATED(...)

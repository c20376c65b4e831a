// A shared libkvant exports the functions and classes marked KVANT_API, and the C functions of kvant.h. Everything else
// is hidden, so that two copies of kvant in one process cannot mix.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define KVANT_API __attribute__((visibility("default")))
#else
#define KVANT_API
#endif

// kvant: attention over compressed KV caches. Include this.
#pragma once

#if __cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L)
#error \
    "kvant's C++ headers need C++20: compile with -std=c++20 \
(CMake: target_compile_features(app PRIVATE cxx_std_20)), or use the C interface, kvant/kvant.h"
#else

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "kvant/codec.hpp"
#include "kvant/export.hpp"
#include "kvant/io.hpp"
#include "kvant/pages.hpp"
#include "kvant/reference.hpp"
#include "kvant/result.hpp"
#include "kvant/snapshot.hpp"
#include "kvant/types.hpp"
#include "kvant/version.hpp"

#endif

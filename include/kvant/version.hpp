#pragma once

#define KVANT_VERSION_MAJOR 0
#define KVANT_VERSION_MINOR 1
#define KVANT_VERSION_PATCH 0
#define KVANT_VERSION "0.1.0"

namespace kvant {
inline constexpr const char* kVersion = KVANT_VERSION;
}

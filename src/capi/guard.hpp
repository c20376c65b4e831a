// The conversions between C++ and C: exceptions become codes, messages a thread's last error, structs of any age the
// newest one, strings the caller's buffer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "kvant/kvant.h"
#include "kvant/result.hpp"

namespace kvant::capi {

// Keeps the message for kvant_last_error and returns the code. Never fails: long messages are cut.
kvant_status remember(Code code, std::string_view message) noexcept;

inline Status null_argument(const char* name) {
  return {Code::invalid_argument, std::string(name) + " is NULL; it must point at something"};
}

// Runs `body` (returning Status); nothing leaves but a code.
template <class Body>
kvant_status guarded(Body&& body) noexcept {
  try {
    const Status status = std::forward<Body>(body)();
    return status.ok() ? KVANT_OK : remember(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return remember(Code::out_of_memory, "the system has no memory left for this call; nothing was changed");
  } catch (const Error& error) {
    return remember(error.status().code(), error.status().message());
  } catch (const std::exception& error) {
    return remember(Code::internal, error.what());
  } catch (...) {
    return remember(Code::internal, "an exception of unknown type");
  }
}

// Refuses a struct whose struct_size cannot be one: it was not initialised.
Status check_struct_size(const char* name, const void* given, std::size_t& size);

// A caller's struct, which may be older (shorter: the rest keeps its defaults) or newer (longer: what we do not know
// must be zero, since it asks for something this library cannot do) than ours.
template <class Struct>
Status read_struct(const char* name, const Struct* given, Struct& into) {
  static_assert(offsetof(Struct, struct_size) == 0);
  std::size_t size = 0;
  if (Status status = check_struct_size(name, given, size); !status.ok()) return status;
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return {Code::unsupported, std::string(name) + " sets a field that kvant " + kvant_version() +
                                     " does not know; update the library, or leave the field zero"};
    }
  }
  std::memcpy(&into, given, std::min(size, sizeof(Struct)));
  into.struct_size = sizeof(Struct);
  return {};
}

// Fills a caller's struct of `size` bytes as far as it reaches, and zeroes what we do not know.
template <class Struct>
void fill_struct(Struct* into, std::size_t size, Struct from) noexcept {
  if (into == nullptr || size < sizeof size) return;
  from.struct_size = size;
  std::memset(static_cast<void*>(into), 0, size);
  std::memcpy(static_cast<void*>(into), &from, std::min(size, sizeof(Struct)));
}

// The same for a struct whose struct_size the caller set.
template <class Struct>
Status write_struct(const char* name, Struct* into, const Struct& from) {
  std::size_t size = 0;
  if (Status status = check_struct_size(name, into, size); !status.ok()) return status;
  fill_struct(into, size, from);
  return {};
}

// Writes text to the caller's buffer, or says how large it must be.
Status copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* size);

}  // namespace kvant::capi

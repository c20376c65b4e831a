#include "capi/guard.hpp"

#include <algorithm>
#include <array>

namespace kvant::capi {

namespace {

// A plain array: no allocation when memory is what ran out, no destructor that runs after the library was unloaded.
thread_local std::array<char, 4096> last_error{};

}  // namespace

kvant_status remember(Code code, std::string_view message) noexcept {
  const std::size_t size = std::min(message.size(), last_error.size() - 1);
  std::copy_n(message.data(), size, last_error.data());
  last_error[size] = '\0';
  return static_cast<kvant_status>(code);
}

Status check_struct_size(const char* name, const void* given, std::size_t& size) {
  constexpr std::size_t kLargestPlausible = 65536;  // our structs have a few hundred bytes
  if (given == nullptr) return null_argument(name);
  std::memcpy(&size, given, sizeof size);
  if (size > sizeof size && size <= kLargestPlausible) return {};
  return {Code::invalid_argument, std::string(name) + ".struct_size is " + std::to_string(size) +
                                      "; set it to sizeof the struct before the call"};
}

Status copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* size) {
  const std::size_t needed = text.size() + 1;
  if (size != nullptr) *size = needed;
  if (buffer == nullptr) {
    if (size == nullptr) return null_argument("size (with buffer NULL)");
    return {};
  }
  if (capacity < needed) {
    return {Code::invalid_argument, "capacity is " + std::to_string(capacity) + " bytes, the text needs " +
                                        std::to_string(needed) + "; call with buffer NULL to ask first"};
  }
  std::copy_n(text.data(), text.size(), buffer);
  buffer[text.size()] = '\0';
  return {};
}

}  // namespace kvant::capi

extern "C" const char* kvant_last_error(void) {
  return kvant::capi::last_error.data();
}

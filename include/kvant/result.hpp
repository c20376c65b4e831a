// Errors as values. The library never prints, aborts or exits; every fallible call returns a Status or a
// Result<T>. A message names the argument, its value, what is allowed, and the way out.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "kvant/export.hpp"

namespace kvant {

/// Numeric values are part of the C ABI (kvant_status) and never change.
enum class Code : int {
  ok = 0,
  invalid_argument = 1,  ///< a value outside what is allowed
  unsupported = 2,       ///< a legal request that this build or machine cannot serve; never a slower substitute
  out_of_capacity = 3,   ///< the cache's configured capacity is exhausted; nothing was changed
  non_finite = 4,        ///< NaN, infinity or a magnitude above 65504 in keys or values; nothing was changed
  stale = 5,             ///< a plan made for an earlier state of one of its sequences
  bad_file = 6,          ///< a file that is not what it claims to be
  io = 7,                ///< the operating system refused
  out_of_memory = 8,     ///< an allocation failed; nothing was changed
  internal = 9,          ///< a defect in kvant
};

/// The lower-case name of a code, for example "invalid_argument".
KVANT_API const char* code_name(Code code) noexcept;

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  [[nodiscard]] bool ok() const noexcept { return code_ == Code::ok; }
  explicit operator bool() const noexcept { return ok(); }
  [[nodiscard]] Code code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  /// Throws Error unless ok, for callers that prefer exceptions.
  void value() const;

 private:
  Code code_ = Code::ok;
  std::string message_;
};

/// Thrown only by Status::value() and Result<T>::value(), on the caller's explicit request.
class KVANT_API Error : public std::exception {
 public:
  explicit Error(Status status) : status_(std::move(status)) {}
  [[nodiscard]] const char* what() const noexcept override { return status_.message().c_str(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Throws Error. In the library, so that these headers also serve hosts that compile with -fno-exceptions.
[[noreturn]] KVANT_API void throw_error(const Status& status);

inline void Status::value() const {
  if (!ok()) throw_error(*this);
}

/// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}
  Result(Code code, std::string message) : state_(std::in_place_index<1>, code, std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  T& operator*() & { return *std::get_if<0>(&state_); }
  const T& operator*() const& { return *std::get_if<0>(&state_); }
  T&& operator*() && { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  T& value() & { return require(), **this; }
  const T& value() const& { return require(), **this; }
  T value() && { return require(), std::move(*std::get_if<0>(&state_)); }
  /// The error; an ok Status when there is a value.
  [[nodiscard]] Status status() const { return ok() ? Status() : *std::get_if<1>(&state_); }
  [[nodiscard]] Code code() const noexcept { return ok() ? Code::ok : std::get_if<1>(&state_)->code(); }
  [[nodiscard]] const std::string& message() const {
    static const std::string none;
    return ok() ? none : std::get_if<1>(&state_)->message();
  }

 private:
  void require() const {
    if (!ok()) throw_error(*std::get_if<1>(&state_));
  }
  std::variant<T, Status> state_;
};

}  // namespace kvant

// Hints for names of formats that other software has.
#pragma once

#include <string>
#include <string_view>

namespace kvant::core {

/// The end of an error about a format that is not known: "; for int4 write tq4", or how a pair is given. "": no idea.
std::string format_hint(std::string_view name);

}  // namespace kvant::core

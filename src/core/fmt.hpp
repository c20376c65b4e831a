// fmt for every unit of ours: <fmt/format.h> as headers only, but for its one large function, which core/fmt.cpp
// compiles for all. A unit would otherwise compile it anew for its first message, which costs more seconds than the
// rest of most.
#pragma once

#include <fmt/format.h>

#if FMT_VERSION >= 90000 && FMT_VERSION < 100000  // other versions declare it otherwise: they do without
FMT_BEGIN_NAMESPACE
namespace detail {
extern template void vformat_to<char>(buffer<char>&, basic_string_view<char>, basic_format_args<buffer_context<char>>,
                                      locale_ref);
}
FMT_END_NAMESPACE
#endif

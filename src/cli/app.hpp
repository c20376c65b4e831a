// The command line as a function. Exit codes: 0 done, 1 refused while running, 2 wrong usage. Errors go to standard
// error as "kvant: what, and the way out".
#pragma once

#include "kvant/export.hpp"

/// A C function with a name of its own, since the Python package's libkvant.so has the tool inside and exports C
/// functions only.
extern "C" KVANT_API int kvant_cli_main(int argc, char** argv) noexcept;

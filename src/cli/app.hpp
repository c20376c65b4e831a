// The command line as a function. Exit codes: 0 done, 1 refused while running, 2 wrong usage. Errors go to standard
// error as "kvant: what, and the way out".
#pragma once

namespace kvant::cli {

int run_app(int argc, char** argv) noexcept;

}  // namespace kvant::cli

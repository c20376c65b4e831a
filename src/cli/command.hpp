// The commands. Each adds its options to the application and returns what to do once they are parsed. Wrong usage that
// the parser cannot see (a format name, lists of different lengths) is thrown as CLI::ValidationError; everything that
// goes wrong later is a Status.
#pragma once

#include <functional>

#include "kvant/result.hpp"

namespace CLI {
class App;
}

namespace kvant::cli {

using Action = std::function<Status()>;

Action add_eval_command(CLI::App& app);
Action add_info_command(CLI::App& app);
Action add_bench_command(CLI::App& app);
Action add_calibrate_command(CLI::App& app);
Action add_formats_command(CLI::App& app);
Action add_snapshot_command(CLI::App& app);
/// The shells' completions, and the manual page (hidden: for packagers), made from what the commands above declare.
Action add_completion_command(CLI::App& app);
Action add_man_command(CLI::App& app);

}  // namespace kvant::cli

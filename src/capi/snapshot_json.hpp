// The facts of a snapshot as JSON, for C and for the command line.
#pragma once

#include <string>

#include "kvant/snapshot.hpp"

namespace kvant::capi {

/// kvant.h, kvant_snapshot_info.
std::string describe_snapshot(const SnapshotInfo& info);

}  // namespace kvant::capi

// How many processors this process may use, which is often fewer than the machine has.
#pragma once

#include <string>

namespace kvant::cpu {

// The processors that the calling thread may run on (sched_getaffinity), or those that the quota pays for if these are
// fewer; at least 1. Counted anew when the last count is a second old, since both may change while a process runs.
int usable_processors();

// After a fork: the next call counts.
void forget_processors();

// The CPU quota of the process's control groups: that of all groups from its own to the outermost that can be
// seen (versions 1 and 2): the smallest, rounded down and at least 1; 0: there is no quota. All files are looked for
// below `root`, which is empty but in tests.
//
// Rounded down, since a group that has used up its quota stands still for the rest of the period, a tenth of a second.
int quota_processors(const std::string& root);

}  // namespace kvant::cpu

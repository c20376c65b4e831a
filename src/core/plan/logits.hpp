// Refusals and words for the options of logits. The arithmetic is in base/logits.hpp.
#pragma once

#include <string>

#include "kvant/attention.hpp"

namespace kvant::core {

Status check_logits(const AttentionOptions& options);
/// For explain(): the scale, then each transform.
std::string logit_words(const AttentionOptions& options);

}  // namespace kvant::core

// Refusals and words for the options of logits. The arithmetic is in base/logits.hpp.
#pragma once

#include <string>

#include "kvant/attention.hpp"

namespace kvant::core {

Status check_logits(const AttentionOptions& options);
/// For explain(): "scale 0.125, softcap 30, ALiBi".
std::string logit_words(const AttentionOptions& options);

}  // namespace kvant::core

// The contents of kvant.h's opaque handles, and the conversion of C's tensors to C++.
#pragma once

#include <memory>
#include <vector>

#include "capi/guard.hpp"
#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "kvant/io.hpp"
#include "kvant/pages.hpp"
#include "kvant/snapshot.hpp"

struct kvant_bases {
  kvant::io::Calibration calibration;
};

// Shared with its plans, so that handles may be destroyed in any order (as garbage collectors do).
struct kvant_cache {
  std::shared_ptr<kvant::Cache> cache;
  kvant::Stream stream{};  // for calls on caches on a device
};

struct kvant_snapshot {
  kvant::Snapshot snapshot;
};

struct kvant_plan {
  std::shared_ptr<const kvant::Cache> cache;
  kvant::Plan plan;
};

struct kvant_pages {
  kvant::Pages pages;
};

struct kvant_pages_plan {
  kvant::PagesPlan plan;
};

namespace kvant::capi {

// Errors: NULL, unknown dtype.
Result<TensorView> to_view(const char* name, const kvant_tensor* tensor);
Result<MutableTensorView> to_view(const char* name, const kvant_mutable_tensor* tensor);
/// A number of values that the library judges: the nearest int.
int to_int(std::int64_t number);
Result<Dtype> to_dtype(const char* name, std::int32_t dtype);
Result<KeyCentre> to_key_centre(const char* name, std::int32_t centre);
// An output may be left out by a NULL view or NULL data.
Result<MutableTensorView> to_optional_view(const char* name, const kvant_mutable_tensor* tensor);
Result<TensorView> to_optional_view(const char* name, const kvant_tensor* tensor);

// `sequences`: how many q_lens has.
Result<AttentionOptions> to_options(const kvant_attention_options* pointer, std::int64_t sequences);
Result<RunOptions> to_run_options(const kvant_run_options* pointer);

// C's sequence ids as ours. Errors: NULL with a count, negative count.
Result<std::vector<SequenceId>> to_sequences(const kvant_sequence* sequences, std::int64_t count);
// The same with a number of tokens each.
Result<std::vector<Append>> to_appends(const kvant_sequence* sequences, const std::int64_t* tokens, std::int64_t count);

}  // namespace kvant::capi

#include "core/store/unstorable.hpp"

#include <atomic>
#include <limits>

#include "codec/storable.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

struct Look {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  const TensorView* keys;
  const TensorView* values;
  std::int64_t rows;
  int workers;
  const std::function<std::optional<std::int64_t>(const TensorView&, std::int64_t)>* place;
  std::atomic<std::int64_t> first{kNone};  // the vector's number
};

void look_share(void* context, int worker) {
  Look& look = *static_cast<Look*>(context);
  const std::int64_t heads = look.keys->shape[1];  // keys' and values'
  const std::int64_t begin = 2 * look.rows * worker / look.workers, end = 2 * look.rows * (worker + 1) / look.workers;
  for (std::int64_t i = begin; i < end; ++i) {
    const TensorView& t = i < look.rows ? *look.keys : *look.values;
    const std::optional<std::int64_t> at = (*look.place)(t, i < look.rows ? i : i - look.rows);
    for (std::int64_t head = 0; at && head < heads; ++head) {
      if (codec::row_storable(t.dtype, row_of(t, *at, 0, head), static_cast<int>(t.shape[2]))) continue;
      const std::int64_t vector = i * heads + head;
      std::int64_t found = look.first.load();
      while (vector < found && !look.first.compare_exchange_weak(found, vector)) {
      }
      return;
    }
  }
}

}  // namespace

std::optional<Unstorable> find_unstorable(
    const TensorView& keys, const TensorView& values, std::int64_t rows, int workers,
    const std::function<std::optional<std::int64_t>(const TensorView& t, std::int64_t row)>& place) {
  Look look{.keys = &keys, .values = &values, .rows = rows, .workers = workers, .place = &place};
  parallel(workers, look_share, &look);
  const std::int64_t vector = look.first, heads = keys.shape[1];
  if (vector == Look::kNone) return {};
  return Unstorable{vector < rows * heads, vector / heads % rows, static_cast<int>(vector % heads)};
}

}  // namespace kvant::core

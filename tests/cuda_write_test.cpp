// A cache on a device hands these to launches, as far as the host makes them (cuda/store/store.hpp,
// cuda/append/write.hpp): changes of tables, and the parameters of writes and reads. Kernels do nothing here, and no
// device is needed.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "codec/rotation.hpp"
#include "cuda/append/imported.hpp"
#include "cuda/read_back/read_back.hpp"
#include "cuda/store/store.hpp"

namespace kvant::cuda {
namespace {

struct WriteLaunched {
  int kernel;  // its width; 0: that of imported formats
  WriteParams params;
};
struct {
  std::vector<EntryBatch> entries;
  std::vector<WriteLaunched> writes;
  std::vector<ReadBackParams> reads;
  std::vector<int> prepared;
} seen;

template <int kKernel>
cudaError_t prepare(const WriteParams&, const DeviceLimits&) {
  seen.prepared.push_back(kKernel);
  return cudaSuccess;
}
template <int kKernel>
cudaError_t launch(WriteParams& params, const DeviceLimits&, cudaStream_t) {
  seen.writes.push_back({kKernel, params});
  params.entries = -1;  // a kernel's own to change
  return cudaSuccess;
}

}  // namespace

// --- in place of what needs a device ---------------------------------------------------------------------------------

#define KVANT_DEFINE(width)                          \
  template <>                                        \
  WriteKernel write_kernel_of<width>() {             \
    return {width, &prepare<width>, &launch<width>}; \
  }
KVANT_CUDA_EACH_OF_APPEND(KVANT_DEFINE)
KVANT_CUDA_EACH_OF_APPEND_LATENTS(KVANT_DEFINE)
#undef KVANT_DEFINE

cudaError_t prepare_imported(const WriteParams& params, const DeviceLimits& limits) {
  return prepare<0>(params, limits);
}
cudaError_t launch_imported(WriteParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return launch<0>(params, limits, stream);
}
cudaError_t set_entries(const EntryBatch& batch, cudaStream_t) {
  seen.entries.push_back(batch);
  return cudaSuccess;
}
cudaError_t advance_lengths(const AdvanceBatch&, bool, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t copy_slots(const CopyBatch&, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t read_back(const ReadBackParams& params, int, cudaStream_t) {
  seen.reads.push_back(params);
  return cudaSuccess;
}
Status failed(const char* call, cudaError_t) {
  return {Code::internal, call};
}
Result<DeviceLimits> find_limits(int) {
  return DeviceLimits{};
}
Result<core::Tuning> find_tuning(int, const DeviceLimits&) {
  return core::Tuning{};
}
std::string device_remark(const DeviceLimits&, const core::Tuning&) {
  return {};
}
Transfer::~Transfer() = default;
Status Transfer::download(std::size_t, std::size_t, const Address&, const core::TakeSlots&, cudaStream_t) {
  return {};
}
Status Transfer::upload(std::size_t, std::size_t, const Address&, const core::FillSlots&, cudaStream_t) {
  return {};
}
Status Transfer::direct(cudaMemcpyKind, std::size_t, const Address&, std::span<std::byte* const>,
                        const core::SlotsDone&, cudaStream_t) {
  return {};
}

namespace {

constexpr std::int32_t kSequences = 600, kPages = 8;

core::DeviceCacheConfig config_of(Format k, Format v, codec::HeadDims dims) {
  const codec::HeadDims stored = dims.k == 100 ? codec::HeadDims{128, 128} : dims;
  core::DeviceCacheConfig c;
  c.encoded = codec::page_layout(k, v, stored, codec::is_lut(v) ? 2 : 1);
  c.exact = codec::page_layout(Format::bf16, Format::bf16, stored);
  c.layers = c.kv_heads = 2;
  c.head_dims = dims;
  c.encoded_slots = c.exact_slots = 2;
  c.max_sequences = kSequences;
  c.max_pages = kPages;
  c.ends = {1, 1};
  c.exact_dtype = Dtype::f16;
  c.k_basis = BasisKind::hadamard;
  return c;
}

std::unique_ptr<core::DeviceCache> make(const core::DeviceCacheConfig& config) {
  seen = {};
  return make_cache(config).value();
}
std::unique_ptr<core::DeviceCache> make(Format k, Format v, codec::HeadDims dims, ExactEnds ends = {1, 1}) {
  core::DeviceCacheConfig c = config_of(k, v, dims);
  c.ends = {ends.sink_pages, ends.tail_pages};
  return make(c);
}

TEST(CudaTables, TheNewestChangeOfAnEntryIsSent) {
  const auto cache = make(Format::tq4, Format::tq4, {128, 128});
  ASSERT_TRUE(cache->flush({}).ok());
  EXPECT_TRUE(seen.entries.empty());
  cache->set_page(1, 2, {7, 8});
  cache->set_page(0, 3, {5, -1});
  cache->set_page(1, 2, {-1, 9});
  cache->set_length(4, 70, 64);
  cache->set_length(4, 71, 70);
  ASSERT_TRUE(cache->flush({}).ok());
  ASSERT_EQ(seen.entries.size(), 2u);
  EXPECT_NE(seen.entries[0].entries, seen.entries[1].entries);
  const auto is = [](const EntryChange& c, std::uint32_t at, int first, int second) {
    return c.at == at && c.first == first && c.second == second;
  };
  ASSERT_EQ(seen.entries[0].count, 2);
  EXPECT_TRUE(is(seen.entries[0].change[0], 3, 5, -1));
  EXPECT_TRUE(is(seen.entries[0].change[1], kPages + 2, -1, 9));
  ASSERT_EQ(seen.entries[1].count, 1);
  EXPECT_TRUE(is(seen.entries[1].change[0], 4, 71, 70));
  ASSERT_TRUE(cache->flush({}).ok());
  EXPECT_EQ(seen.entries.size(), 2u);
}

TEST(CudaTables, ManyChangesTakeSeveralLaunches) {
  for (const int extra : {-1, 0, 1}) {
    const auto cache = make(Format::tq4, Format::tq4, {128, 128});
    const int count = kEntriesAtOnce + extra;
    for (int twice = 0; twice < 2; ++twice) {
      for (int i = 0; i < count; ++i) cache->set_length(i, i, twice);
    }
    ASSERT_TRUE(cache->flush({}).ok());
    int sent = 0;
    for (const EntryBatch& batch : seen.entries) {
      ASSERT_GT(batch.count, 0);
      for (int i = 0; i < batch.count; ++i, ++sent) {
        EXPECT_EQ(batch.change[i].at, static_cast<std::uint32_t>(sent));
        EXPECT_EQ(batch.change[i].second, 1);
      }
    }
    EXPECT_EQ(sent, count);
    EXPECT_EQ(seen.entries.size(), extra > 0 ? 2u : 1u);
  }
}

TEST(CudaWrites, ALaunchTakesSoManySequences) {
  const auto cache = make(Format::tq6, Format::tq4, {128, 128});
  EXPECT_EQ(seen.prepared, std::vector<int>({128}));
  std::vector<core::DeviceAppend> appends;
  for (std::int32_t i = 0; i < 2 * WriteParams::kMostEntries + 1; ++i) appends.push_back({i, i == 3 ? 130 : 1});
  alignas(16) std::byte rows[16];
  const TensorView keys = TensorView::contiguous(rows, Dtype::bf16, 1, 2, 128);
  const TensorView values = TensorView::contiguous(rows, Dtype::f16, 1, 2, 128);
  ASSERT_TRUE(cache->write(appends, 1, keys, values, {}).ok());
  ASSERT_EQ(seen.writes.size(), 3u);
  std::int32_t row = 0, sequence = 0;
  for (const WriteLaunched& one : seen.writes) {
    const WriteParams& p = one.params;
    EXPECT_EQ(p.sides, WriteSides::both);
    EXPECT_EQ(p.layer, 1);
    EXPECT_EQ(p.rounding, Dtype::f16);
    EXPECT_EQ(p.k.dtype, Dtype::bf16);
    EXPECT_EQ(p.v.dtype, Dtype::f16);
    EXPECT_EQ(p.k.basis, BasisKind::hadamard);
    EXPECT_EQ(p.v.basis, BasisKind::none);
    EXPECT_NE(p.non_finite, nullptr);
    EXPECT_EQ(p.list.slots, nullptr);
    const bool is_first = &one == &seen.writes.front();
    EXPECT_EQ(p.entries, &one == &seen.writes.back() ? 1 : WriteParams::kMostEntries);
    EXPECT_EQ(p.most_tokens, is_first ? 130 : 1);
    EXPECT_EQ(p.items_each, is_first ? 0 : static_cast<std::int32_t>(write_items(1, 1)));
    std::int32_t items = 0, tokens = 0;
    for (std::int32_t i = 0; i < p.entries; ++i, ++sequence) {
      EXPECT_EQ(p.entry[i].index, sequence);
      EXPECT_EQ(p.entry[i].row_begin, row);
      EXPECT_EQ(p.entry[i].item_begin, items);
      const std::int32_t count = appends[static_cast<std::size_t>(sequence)].tokens;
      items += static_cast<std::int32_t>(write_items(count, 1));
      row += count, tokens += count;
    }
    EXPECT_EQ(p.items, items);
    EXPECT_EQ(p.tokens, tokens);
  }
  EXPECT_EQ(sequence, 2 * WriteParams::kMostEntries + 1);
}

TEST(CudaWrites, SidesOfTwoHeadDimsAreWrittenOneAfterTheOther) {
  const auto cache = make(Format::tq6, Format::tq4, {192, 128}, {0, 0});
  EXPECT_EQ(seen.prepared, std::vector<int>({192, 128}));
  alignas(16) std::byte rows[16];
  const core::DeviceAppend append{0, 1};
  ASSERT_TRUE(cache
                  ->write({&append, 1}, 0, TensorView::contiguous(rows, Dtype::bf16, 1, 2, 192),
                          TensorView::contiguous(rows, Dtype::bf16, 1, 2, 128), {})
                  .ok());
  ASSERT_EQ(seen.writes.size(), 2u);
  const auto& [keys, values] = std::tie(seen.writes[0], seen.writes[1]);
  EXPECT_EQ(keys.kernel, 192);
  EXPECT_EQ(keys.params.sides, WriteSides::keys);
  EXPECT_EQ(keys.params.head_dim, 192);
  EXPECT_EQ(keys.params.v_head_dim, 128);
  EXPECT_EQ(keys.params.rotation_scale, codec::rotation_scale(192));
  EXPECT_EQ(values.kernel, 128);
  EXPECT_EQ(values.params.sides, WriteSides::values);
  EXPECT_EQ(values.params.head_dim, 128);
  EXPECT_EQ(values.params.v_head_dim, 128);
  EXPECT_EQ(values.params.rotation_scale, codec::rotation_scale(128));
  EXPECT_EQ(values.params.entries, 1);  // whatever the launch of keys made of its parameters
  EXPECT_EQ(values.params.rounding, Dtype::f32);
}

// A kernel of their own takes them for keys: its layouts and rows are the other way round, and its centre is theirs.
// Without centres they are written as all values.
TEST(CudaWrites, LatentsAroundCentresAreWrittenAsKeys) {
  for (const bool centred : {true, false}) {
    for (const bool key_centred : {true, false}) {
      core::DeviceCacheConfig config = config_of(Format::tq8, Format::tq4, {64, 512});
      const codec::PageLayout& layout = config.encoded;
      config.encoded = codec::page_layout(Format::tq8, Format::tq4, {64, 512}, 1, key_centred, centred);
      config.kv_heads = 1;
      const auto cache = make(config);
      EXPECT_EQ(seen.prepared, std::vector<int>({64, centred ? 1064512 : 512}));
      alignas(16) std::byte rows[2][16];
      const core::DeviceAppend append{0, 1};
      ASSERT_TRUE(cache
                      ->write({&append, 1}, 1, TensorView::contiguous(rows[0], Dtype::bf16, 1, 1, 64),
                              TensorView::contiguous(rows[1], Dtype::f16, 1, 1, 512), {})
                      .ok());
      ASSERT_EQ(seen.writes.size(), 2u);
      const WriteParams &keys = seen.writes[0].params, &latents = seen.writes[1].params;
      EXPECT_EQ(seen.writes[0].kernel, 64);
      EXPECT_EQ(keys.sides, WriteSides::keys);
      EXPECT_EQ(keys.k.rows, rows[0]);
      EXPECT_EQ(keys.v_head_dim, 512);
      EXPECT_EQ(codec::is_centred(keys.cache.encoded_layout), key_centred);
      EXPECT_EQ(seen.writes[1].kernel, centred ? 1064512 : 512);
      EXPECT_EQ(latents.head_dim, 512);
      EXPECT_EQ(latents.rotation_scale, codec::rotation_scale(512));
      EXPECT_EQ(latents.entries, 1);
      EXPECT_EQ(latents.sides, centred ? WriteSides::keys : WriteSides::values);
      if (!centred) continue;
      EXPECT_EQ(latents.v_head_dim, 64);
      EXPECT_EQ(latents.k.rows, rows[1]);
      EXPECT_EQ(latents.k.basis, BasisKind::none);
      EXPECT_EQ(latents.v.rows, rows[0]);
      EXPECT_EQ(latents.v.basis, BasisKind::hadamard);
      const codec::PageLayout& there = latents.cache.encoded_layout;
      EXPECT_EQ(there.k.plane_offset[0], layout.v.plane_offset[0]);
      EXPECT_EQ(there.k.scale_offset, layout.v.scale_offset);
      EXPECT_TRUE(codec::is_centred(there));
      EXPECT_EQ(codec::centre_layout(there).plane_offset[0], codec::latent_centre_layout(layout).plane_offset[0]);
      EXPECT_EQ(codec::centre_layout(there).scale_offset, codec::latent_centre_layout(layout).scale_offset);
      EXPECT_EQ(there.code_bytes + there.scale_bytes, layout.code_bytes + layout.scale_bytes);
      EXPECT_EQ(there.block_bytes, layout.block_bytes);
      EXPECT_EQ(latents.cache.exact_layout.k.plane_offset[0], config.exact.v.plane_offset[0]);
      EXPECT_EQ(latents.cache.exact_layout.k.head_dim, 512);
    }
  }
}

TEST(CudaWrites, TensorsMayBeNarrowerThanPages) {
  const auto cache = make(Format::tq6, Format::tq4, {100, 100});
  alignas(16) std::byte rows[16];
  const core::DeviceAppend append{0, 1};
  const TensorView narrow = TensorView::contiguous(rows, Dtype::bf16, 1, 2, 100);
  ASSERT_TRUE(cache->write({&append, 1}, 0, narrow, narrow, {}).ok());
  ASSERT_EQ(seen.writes.size(), 1u);
  EXPECT_EQ(seen.writes[0].kernel, 128);
  EXPECT_EQ(seen.writes[0].params.head_dim, 100);
  EXPECT_EQ(seen.writes[0].params.rotation_scale, codec::rotation_scale(128));
}

TEST(CudaWrites, ImportedFormatsHaveAKernelOfTheirOwn) {
  const auto cache = make(Format::f16, Format::lut4, {128, 128});
  EXPECT_EQ(seen.prepared, std::vector<int>({0}));
  alignas(16) std::byte rows[16];
  const core::DeviceAppend append{0, 1};
  const TensorView t = TensorView::contiguous(rows, Dtype::bf16, 1, 2, 128);
  ASSERT_TRUE(cache->write({&append, 1}, 0, t, t, {}).ok());
  ASSERT_EQ(seen.writes.size(), 1u);
  EXPECT_EQ(seen.writes[0].kernel, 0);
  EXPECT_EQ(seen.writes[0].params.sides, WriteSides::both);
}

TEST(CudaReads, TensorsAndRangesAreHandedOver) {
  const auto cache = make(Format::tq6, Format::tq4, {192, 128});
  std::byte rows[2][16];
  const MutableTensorView keys{rows[0], Dtype::bf16, {4, 2, 192}, {400, 200, 1}, 800};
  const MutableTensorView values{rows[1], Dtype::f16, {4, 2, 128}, {300, 150, 1}, 600};
  const core::DeviceRange ranges[] = {{5, 60, 130, false}, {6, 3, 3, false}, {7, 64, 65, true}};
  ASSERT_TRUE(cache->decode(ranges, 1, keys, values, {}).ok());
  ASSERT_EQ(seen.reads.size(), 1u);
  const ReadBackParams& p = seen.reads[0];
  EXPECT_EQ(p.layer, 1);
  EXPECT_EQ(p.items, 4);
  ASSERT_EQ(p.entries, 2);  // an empty range has none
  EXPECT_EQ(p.entry[1].index, 7);
  EXPECT_EQ(p.entry[1].row_begin, 70);
  EXPECT_EQ(p.entry[1].range, 2);
  EXPECT_EQ(p.entry[1].item_begin, 3);
  EXPECT_EQ(p.entry[1].before_step, 1);
  for (const auto& [side, t, basis, head_dim] :
       {std::tuple(p.side[0], keys, BasisKind::hadamard, 192), std::tuple(p.side[1], values, BasisKind::none, 128)}) {
    EXPECT_EQ(side.rows, t.data);
    EXPECT_EQ(side.token_stride, t.stride[0]);
    EXPECT_EQ(side.head_stride, t.stride[1]);
    EXPECT_EQ(side.batch_stride, t.batch_stride);
    EXPECT_EQ(side.dtype, t.dtype);
    EXPECT_EQ(side.basis, basis);
    EXPECT_EQ(side.head_dim, head_dim);
    EXPECT_EQ(side.center, nullptr);
    EXPECT_EQ(side.inverse, nullptr);
  }
}

TEST(CudaReads, ACalibratedBasisIsThatOfTheLayer) {
  BasisSet bases;
  for (std::vector<CalibratedBasis>* list : {&bases.keys, &bases.values}) {
    for (int i = 0; i < 4; ++i) {  // two layers of two heads
      const auto n = static_cast<float>(i);
      list->push_back({std::vector(64, n), std::vector(64 * 64, n + 10), std::vector(64 * 64, n + 20)});
    }
  }
  core::DeviceCacheConfig config = config_of(Format::tq6, Format::tq4, {64, 64});
  config.k_basis = BasisKind::calibrated;
  config.v_basis = BasisKind::hadamard;
  config.bases = &bases;
  const auto cache = make(config);
  alignas(16) std::byte rows[16];
  const TensorView t = TensorView::contiguous(rows, Dtype::bf16, 1, 2, 64);
  const MutableTensorView out{rows, Dtype::bf16, {1, 2, 64}, {128, 64, 1}, 0};
  const core::DeviceAppend append{0, 1};
  const core::DeviceRange range{0, 0, 1, false};
  ASSERT_TRUE(cache->write({&append, 1}, 1, t, t, {}).ok());
  ASSERT_TRUE(cache->decode({&range, 1}, 1, out, out, {}).ok());
  const WriteParams& w = seen.writes.at(0).params;
  const ReadBackParams& r = seen.reads.at(0);
  for (const int head : {0, 1}) {
    const float n = static_cast<float>(2 + head);
    EXPECT_EQ(w.k.center[head * 64 + 63], n);
    EXPECT_EQ(w.k.matrix[head * 64 * 64 + 64 * 64 - 1], n + 10);
    EXPECT_EQ(r.side[0].center[head * 64 + 63], n);
    EXPECT_EQ(r.side[0].inverse[head * 64 * 64 + 64 * 64 - 1], n + 20);
  }
  EXPECT_EQ(w.v.matrix, nullptr);
  EXPECT_EQ(r.side[1].inverse, nullptr);
}

}  // namespace
}  // namespace kvant::cuda

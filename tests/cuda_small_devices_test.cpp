// Kernels that fit devices whose blocks get 99 KiB of shared memory (compute capability 8.6, 8.9, 12.x), and those that
// plans take there. No device is needed.
#include <gtest/gtest.h>

#include <set>

#include "cuda/plan/kernels_of.hpp"
#include "support/cuda_choices.hpp"

namespace kvant::cuda {
namespace {

constexpr const char* kSmall[] = {"8.6", "8.9", "12.0"};
constexpr int kSmallBytes = 101376;

std::string name_of(const AttendKernel& one, int width) {
  return fmt::format("{} D{} {}{}", pair_name({one.k, one.v}), width_name(width), 4 * one.column_tiles,
                     one.has_eight_warps()  ? " eight warps"
                     : one.rounds_weights() ? fmt::format(" {}", one.name())
                     : one.one_stage        ? " one stage"
                                            : "");
}

// Kernels that need more, by their formats, head_dim and rows. For each of them another kernel serves.
TEST(CudaSmallDevices, DecodeKernelsThatDoNotFit) {
  const std::set<std::string> expected = {
      "f16/f16 D96 4", "f16/f16 D96 16", "f16/f16 D192 4", "f16/f16 D192 16", "f16/f16 D512 4", "f16/f16 D512 8",
      "f16/f16 D512 16", "bf16/bf16 D96 4", "bf16/bf16 D96 16", "bf16/bf16 D192 4", "bf16/bf16 D192 16",
      "bf16/bf16 D512 4", "bf16/bf16 D512 8", "bf16/bf16 D512 16",
      // 8 rows at once fit.
      "tq6/tq6 D512 16", "tq8/tq8 D512 16", "fp8/fp8 D512 16",
      // These are for compute capability 9.0.
      "tq6/tq4 D128 64 decode_sm90", "tq4/tq4 D128 64 decode_sm90",
      // These are for short work, and kernels of four warps serve in their place.
      "tq6/tq4 D128 4 eight warps", "tq6/tq4 D256 8 eight warps", "tq6/tq4 D512 4 eight warps",
      "tq6/tq4 D512 8 eight warps", "tq6/tq4 D512 16 eight warps", "tq4/tq4 D512 4 eight warps",
      "tq4/tq4 D512 8 eight warps", "tq4/tq4 D512 16 eight warps", "tq8/tq8 D512 8 eight warps"};
  std::set<std::string> found;
  for (const int width : units::attend) {
    for (const AttendKernel& one :
         kernels_of<units::attend>(width, []<int kWidth>() { return decode_kernels<kWidth>(); }).attend) {
      if (one.shared_bytes[0] > kSmallBytes) found.insert(name_of(one, width));
    }
  }
  EXPECT_EQ(found, expected);
}

// At head_dim 512 the small kernels, and the others where these fit.
TEST(CudaSmallDevices, PrefillKernelsFit) {
  for (const FormatPair& pair : instances().pairs) {
    for (const int head_dim : instances().head_dims) {
      Case c{.head_dim = head_dim, .k = pair.k, .v = pair.v, .queries = 512};
      const Asked asked(c);
      const auto rows = [&](const char* device) {
        const std::optional<TileOffer> sm80 =
            offers_of_kind(core::kPrefillSm80, offers_of(asked.work(), device_of(device))).kernel;
        return sm80 && sm80->blocks >= 1 ? sm80->rows : 0;
      };
      for (const char* device : kSmall) {
        EXPECT_EQ(rows(device) == prefill::kSmallRows, head_dim == 512) << device << " " << pair_name(pair);
        EXPECT_GE(rows(device), prefill::kSmallRows) << device << " " << pair_name(pair) << " " << head_dim;
      }
      EXPECT_GE(rows("8.0"), prefill::kSmallRows) << pair_name(pair) << " " << head_dim;
      EXPECT_GT(rows("9.0"), prefill::kSmallRows) << pair_name(pair) << " " << head_dim;
    }
  }
}

// Any pair and width of a build, at the numbers of queries that decoding, drafts and prompts have.
TEST(CudaSmallDevices, NothingIsRefusedAndNothingGeneric) {
  for (const char* device : kSmall) {
    for (const FormatPair& pair : instances().pairs) {
      for (const int width : units::attend) {
        Case c = case_of(width, {"", pair.k, pair.v});
        const std::string which = fmt::format("{} {} {}", device, pair_name(pair), width_name(width));
        for (c.queries = 1; c.queries <= 16; c.queries = c.queries == 1 ? 4 : 2 * c.queries) {
          const std::string taken = kinds(c, device);
          EXPECT_TRUE(taken == "decode" || (taken == "decode_sm80" && c.queries > 1)) << taken << " " << which;
        }
        const bool has_tiles = c.v_head_dim == 0;
        const auto is_fast = [&] {
          const std::string taken = kinds(c, device);
          return taken == "decode" || taken == "decode_sm80" || (taken == "prefill_sm80" && has_tiles);
        };
        c.queries = 512;
        EXPECT_TRUE(is_fast()) << kinds(c, device) << " " << which;
        c.length = c.queries = 4096;
        EXPECT_TRUE(is_fast()) << kinds(c, device) << " " << which;
        if (!has_tiles) continue;
        c.fresh_keys = true;
        EXPECT_EQ(kinds(c, device), "prefill_sm80") << which;
      }
    }
  }
}

// As many rows at once as fit, and both stages where they do.
TEST(CudaSmallDevices, DecodeKernelsTakeWhatFits) {
  const auto taken = [](Case c, const char* device) {
    const Asked asked(c);
    const Offers offers = offers_of(asked.work(), device_of(device));
    return offers.decode[static_cast<std::size_t>(choose(asked.work(), offers).value().decode)];
  };
  for (const char* device : kSmall) {
    for (const int head_dim : {96, 192, 512}) {
      Case c{.head_dim = head_dim, .k = Format::bf16, .v = Format::bf16};
      EXPECT_TRUE(taken(c, device).one_stage) << device << " " << head_dim;
      EXPECT_FALSE(taken(c, "9.0").one_stage) << head_dim;
      EXPECT_EQ(taken(c, device).rows(), 4);
      c.queries = 4;
      EXPECT_EQ(taken(c, device).rows(), head_dim == 512 ? 8 : 16) << device << " " << head_dim;
      EXPECT_EQ(taken(c, "9.0").rows(), 16) << head_dim;
    }
    EXPECT_FALSE(taken({.k = Format::bf16, .v = Format::bf16}, device).one_stage) << device;
    EXPECT_EQ(taken({.head_dim = 512, .k = Format::tq8, .v = Format::tq8, .queries = 4}, device).rows(), 8);
    EXPECT_FALSE(taken({.length = 2048}, device).has_eight_warps()) << device;
  }
}

TEST(CudaSmallDevices, ADeviceWithTooLittleForAnyKernelIsRefused) {
  Device device = device_of("8.6");
  device.limits.shared_bytes = 32 * 1024;
  const Result<Chosen> chosen = try_choose({.k = Format::bf16, .v = Format::bf16}, device);
  ASSERT_FALSE(chosen.ok());
  EXPECT_EQ(chosen.message(),
            "decode kernels need 38912 bytes of shared memory a block for bf16/bf16 at head_dim 128, the device has "
            "32768; use the slower kernel = \"generic\", or device = \"cpu\"");
}

}  // namespace
}  // namespace kvant::cuda

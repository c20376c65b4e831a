// Bytes never change once released. tests/frozen/hashes.txt holds an FNV-1a hash of a page block for every coded format
// and head size, and one of the rotation's floats; a new format adds lines, no line is ever edited.
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "codec/basis.hpp"
#include "codec/centre.hpp"
#include "codec/store.hpp"
#include "support/draw.hpp"
#include "support/paths.hpp"

namespace kvant {
namespace {

using testing_support::Draw;

std::string hash_of(const void* data, std::size_t n) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (std::size_t i = 0; i < n; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3u;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(h));
  return text;
}

// Vectors of exact floats, with the awkward ones among them.
std::vector<float> token(Draw& draw, int t, int head_dim) {
  auto x = draw.exact(head_dim);
  const auto n = static_cast<std::size_t>(head_dim);
  if (t == 5) x.assign(n, 0.0f);
  if (t == 6) x[n / 2] = std::numeric_limits<float>::infinity();
  if (t == 7) x.assign(n, 65504.0f);
  if (t == 11) x[3] *= 64.0f;
  for (float& v : x) v *= t == 8 ? 0x1p-18f : t == 9 ? 0x1p12f : 1.0f;
  return x;
}

std::string block_hash(Format f, int head_dim) {
  const codec::PageLayout page = codec::page_layout(f, f, head_dim);
  std::vector<std::byte> block(page.block_bytes);
  std::vector<float> levels;
  for (int i = 0; codec::is_lut(f) && i < 1 << codec::format_bits(f); ++i) {
    levels.push_back((static_cast<float>(i) - 0.5f * static_cast<float>((1 << codec::format_bits(f)) - 1)) * 0x1p-3f);
  }
  codec::BasisRef basis;
  basis.kind = codec::is_tq(f) ? BasisKind::hadamard : BasisKind::none;
  Draw draw(static_cast<std::uint64_t>(head_dim));
  float y[codec::kMaxHeadDim];
  for (int t = 0; t < kPageTokens; ++t) {
    codec::to_basis(basis, head_dim, token(draw, t, head_dim).data(), y);
    codec::store_row_k(page.k, head_dim, block.data(), t, y, levels.data());
    codec::to_basis(basis, head_dim, token(draw, t, head_dim).data(), y);
    codec::store_row_v(page.v, head_dim, block.data(), t, y, levels.data());
  }
  return hash_of(block.data(), block.size());
}

// Pages as they were before keys could refuse centres: keys around the mean of those that are finite. Their keys as
// they are read are hashed, too ("+page_read").
std::string centred_hash(Format f, int head_dim, std::string* read = nullptr) {
  const codec::PageLayout page = codec::page_layout(f, Format::tq2, head_dim, 1, true);
  std::vector<std::byte> block(page.block_bytes);
  codec::BasisRef basis;
  basis.kind = codec::is_tq(f) ? BasisKind::hadamard : BasisKind::none;
  Draw draw(static_cast<std::uint64_t>(head_dim));
  const auto d = static_cast<std::size_t>(head_dim);
  std::vector<float> keys;
  for (int t = 0; t < kPageTokens; ++t) {
    for (const float x : draw.exact(head_dim)) keys.push_back(x + 4);
  }
  float y[codec::kMaxHeadDim], c[codec::kMaxHeadDim];
  codec::MeanOfRows mean(head_dim, y);
  for (std::size_t t = 0; t < kPageTokens; ++t) mean.add(keys.data() + t * d);
  mean.finish(basis);
  codec::store_centre(codec::centre_layout(page), head_dim, block.data(), y);
  codec::load_centre(codec::centre_layout(page), head_dim, block.data(), c);
  for (int t = 0; t < kPageTokens; ++t) {
    codec::to_basis(basis, head_dim, keys.data() + static_cast<std::size_t>(t) * d, y);
    for (std::size_t i = 0; i < d; ++i) y[i] -= c[i];
    codec::store_row_k(page.k, head_dim, block.data(), t, y, nullptr);
  }
  std::vector<float> keys_read;
  for (int t = 0; t < kPageTokens; ++t) {
    codec::load_vector(page, false, block.data(), t, nullptr, y);
    keys_read.insert(keys_read.end(), y, y + head_dim);
  }
  if (read != nullptr) *read = hash_of(keys_read.data(), keys_read.size() * sizeof(float));
  // The centre of a page that follows it token by token.
  codec::mean_of_page(page, false, block.data(), y);
  std::vector<std::byte> next(page.block_bytes);
  codec::store_centre(codec::centre_layout(page), head_dim, next.data(), y);
  block.insert(block.end(), next.begin(), next.end());
  return hash_of(block.data(), block.size());
}

// A first page: keys around the first of them, which is an attention sink here, so that most refuse it; with zeros,
// small keys and a key that has no number. Its keys as they are read, and the centre of a page that follows.
std::string refusing_hash(Format f, int head_dim) {
  const codec::PageLayout page = codec::page_layout(f, Format::tq2, head_dim, 1, true);
  std::vector<std::byte> block(page.block_bytes);
  codec::BasisRef basis;
  basis.kind = codec::is_tq(f) ? BasisKind::hadamard : BasisKind::none;
  Draw draw(static_cast<std::uint64_t>(head_dim) + 2);
  float y[codec::kMaxHeadDim], c[codec::kMaxHeadDim];
  std::vector<float> read;
  for (int t = 0; t < kPageTokens; ++t) {
    std::vector<float> key = draw.exact(head_dim);
    for (int i = 0; i < head_dim; ++i) key[static_cast<std::size_t>(i)] += t == 0 ? 8.0f : t % 8 == 3 ? 5.0f : 1.0f;
    if (t == 20) key.assign(key.size(), 0.0f);
    if (t == 21) key[1] = std::numeric_limits<float>::infinity();
    if (t == 22) key[1] = -0x1p33f;
    codec::to_basis(basis, head_dim, key.data(), y);
    if (t == 0) {
      codec::MeanOfRows first(head_dim, c);
      first.add(key.data());
      first.finish(basis);
      codec::store_centre(codec::centre_layout(page), head_dim, block.data(), c);
      codec::load_centre(codec::centre_layout(page), head_dim, block.data(), c);
    }
    codec::store_vector(page, false, block.data(), t, y, c);
    codec::load_vector(page, false, block.data(), t, nullptr, y);
    if (t != 21 && t != 22) read.insert(read.end(), y, y + head_dim);
  }
  const std::string first = hash_of(block.data(), block.size());
  // Two keys that can be encoded instead, so that the page has a mean.
  for (const int t : {21, 22}) codec::store_vector(page, false, block.data(), t, c, c);
  codec::mean_of_page(page, false, block.data(), y);
  std::vector<std::byte> next(page.block_bytes);
  codec::store_centre(codec::centre_layout(page), head_dim, next.data(), y);
  return first + "/" + hash_of(next.data(), next.size()) + "/" + hash_of(read.data(), read.size() * sizeof(float));
}

std::string rotation_hash(int head_dim) {
  Draw draw(static_cast<std::uint64_t>(head_dim) + 1);
  auto x = draw.exact(head_dim), y = draw.exact(head_dim);
  codec::rotate(x.data(), head_dim);
  codec::rotate_back(y.data(), head_dim);
  x.insert(x.end(), y.begin(), y.end());
  return hash_of(x.data(), x.size() * sizeof(float));
}

TEST(Frozen, HashesHaveNotChanged) {
  std::map<std::string, std::string> frozen;
  std::ifstream file(test::source_path("tests/frozen/hashes.txt"));
  for (std::string name, head_dim, hash; file >> name >> head_dim >> hash;) frozen[name + " " + head_dim] = hash;
  const auto check = [&](const std::string& name, const std::string& hash) {
    EXPECT_EQ(frozen[name], hash) << "line now: " << name << " " << hash;
  };
  for (const int head_dim : supported_head_dims()) {
    check("rotation " + std::to_string(head_dim), rotation_hash(head_dim));
    for (const FormatInfo& info : formats()) {
      if (info.dense) continue;
      check(std::string(info.name) + " " + std::to_string(head_dim), block_hash(info.format, head_dim));
      if (!codec::takes_centre(info.format)) continue;
      std::string read;
      check(std::string(info.name) + "+page " + std::to_string(head_dim), centred_hash(info.format, head_dim, &read));
      check(std::string(info.name) + "+page_read " + std::to_string(head_dim), read);
      check(std::string(info.name) + "+refusing " + std::to_string(head_dim), refusing_hash(info.format, head_dim));
    }
  }
}

// The worked example of docs/formats.md, printed the way it stands there.
std::string worked_example() {
  constexpr int kDim = 32;
  const codec::PageLayout page = codec::page_layout(Format::tq4, Format::tq4, kDim);
  std::vector<std::byte> block(page.block_bytes);
  std::vector<float> x(kDim), y(kDim);
  for (int i = 0; i < kDim; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>((i * i) % 11 - 5);
  y = x;
  codec::rotate(y.data(), kDim);
  std::vector<std::uint8_t> codes(kDim);
  std::uint16_t scale = 0;
  codec::encode(Format::tq4, kDim, y.data(), codes.data(), &scale);
  codec::store_row_k(page.k, kDim, block.data(), 2, y.data(), nullptr);
  codec::store_row_v(page.v, kDim, block.data(), 3, y.data(), nullptr);

  std::ostringstream out;
  const auto line = [&](const char* title, auto each, int count) {
    out << title;
    for (int i = 0; i < count; ++i) out << each(static_cast<std::size_t>(i));
    out << "\n";
  };
  const auto print = [](const char* format, auto value) {
    char text[32];
    std::snprintf(text, sizeof text, format, value);
    return std::string(text);
  };
  const auto byte = [&](std::size_t at) { return print(" %02x", static_cast<unsigned>(block[at])); };
  line(
      "x           ", [&](std::size_t i) { return print(" %g", static_cast<double>(x[i])); }, kDim);
  line(
      "y[0..7]     ", [&](std::size_t i) { return print(" %.5f", static_cast<double>(y[i])); }, 8);
  line(
      "codes       ", [&](std::size_t i) { return print(" %x", static_cast<unsigned>(codes[i])); }, kDim);
  out << "g            " << print("%.7f", static_cast<double>(base::f16_to_f32(scale))) << " = half "
      << print("%04x", scale) << "\n";
  out << "key, token 2, bytes " << page.k.plane_offset[0] + 2 * 16 << " and on:\n";
  line(
      "            ", [&](std::size_t i) { return byte(page.k.plane_offset[0] + 2 * 16 + i); }, 16);
  out << "its scale, bytes " << page.k.scale_offset + 4 << " and on:\n";
  line(
      "            ", [&](std::size_t i) { return byte(page.k.scale_offset + 4 + i); }, 2);
  out << "value, token 3, channels 0 to 3, bytes " << page.v.plane_offset[0] << " and on:\n";
  line(
      "            ", [&](std::size_t i) { return byte(page.v.plane_offset[0] + i); }, 16);
  out << "its scale, bytes " << page.v.scale_offset + 6 << " and on:\n";
  line(
      "            ", [&](std::size_t i) { return byte(page.v.scale_offset + 6 + i); }, 2);
  out << "the block has " << page.block_bytes << " bytes\n";
  return out.str();
}

TEST(Frozen, TheExampleInTheDocumentIsTrue) {
  std::ifstream file(test::source_path("docs/formats.md"));
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(worked_example()), std::string::npos) << "the example is now:\n" << worked_example();
}

}  // namespace
}  // namespace kvant

// Sequences of a cache's table outside of the cache: pages have numbers of their own, from 0 in the order of first use,
// so that equal tables have equal images. Pages that sequences share have one number. A snapshot is an image and the
// bytes of its slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/cache/table.hpp"

namespace kvant::core {

/// A number that is not negative, as an index.
constexpr std::size_t to_size(std::int64_t n) noexcept {
  return static_cast<std::size_t>(n);
}

struct TableImage {
  /// -1: no such copy. A page that the window released has neither, and no identity.
  struct Page {
    std::int32_t exact = -1;
    std::int32_t encoded = -1;
    std::int32_t identity = -1;
    bool operator==(const Page&) const = default;
  };
  struct Sequence {
    std::int64_t length = 0;
    std::int64_t first_page = 0;  // as CacheTable::Sequence has it
    std::vector<Page> pages;
  };
  std::vector<Sequence> sequences;
  std::int32_t exact = 0, encoded = 0, identities = 0;  // how many numbers there are
  const char* origin = "the snapshot";                  // for messages
};

/// Makes an image of pages that have numbers of another kind: slots of a cache, or numbers of another image.
class ImageBuilder {
 public:
  struct Source {
    std::int32_t number;
    int tokens;  // the most that a sequence has in it
  };
  void add(std::int64_t length, std::int64_t first_page) { image_.sequences.push_back({length, first_page, {}}); }
  /// The next page of the sequence that was added last.
  void add_page(const TableImage::Page& page);

  [[nodiscard]] const TableImage& image() const noexcept { return image_; }
  /// The former numbers of the image's exact or encoded copies.
  [[nodiscard]] const std::vector<Source>& sources(Pool pool) const noexcept {
    return pool == Pool::exact ? exact_.sources : encoded_.sources;
  }

 private:
  struct Numbers {
    std::unordered_map<std::int32_t, std::int32_t> known;
    std::vector<Source> sources;
    std::int32_t of(std::int32_t number, int tokens);
  };
  TableImage image_;
  Numbers exact_, encoded_, identities_;
};

/// An image of the sequences at these places of `image`, all of which exist.
ImageBuilder subset(const TableImage& image, std::span<const std::int64_t> places);

}  // namespace kvant::core

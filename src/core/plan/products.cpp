#include "core/plan/products.hpp"

#include "codec/traits.hpp"
#include "core/fmt.hpp"
#include "kvant/codec.hpp"

namespace kvant::core {
namespace {

// Pairs of tq formats that are multiplied in 8 bits unless 16 are requested: in real models this adds at most
// a fifth to the KL divergence that the formats themselves cost (docs/lab/cpu.md).
struct Added {
  int k_bits, v_bits;
  int percent;  // the most that was measured, and 1 at least
};
constexpr Added kAdded[] = {{2, 2, 1}, {3, 3, 2}, {4, 3, 8},  {4, 4, 17}, {5, 4, 10},
                            {5, 5, 1}, {6, 4, 7}, {6, 6, 18}, {8, 4, 4},  {8, 6, 13}};

}  // namespace

// A query of one digit is off by 2^-8 of its largest element, which without a rotation may be far larger than the
// others. Without centres keys may be large and alike, and all of a row's scores would be off by the same, beside those
// of exact pages. Keys of 8 bits are closer than one digit.
Result<Products> choose_products(int asked, Format k, Format v, bool is_even, bool is_faster) {
  if (asked == 8 && (!codec::is_tq(k) || !codec::is_tq(v))) {
    return {Code::unsupported,
            fmt::format("products is 8, but the cache stores {}/{}: only integer levels (tq formats for keys and "
                        "values) are multiplied in 8 bits; leave it 0",
                        format_info(k).name, format_info(v).name)};
  }
  Products eight{.bits = 8, .two_digits = !is_even || codec::format_bits(k) == 8};
  if (asked == 8) return eight;
  if (asked == 16) return Products{};
  if (!codec::is_tq(k) || !codec::is_tq(v)) return Products{.why = "chosen, since only tq formats are multiplied in 8"};
  if (!is_faster) return Products{.why = "chosen, since 8 are not faster on this instruction set"};
  for (const Added& pair : kAdded) {
    if (pair.k_bits != codec::format_bits(k) || pair.v_bits != codec::format_bits(v)) continue;
    eight.why = "chosen", eight.added_percent = pair.percent;
    return eight;
  }
  return Products{.why = "chosen, since 8 are not known to add little to these formats' own loss"};
}

std::string products_line(const Products& products) {
  std::string why = products.why;
  if (products.added_percent > 0) {
    why +=
        fmt::format(", since this adds at most {} % to the formats' own loss of real models", products.added_percent);
  }
  if (products.bits != 8) return fmt::format("products   16 bits: {}\n", why);
  return fmt::format(
      "products   8 bits: {}; queries as {}, weights as 8 bits of the largest of 64 keys, as 15 or 16 where few keys "
      "have most of the weight\n",
      why, products.two_digits ? "two digits (15 bits and sign)" : "one digit (7 bits and sign)");
}

}  // namespace kvant::core

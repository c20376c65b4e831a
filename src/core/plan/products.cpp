#include "core/plan/products.hpp"

#include "codec/traits.hpp"
#include "core/fmt.hpp"
#include "kvant/codec.hpp"

namespace kvant::core {

// A query of one digit is off by 2^-8 of its largest element. Without centres keys may be large and alike, and all of a
// row's scores would be off by the same, beside those of exact pages. Keys of 8 bits are closer than one digit.
Result<Products> choose_products(int asked, Format k, Format v, bool centred) {
  if (asked != 8) return Products{};
  if (!codec::is_tq(k) || !codec::is_tq(v)) {
    return {Code::unsupported,
            fmt::format("products is 8, but the cache stores {}/{}: only integer levels (tq formats for keys and "
                        "values) are multiplied in 8 bits; leave it 0",
                        format_info(k).name, format_info(v).name)};
  }
  return Products{.bits = 8, .two_digits = !centred || codec::format_bits(k) == 8};
}

std::string products_line(const Products& products, int asked) {
  const char* why = asked == 0 ? "chosen" : "forced";
  if (products.bits != 8) return fmt::format("products   16 bits: {}\n", why);
  return fmt::format("products   8 bits: {}; queries as {}, weights as 8 bits of the largest of 64 keys\n", why,
                     products.two_digits ? "two digits (15 bits and sign)" : "one digit (7 bits and sign)");
}

}  // namespace kvant::core

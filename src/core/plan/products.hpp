// How pages of tq formats are multiplied where many rows share them: the choice of AttentionOptions::products.
#pragma once

#include <string>

#include "kvant/result.hpp"
#include "kvant/types.hpp"

namespace kvant::core {

struct Products {
  int bits = 16;
  // Queries are two digits, which together have 15 bits and a sign (codec/digits.hpp). With 8 bits only.
  bool two_digits = false;
};

// `asked`: 8, 16, or 0, which is 16 so far. `centred`: key pages have centres.
Result<Products> choose_products(int asked, Format k, Format v, bool centred);

// A line of explain().
std::string products_line(const Products& products, int asked);

}  // namespace kvant::core

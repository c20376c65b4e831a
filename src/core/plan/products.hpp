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
  // For explain(). Plans are made for every step, and most of them are never explained.
  const char* why = "forced";
  int added_percent = 0;  // at most so much of the formats' own loss; 0: not known, or of no account
};

// `asked`: 8, 16, or 0, which takes 8 where these are known to be faster and to cost little. `is_even`: keys are
// rotated and have centres. `is_faster`: the instruction set multiplies bytes faster than it does floats.
Result<Products> choose_products(int asked, Format k, Format v, bool is_even, bool is_faster);

// A line of explain().
std::string products_line(const Products& products);

}  // namespace kvant::core

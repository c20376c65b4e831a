// Every tolerance of the attention tests, each with where it comes from. A test that needs another number adds it here.
#pragma once

#include <string_view>

namespace kvant::test::tolerance {

// Relative L2 unless stated otherwise.

/// Kernel against attention over the decoded vectors, both sides in float arithmetic (f32, f16, bf16, fp8 widen
/// exactly). Sums of n f32 products lose about sqrt(n) * 2^-24 = 1.9e-6 at n = 1025; exp and the merge of splits a few
/// 2^-23 more. Measured: 8e-7 on Gaussian inputs, 2e-6 at most.
inline constexpr double kFloat = 1e-5;

/// Logits with a soft cap, f32 caches of 200 keys, no matrix unit: of kFloat's sums there are 64 products and 200
/// weights, and the cap itself is off by 3e-7 of a logit at most (cpu/simd/math.hpp).
inline constexpr double kSoftcap = 2e-6;

/// Products of 8 bits: a weight is off by half a 255th of the largest of its page, and a query of one digit by half a
/// 127th of its largest element, which moves a logit of standard deviation 1 by 0.007. Measured: 1.2e-2.
inline constexpr double kByteProducts = 2.5e-2;
inline constexpr double kByteLse = 5e-2;
/// On a device keys of exact pages are bytes, too. Measured, one key of 256 elements: 5.5e-2.
inline constexpr double kCudaByteLse = 8e-2;

/// The same on machines that multiply many rows by a matrix unit: weights and values are two bf16 each, products at
/// most 3 * 2^-18 off, queries three; of a float and integer levels both sides are less exact (kCoded).
inline constexpr double kMatrixFloat = 5e-5;
/// The error of weights and values in two bf16 each: 2^-18 of a product each in root mean square would be 5e-6, one
/// after another. Measured: 2.2e-6 to 4.1e-6.
inline constexpr double kMatrixWeights = 6e-6;

/// The same with a coded side. Queries as two 7-bit digits: 2^-15 of the largest coordinate, about 4e-5 of the query's
/// norm at D = 128; a logit of standard deviation 1 moves by that, a weight by as much relative; probabilities as two
/// digits relative to their tile's maximum: 2^-15 again. 2e-4 leaves a factor of two for heavy-tailed logits. Measured:
/// 6e-5 on Gaussian inputs, 1.2e-4 at most on the others.
inline constexpr double kCoded = 2e-4;

/// lse is compared absolutely, against this times (1 + |lse|): it is a logit, and has the error of one, 4e-5 of its
/// size where a single key dominates, far less where many average. Measured: 1e-6 and 2.2e-5 at most.
inline constexpr double kLseFloat = 1e-5;
inline constexpr double kLseCoded = 5e-5;

/// CUDA, both sides in float formats: queries and probabilities are split into terms that tensor cores take (two f16 or
/// bf16 ones leave 2^-17 and 2^-16 of each), sums are f32. One rounding of a probability to bf16 alone would be 2e-3.
inline constexpr double kCudaFloat = 1e-4;
/// lse on CUDA, as above times (1 + |lse|): the error of a logit, from queries in two terms or digits.
inline constexpr double kCudaLse = 1e-4;
/// With page centres: all keys of a page share the error of a query's product with their centre, which no average
/// makes smaller. A query of 16 bits is 3e-5 off an element in root mean square, and a centre of length 18 (keys of
/// D 64 with an offset of 2, around the first of them) makes 7e-5 of that. Measured: 1.4e-4.
inline constexpr double kCudaCentredLse = 3e-4;
/// Weights, and queries beside exact pages, are rounded to bf16 or f16.
inline constexpr double kCudaPrefill = 8e-3;
inline constexpr double kCudaPrefillLse = 6e-3;
/// The same where all keys are exact and loud (|q| |k| = 5.5 D): a bf16 query moves a logit by 4e-3 in root mean
/// square, and some rows see few keys. Measured: 1.3e-2 in 150 random cases.
inline constexpr double kCudaFreshLse = 2.5e-2;
/// The generic kernel on CUDA: sums in f32, exponentials of 2 to 2^-22. A logit of 100 has steps of 2^-17.
inline constexpr double kCudaGeneric = 1e-5;
inline constexpr double kCudaGenericLse = 1e-5;
/// On either backend, over thousands of rows some of which see a key or two, so that no average makes a logit's error
/// smaller. A query's coordinates are off by up to half a step of the largest one's 2^-15, which moves a logit of N(0,
/// 1) vectors by 3e-5 in root mean square, and one of loud vectors (|q| |k| = 5.5 D) by 1.7e-4. Measured: 1.5e-4 at
/// most in 7900 random cases on CUDA, 5.0e-5 in 10000 on the CPU.
inline constexpr double kLseOfFewKeys = 4e-4;

/// Stored golden outputs (issue bars). TurboQuant: the kernel error above, against queries that are not rounded. bf16:
/// dense f32 accumulation over 160 keys at D = 512, with sums of up to 512 products of loud channels.
inline constexpr double kGoldenTurboQuant = 3e-4;
inline constexpr double kGoldenBf16 = 2e-5;
inline constexpr double kGoldenBf16Prefill = 2e-3;  // weights in bf16

/// Our float64 reference against theirs, compared as floats: 2^-24 of rounding, and the scale in their files has nine
/// decimal digits (5e-10 relative, times logits of up to 60).
inline constexpr double kGoldenReference = 2e-7;

/// Imported vectors, decoded: one float product of a level and a scale, each rounded once.
inline constexpr double kGoldenDecode = 2e-7;

/// Two legal ways to compute the same thing (other splits, other ISA, several queries at once or one by one): each
/// within the kernel error of the truth, so within twice that of each other.
inline constexpr double kTwoWays = 2;

/// A row whose every key carries -65504: an f32 logit near 65504 has steps of 2^-8 (0.0039), half of which is the error
/// of each logit, uniform: 0.0011 root mean square, and the output moves by that relative, twice for two splits.
inline constexpr double kAllAtMinus65504 = 5e-3;

/// Codec, loose: attention output of a cache against the true inputs, all tokens encoded, Gaussian inputs whose logits
/// have standard deviation 1. With relative errors e_k, e_v of the vectors (square root of the distortions of
/// docs/formats.md, "Distortion"), output error is about sqrt(e_k^2 * (1 + e_v^2) + e_v^2). Times 1.5 for small
/// samples. A dense format's is its rounding: 2^-11 and 2^-8, times the same.
constexpr double vector_error(std::string_view format) {
  if (format == "f32") return 1e-5;
  if (format == "f16") return 4.9e-4;
  if (format == "bf16") return 3.91e-3;
  if (format == "fp8") return 0.0361;  // e4m3 rounds to 2^-4 at most, 0.58 of it in root mean square
  if (format == "tq2") return 0.3428;  // sqrt(0.1175)
  if (format == "tq3") return 0.1844;  // sqrt(0.0340)
  if (format == "tq4") return 0.0949;  // sqrt(0.0090)
  if (format == "tq5") return 0.0485;  // sqrt(0.00235)
  if (format == "tq6") return 0.0259;  // sqrt(0.00067)
  if (format == "tq8") return 0.0071;  // sqrt(0.00005)
  if (format == "lut4") return 0.11;   // tables of set_levels (world.hpp), measured below this
  if (format == "lut5") return 0.06;
  if (format == "lut6") return 0.03;
  if (format == "lut8") return 0.01;
  return 0;
}

}  // namespace kvant::test::tolerance

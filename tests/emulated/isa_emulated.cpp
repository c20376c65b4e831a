// An instruction set that no machine has, so that cpu/attend/matrix.hpp is tested everywhere: many rows on a matrix
// unit in plain C++, between registers of sixteen lanes as AVX-512 has them; the rest as the best instruction set of
// this machine. Compiled with KVANT_ISA=emulated.
#include <atomic>

#include "cpu/attend/attend_matrix.hpp"
#include "cpu/simd/scalar.hpp"

namespace kvant::cpu {
inline namespace emulated {

// The verbs that the path for many rows uses, on two registers of eight lanes.
struct Sixteen {
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  struct F {
    Simd::F half[2];
  };
  struct I {
    Simd::I half[2];
  };
  template <class Fn>
  static KVANT_INLINE F both(Fn fn) {
    return {{fn(0), fn(1)}};
  }
  template <class Fn>
  static KVANT_INLINE I bothi(Fn fn) {
    return {{fn(0), fn(1)}};
  }
  static KVANT_INLINE const std::byte* bytes(const void* p, std::size_t offset) {
    return static_cast<const std::byte*>(p) + offset;
  }

  static KVANT_INLINE F loadf(const float* p) {
    return both([&](int i) { return Simd::loadf(p + 8 * i); });
  }
  static KVANT_INLINE void storef(float* p, F a) {
    for (int i = 0; i < 2; ++i) Simd::storef(p + 8 * i, a.half[i]);
  }
  static KVANT_INLINE F load_f16(const void* p) {
    return both([&](int i) { return Simd::load_f16(bytes(p, i == 0 ? 0 : 16)); });
  }
  static KVANT_INLINE I loadi(const void* p) { return load_words(p, 32); }
  static KVANT_INLINE void storei(void* p, I a) { __builtin_memcpy(p, &a, sizeof a); }
  static KVANT_INLINE I load_words(const void* p, std::size_t step) {
    return bothi([&](int i) { return Simd::loadi(bytes(p, i == 0 ? 0 : step)); });
  }
  static KVANT_INLINE I widen_bytes(const void* p, std::size_t step) {
    return bothi([&](int i) { return Simd::widen_bytes(bytes(p, i == 0 ? 0 : step), 0); });
  }
  static KVANT_INLINE I repeat_bytes(const void* p, std::size_t step) {
    return bothi([&](int i) { return Simd::repeat_bytes(bytes(p, i == 0 ? 0 : step), 0); });
  }
  static KVANT_INLINE Simd::I part(I a, int which) { return a.half[which]; }

#define KVANT_BOTH_HALVES(form, type, name)                               \
  static KVANT_INLINE type name(type a, type b) {                         \
    return form([&](int i) { return Simd::name(a.half[i], b.half[i]); }); \
  }
  KVANT_BOTH_HALVES(both, F, add)
  KVANT_BOTH_HALVES(both, F, sub)
  KVANT_BOTH_HALVES(both, F, mul)
  KVANT_BOTH_HALVES(both, F, div)
  KVANT_BOTH_HALVES(both, F, max)
  KVANT_BOTH_HALVES(bothi, I, addi)
  KVANT_BOTH_HALVES(bothi, I, subi)
  KVANT_BOTH_HALVES(bothi, I, and_)
  KVANT_BOTH_HALVES(bothi, I, or_)
  KVANT_BOTH_HALVES(bothi, I, xor_)
  KVANT_BOTH_HALVES(bothi, I, andnot)
  KVANT_BOTH_HALVES(bothi, I, lookup16)
  KVANT_BOTH_HALVES(bothi, I, equal_bytes)
#undef KVANT_BOTH_HALVES
  static KVANT_INLINE F setf(float x) {
    return both([&](int) { return Simd::setf(x); });
  }
  static KVANT_INLINE I seti(std::int32_t x) {
    return bothi([&](int) { return Simd::seti(x); });
  }
  static KVANT_INLINE F fma(F a, F b, F c) {
    return both([&](int i) { return Simd::fma(a.half[i], b.half[i], c.half[i]); });
  }
  static KVANT_INLINE I less(F a, F b) {
    return bothi([&](int i) { return Simd::less(a.half[i], b.half[i]); });
  }
  static KVANT_INLINE float reduce_add(F a) {
    return Simd::reduce_add(Simd::add(a.half[0], a.half[1]));
  }
  static KVANT_INLINE float reduce_max(F a) {
    return Simd::reduce_max(Simd::max(a.half[0], a.half[1]));
  }
  template <int K>
  static KVANT_INLINE I shl(I a) {
    return bothi([&](int i) { return Simd::shl<K>(a.half[i]); });
  }
  template <int K>
  static KVANT_INLINE I shr(I a) {
    return bothi([&](int i) { return Simd::shr<K>(a.half[i]); });
  }
  static KVANT_INLINE I even_bytes(I a) {
    return bothi([&](int i) { return Simd::even_bytes(a.half[i]); });
  }
  static KVANT_INLINE I odd_bytes(I a) {
    return bothi([&](int i) { return Simd::odd_bytes(a.half[i]); });
  }
  static KVANT_INLINE F as_f(I a) {
    return both([&](int i) { return Simd::as_f(a.half[i]); });
  }
  static KVANT_INLINE I as_i(F a) {
    return bothi([&](int i) { return Simd::as_i(a.half[i]); });
  }
  static KVANT_INLINE F to_f(I a) {
    return both([&](int i) { return Simd::to_f(a.half[i]); });
  }
};

template <>
struct WideOf<Simd> {
  using type = Sixteen;
};

using Row = float __attribute__((vector_size(64)));
struct TileFloats {
  Row row[16];
};

static KVANT_INLINE float flushed(float x) {
  return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x;
}

// Most of the time of the tests that use the unit: 0.4 us, and 0.9 us without wider registers.
#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
__attribute__((noinline)) static void
add_products(const TileFloats& a_even, const TileFloats& a_odd, const TileFloats& b_even, const TileFloats& b_odd,
             TileFloats& sums) {
  for (int row = 0; row < 16; ++row) {
    Row even{}, odd{};
    for (int word = 0; word < 16; ++word) {
      even += a_even.row[row][word] * b_even.row[word];
      odd += a_odd.row[row][word] * b_odd.row[word];
    }
    const Row sum = sums.row[row] + (even + odd);
    for (int column = 0; column < 16; ++column) sums.row[row][column] = flushed(sum[column]);
  }
}

// Eight tile registers of 16 rows of 16 words: 0 to 3 hold sums, the others pairs of bf16, which are kept as floats.
// As the manual of TDPBF16PS says, denormals count as zero, among operands and among sums (here the final ones), and
// the products of even and of odd elements are added up apart.
struct Tiles {
  static constexpr int kSums = 4;
  static inline thread_local TileFloats sum[kSums], even[8 - kSums], odd[8 - kSums];
  static inline thread_local std::uint8_t bytes[8 - kSums][16][64];
  static inline thread_local bool is_configured = false;

  static void configure() { is_configured = true; }
  static void release() { is_configured = false; }
  template <int N>
  static void zero() {
    static_assert(N < kSums);
    if (!is_configured) __builtin_trap();  // as the machine would
    sum[N] = {};
  }
  template <int N>
  static void load(const void* p, std::size_t row_bytes) {
    if (!is_configured) __builtin_trap();
    for (std::size_t row = 0; row < 16; ++row) {
      const char* from = static_cast<const char*>(p) + row * row_bytes;
      if constexpr (N < kSums) {
        __builtin_memcpy(&sum[N].row[row], from, 64);
      } else {
        std::uint32_t words[16];
        __builtin_memcpy(words, from, 64);
        __builtin_memcpy(bytes[N - kSums][row], from, 64);
        for (int word = 0; word < 16; ++word) {
          even[N - kSums].row[row][word] = from_bf16(words[word] << 16);
          odd[N - kSums].row[row][word] = from_bf16(words[word] & 0xFFFF0000u);
        }
      }
    }
  }
  template <int N>
  static void store(void* p, std::size_t row_bytes) {
    static_assert(N < kSums);
    for (std::size_t row = 0; row < 16; ++row)
      __builtin_memcpy(static_cast<char*>(p) + row * row_bytes, &sum[N].row[row], 64);
  }
  template <int kSum, int kRows, int kColumns>
  static void dot() {
    add_products(even[kRows - kSums], odd[kRows - kSums], even[kColumns - kSums], odd[kColumns - kSums], sum[kSum]);
  }
  template <int kSum, int kRows, int kColumns>
  static void dot_signed_rows() {
    add_bytes<std::int8_t>(bytes[kRows - kSums], bytes[kColumns - kSums], sum[kSum]);
  }
  template <int kSum, int kRows, int kColumns>
  static void dot_unsigned() {
    add_bytes<std::uint8_t>(bytes[kRows - kSums], bytes[kColumns - kSums], sum[kSum]);
  }
  template <bool kEightBit>
  static void pair_tokens(Sixteen::F& a, Sixteen::F& b) {
    const Sixteen::F of[2] = {a, b};
    for (int octet = 0; octet < 4; ++octet) {
      const float* from = of[octet / 2].half[octet % 2].v;
      for (int i = 0; i < 4; ++i) {
        const int first = kEightBit ? i % 2 + i / 2 * 4 : i;
        a.half[octet / 2].v[octet % 2 * 4 + i] = from[first];
        b.half[octet / 2].v[octet % 2 * 4 + i] = from[first + (kEightBit ? 2 : 4)];
      }
    }
  }

 private:
  template <class RowByte>
  static void add_bytes(const std::uint8_t (&rows)[16][64], const std::uint8_t (&columns)[16][64], TileFloats& sums) {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; ++column) {
        auto total = base::bit_cast<std::uint32_t>(float{sums.row[row][column]});
        for (int i = 0; i < 64; ++i) {
          total +=
              static_cast<std::uint32_t>(static_cast<RowByte>(rows[row][i]) * int{columns[i / 4][4 * column + i % 4]});
        }
        sums.row[row][column] = base::bit_cast<float>(total);
      }
    }
  }
  static float from_bf16(std::uint32_t bits) { return flushed(base::bit_cast<float>(bits)); }
};

template <>
struct MatrixOf<Simd> {
  using type = Tiles;
};

}  // namespace emulated

// All that the matrix unit is not for.
static const core::Kernels& rest() {
  static const core::Kernels* const kRest = [] {
    for (const core::Kernels* k : core::all_kernels()) {
      if (k->permit == nullptr && k->available()) return k;
    }
    __builtin_trap();
  }();
  return *kRest;
}
static void attend_rows(const core::AttendItem& item) {
  if (item.layout->path != core::RowPath::vector) return attend_by_matrix<Simd>(item);
  rest().attend(item);
}

// A test sets why the system refuses the unit (null: it does not), and reads how often it was asked.
const char* emulated_refusal = nullptr;
std::atomic<int> emulated_requests = 0;
static const char* emulated_permit() {
  ++emulated_requests;
  return emulated_refusal;
}

extern const core::Kernels kEmulatedKernels;
constinit const core::Kernels kEmulatedKernels = {
    .name = "emulated",
    .detail = "a matrix unit in plain C++ for many rows, the rest as the best of this machine",
    .available = [] { return true; },
    .store_k = [](const core::StoreJob& job) { return rest().store_k(job); },
    .store_v = [](const core::StoreJob& job) { return rest().store_v(job); },
    .centre = [](const core::CentreJob& job) { rest().centre(job); },
    .decode_k = [](const core::DecodeJob& job) { rest().decode_k(job); },
    .decode_v = [](const core::DecodeJob& job) { rest().decode_v(job); },
    .prepare = [](const core::PrepareItem& item) { rest().prepare(item); },
    .attend = attend_rows,
    .merge = [](const core::MergeItem& item) { rest().merge(item); },
    .product_name = [](Format f) { return rest().product_name(f); },
    .tile_products = kMatrixProducts,
    .has_matrix = true,
    .multiplies_bytes = true,
    .permit = emulated_permit,
};

}  // namespace kvant::cpu

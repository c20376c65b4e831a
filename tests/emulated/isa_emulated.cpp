// An instruction set that no machine has: the scalar verbs and a matrix unit in plain C++, so that cpu/matrix.hpp is
// tested everywhere. Compiled with KVANT_ISA=emulated; tests that link it replace the list of src/cpu/registry.cpp.
#include "cpu/kernels.hpp"
#include "cpu/simd_scalar.hpp"

namespace kvant::cpu {
inline namespace emulated {

// Eight tile registers of 16 rows of 16 words. The order of additions is that of the instruction set manual's operation
// of TDPBF16PS; denormals are kept.
struct Tiles {
  static inline thread_local std::uint32_t tile[8][16][16];
  static inline thread_local bool is_configured = false;

  static void configure() { is_configured = true; }
  static void release() { is_configured = false; }
  template <int N>
  static void zero() {
    store_words<N>([](int, int) { return 0u; });
  }
  template <int N>
  static void load(const void* p, std::size_t row_bytes) {
    store_words<N>([&](int row, int word) {
      std::uint32_t x;
      __builtin_memcpy(&x, at(p, row, word, row_bytes), 4);
      return x;
    });
  }
  template <int N>
  static void store(void* p, std::size_t row_bytes) {
    for (int row = 0; row < 16; ++row) {
      for (int word = 0; word < 16; ++word)
        __builtin_memcpy(const_cast<char*>(at(p, row, word, row_bytes)), &tile[N][row][word], 4);
    }
  }
  template <int kSum, int kRows, int kColumns>
  static void dot() {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; ++column) {
        float sum = as_float(tile[kSum][row][column]);
        for (int word = 0; word < 16; ++word) {
          const std::uint32_t a = tile[kRows][row][word], b = tile[kColumns][word][column];
          sum += as_float(a << 16) * as_float(b << 16) + as_float(a & 0xFFFF0000u) * as_float(b & 0xFFFF0000u);
        }
        __builtin_memcpy(&tile[kSum][row][column], &sum, 4);
      }
    }
  }
  template <bool kEightBit>
  static void pair_tokens(Simd::F& a, Simd::F& b) {
    const Simd::F octets[2] = {a, b};
    for (int octet = 0; octet < 2; ++octet) {
      for (int i = 0; i < 4; ++i) {
        const int first = kEightBit ? i % 2 + i / 2 * 4 : i;
        a.v[4 * octet + i] = octets[octet].v[first];
        b.v[4 * octet + i] = octets[octet].v[first + (kEightBit ? 2 : 4)];
      }
    }
  }
  static void transpose(const std::byte* from, std::byte* to) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) __builtin_memcpy(to + 64 * j + 4 * i, from + 64 * i + 4 * j, 4);
    }
  }

 private:
  static float as_float(std::uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  static const char* at(const void* p, int row, int word, std::size_t row_bytes) {
    return static_cast<const char*>(p) + static_cast<std::size_t>(row) * row_bytes + static_cast<std::size_t>(word) * 4;
  }
  template <int N, class Fn>
  static void store_words(Fn fn) {
    if (!is_configured) __builtin_trap();  // as the machine would
    for (int row = 0; row < 16; ++row) {
      for (int word = 0; word < 16; ++word) tile[N][row][word] = fn(row, word);
    }
  }
};

template <>
struct MatrixOf<Simd> {
  using type = Tiles;
};

}  // namespace emulated

static bool emulated_available() {
  return true;
}
// A test sets why the system refuses the unit (null: it does not), and reads how often it was asked.
const char* emulated_refusal = nullptr;
int emulated_requests = 0;
static const char* emulated_permit() {
  ++emulated_requests;
  return emulated_refusal;
}
extern const core::Kernels kEmulatedKernels;
constinit const core::Kernels kEmulatedKernels = [] {
  core::Kernels k = kernels_of<Simd>("emulated", "scalar, with a matrix unit in plain C++", emulated_available);
  k.permit = emulated_permit;
  return k;
}();

}  // namespace kvant::cpu

// Compiled with isa_avx512.cpp's flags. The path for many rows alone; what else there is to do is AVX-512's.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__linux__)

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/attend/attend_matrix.hpp"
#include "cpu/simd/amx.hpp"
#include "cpu/x86_features.hpp"

namespace kvant::cpu {

extern const core::Kernels kAvx512Kernels;
extern const core::Kernels kAmxKernels;

static bool store_k(const core::StoreJob& job) {
  return kAvx512Kernels.store_k(job);
}
static bool store_v(const core::StoreJob& job) {
  return kAvx512Kernels.store_v(job);
}
static void centre(const core::CentreJob& job) {
  kAvx512Kernels.centre(job);
}
static void decode_k(const core::DecodeJob& job) {
  kAvx512Kernels.decode_k(job);
}
static void decode_v(const core::DecodeJob& job) {
  kAvx512Kernels.decode_v(job);
}
static void prepare_rows(const core::PrepareItem& item) {
  kAvx512Kernels.prepare(item);
}
static void attend_rows(const core::AttendItem& item) {
  if (item.layout->path != core::RowPath::vector) {
    attend_by_matrix<Simd>(item);
  } else {
    kAvx512Kernels.attend(item);
  }
}
static void merge_rows(const core::MergeItem& item) {
  kAvx512Kernels.merge(item);
}
static const char* product_name(Format f) {
  return kAvx512Kernels.product_name(f);
}

static constexpr int kTileData = 18;  // the number of the tile registers among a thread's saved states

// Linux 5.16 and newer say what a process may ask for (ARCH_GET_XCOMP_SUPP); older ones know no such question.
static bool amx_available() {
  constinit static std::atomic<int> found{-1};
  int known = found.load(std::memory_order_relaxed);
  if (known < 0) {
    unsigned long supported = 0;
    known = kAvx512Kernels.available() && has_x86_features(kAmx) &&
                    syscall(SYS_arch_prctl, 0x1021 /* ARCH_GET_XCOMP_SUPP */, &supported) == 0 &&
                    (supported >> kTileData & 1) != 0
                ? 1
                : 0;
    found.store(known, std::memory_order_relaxed);
  }
  return known != 0;
}

// Linux lets a process use tile registers after it has asked, once for all of its threads and for good. From then on it
// refuses signal stacks (sigaltstack) that are too small for them, so that only a plan asks which will use them.
static const char* amx_permit() {
  constinit static std::atomic<bool> allowed{false};
  if (allowed.load(std::memory_order_relaxed)) return nullptr;
  if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, kTileData) == 0) {
    allowed.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  switch (errno) {
    case ENOSPC:
      return "a thread of this process has a signal stack (sigaltstack) that is too small for AMX's tile registers; "
             "give such "
             "threads stacks of getauxval(AT_MINSIGSTKSZ) bytes and more";
    case EPERM:
    case ENOSYS: return "a filter of system calls (seccomp) forbids arch_prctl, which asks for AMX's tile registers";
    default: return "the system refuses AMX's tile registers to this process (arch_prctl ARCH_REQ_XCOMP_PERM)";
  }
}

constinit const core::Kernels kAmxKernels = {
    .name = "amx",
    .detail = "AMX BF16 for many rows, the rest as avx512",
    .available = amx_available,
    .store_k = store_k,
    .store_v = store_v,
    .centre = centre,
    .decode_k = decode_k,
    .decode_v = decode_v,
    .prepare = prepare_rows,
    .attend = attend_rows,
    .merge = merge_rows,
    .product_name = product_name,
    .tile_products = kMatrixProducts,
    .has_matrix = true,
    .multiplies_bytes = true,
    .permit = amx_permit,
};

}  // namespace kvant::cpu

#endif

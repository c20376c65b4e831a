// kvant.h: the library itself, and basis files.
#include <nlohmann/json.hpp>

#include "capi/handles.hpp"
#include "core/backend.hpp"
#include "core/device.hpp"
#include "core/threads.hpp"
#include "kvant/version.hpp"

namespace kvant::capi {

static_assert(KVANT_OK == static_cast<int>(Code::ok) && KVANT_INTERNAL == static_cast<int>(Code::internal) &&
              KVANT_INVALID_ARGUMENT == static_cast<int>(Code::invalid_argument) &&
              KVANT_UNSUPPORTED == static_cast<int>(Code::unsupported) &&
              KVANT_OUT_OF_CAPACITY == static_cast<int>(Code::out_of_capacity) &&
              KVANT_NON_FINITE == static_cast<int>(Code::non_finite) && KVANT_STALE == static_cast<int>(Code::stale) &&
              KVANT_BAD_FILE == static_cast<int>(Code::bad_file) && KVANT_IO == static_cast<int>(Code::io) &&
              KVANT_OUT_OF_MEMORY == static_cast<int>(Code::out_of_memory));
static_assert(KVANT_F32 == static_cast<int>(Dtype::f32) && KVANT_F16 == static_cast<int>(Dtype::f16) &&
              KVANT_BF16 == static_cast<int>(Dtype::bf16) && KVANT_BOOL == static_cast<int>(Dtype::boolean));
static_assert(KVANT_BASIS_AUTOMATIC == static_cast<int>(BasisKind::automatic) &&
              KVANT_BASIS_HADAMARD == static_cast<int>(BasisKind::hadamard) &&
              KVANT_BASIS_NONE == static_cast<int>(BasisKind::none) &&
              KVANT_BASIS_CALIBRATED == static_cast<int>(BasisKind::calibrated));

namespace {

nlohmann::ordered_json described_formats() {
  nlohmann::ordered_json list;
  for (const FormatInfo& format : formats()) {
    list.push_back({{"name", format.name},
                    {"id", static_cast<int>(format.format)},
                    {"bits", format.bits},
                    {"dense", format.dense},
                    {"summary", format.summary}});
  }
  return list;
}

std::string describe_build() {
  nlohmann::ordered_json info;
  info["version"] = kVersion;
  info["page_tokens"] = kPageTokens;
  info["head_dims"] = supported_head_dims();
  info["largest_head_dim"] = kLargestHeadDim;
  info["formats"] = described_formats();
  info["device"] = nullptr;
  if (const core::DeviceBackend* device = core::device_backend(); device != nullptr && device->build != nullptr) {
    const core::DeviceBuild build = device->build();
    nlohmann::ordered_json widths = nlohmann::ordered_json::array();
    for (const codec::HeadDims& one : build.widths) widths.push_back({one.k, one.v});
    nlohmann::ordered_json latents = nlohmann::ordered_json::array();
    for (const codec::HeadDims& one : build.latents) latents.push_back({one.v, one.k});
    info["device"] = {{"name", device->name},         {"architectures", build.architectures},
                      {"head_dims", build.head_dims}, {"widths", widths},
                      {"latents", latents},           {"pairs", build.pairs}};
  }
  return info.dump();
}

std::string describe_library() {
  nlohmann::ordered_json info;
  info["version"] = kVersion;
  info["page_tokens"] = kPageTokens;
  info["head_dims"] = supported_head_dims();
  info["largest_head_dim"] = kLargestHeadDim;
  info["threads"] = {{"runtime", core::threads_name()}, {"hardware", core::hardware_threads()}};
  info["formats"] = described_formats();
  for (const IsaInfo& isa : isas()) {
    info["isas"].push_back({{"name", isa.name}, {"available", isa.available}, {"detail", isa.detail}});
  }
  info["backends"].push_back({{"name", "cpu"}, {"available", true}, {"detail", ""}});
  if (const core::DeviceBackend* device = core::device_backend(); device != nullptr) {
    const std::string unavailable = device->unavailable();
    info["backends"].push_back({{"name", device->name},
                                {"available", unavailable.empty()},
                                {"detail", unavailable.empty() ? device->detail() : unavailable}});
    if (device->classes != nullptr) {
      for (const core::DeviceClass& one : device->classes()) {
        info["backends"].back()["classes"].push_back({{"capability", one.capability},
                                                      {"cards", one.cards},
                                                      {"kernels", one.kernels},
                                                      {"code", one.code},
                                                      {"state", one.state()}});
      }
    }
  }
  return info.dump();
}

}  // namespace

}  // namespace kvant::capi

using namespace kvant::capi;  // the functions below are thin: each names its arguments, converts, and calls

extern "C" {

const char* kvant_version(void) {
  return kvant::kVersion;
}

const char* kvant_status_name(kvant_status status) {
  if (status < KVANT_OK || status > KVANT_INTERNAL) return "unknown";
  return kvant::code_name(static_cast<kvant::Code>(status));
}

kvant_status kvant_info(char* buffer, size_t capacity, size_t* size) {
  return guarded([&] { return copy_text(describe_library(), buffer, capacity, size); });
}

kvant_status kvant_build_info(char* buffer, size_t capacity, size_t* size) {
  return guarded([&] { return copy_text(describe_build(), buffer, capacity, size); });
}

kvant_status kvant_bases_load(const char* path, kvant_bases** bases) {
  return guarded([&]() -> kvant::Status {
    if (bases == nullptr) return null_argument("bases");
    *bases = nullptr;
    if (path == nullptr) return null_argument("path");
    auto calibration = kvant::io::load_bases(path);
    if (!calibration) return calibration.status();
    *bases = new kvant_bases{std::move(*calibration)};
    return {};
  });
}

void kvant_bases_destroy(kvant_bases* bases) {
  delete bases;
}

}  // extern "C"

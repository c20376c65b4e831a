// Whatever the bytes are: the reader refuses them with a message, or hands out tensors that lie within them. Inputs
// that parse go on through the readers of captured layers and bases, and through every conversion.
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvant/io.hpp"

namespace {

/// Stops the fuzzer; a failed check must be visible in every build type.
void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvant;
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto file = io::SafeTensors::parse(bytes, "fuzz");
  if (!file) {
    require(!file.message().empty() && file.message().size() < 2000);
    return 0;
  }
  std::size_t covered = 0;
  for (const io::TensorInfo& tensor : file->tensors()) {
    require(file->find(tensor.name) == &tensor);
    require(tensor.bytes <= size && tensor.read().value().size() == tensor.bytes);
    covered += tensor.bytes;
    const auto narrow = tensor.to_f32();
    const auto wide = tensor.to_f64();
    require(narrow.ok() == wide.ok());
    if (narrow)
      require(static_cast<std::int64_t>(narrow->size()) == tensor.elements() && wide->size() == narrow->size());
  }
  require(covered < size);
  if (const auto layers = io::read_captured_layers(*file); layers) {
    for (const io::CapturedLayer& layer : *layers) {
      require(static_cast<std::int64_t>(layer.k.size()) == layer.kv_heads * layer.positions * layer.head_dim);
    }
  }
  if (const auto bases = io::read_bases(*file); bases) require(!bases->layers.empty());
  return 0;
}

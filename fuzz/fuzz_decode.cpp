// Arbitrary bytes as a tile: verify and decode stay inside the tile and give the same floats on every target,
// and whatever was decoded (NaN included) can be encoded into a tile that verifies.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "simd/kernels.h"

namespace {

using namespace kvant;

std::vector<Format> all_formats() {
  std::vector<Format> formats;
  for (const std::string& name : format_names()) {
    for (Side side : {Side::kKey, Side::kValue}) {
      for (int head_dim : {32, 40, 72, 128}) {
        Result<Format> format = Format::parse(name, side, head_dim);
        if (format.ok()) formats.push_back(format.value());
      }
    }
  }
  return formats;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Format> formats = all_formats();
  if (size < 2) return 0;
  const Format& format = formats[(data[0] | (data[1] << 8)) % formats.size()];
  data += 2;
  size -= 2;
  // Exactly the tile's size on the heap, so that a read beyond it is noticed. Short inputs are repeated.
  const size_t bytes = format.tile_bytes();
  auto* tile = static_cast<std::byte*>(std::aligned_alloc(kTileAlign, bytes));
  for (size_t i = 0; i < bytes; ++i)
    tile[i] = size > 0 ? static_cast<std::byte>(data[i % size]) : std::byte{0xaa};
  const bool verified = format.verify(tile).ok();
  const auto values = static_cast<size_t>(kPageTokens) * static_cast<size_t>(format.layout().head_dim);
  std::vector<float> first(values), other(values);
  bool is_first = true;
  for (const simd::KernelTable* table : simd::available_kernels()) {
    if (!simd::force_kernels(table->name).ok() || format.verify(tile).ok() != verified) std::abort();
    format.decode(tile, is_first ? first.data() : other.data());
    if (!is_first && std::memcmp(first.data(), other.data(), values * sizeof(float)) != 0) {
      // NaN payloads may differ between targets; numbers may not.
      for (size_t i = 0; i < values; ++i) {
        const bool both_nan = first[i] != first[i] && other[i] != other[i];
        if (!both_nan && first[i] != other[i]) std::abort();
      }
    }
    is_first = false;
  }
  // Encoding what came out neither hangs nor leaves the tile.
  format.encode({.x = first.data()}, tile);
  if (!format.verify(tile).ok()) std::abort();
  std::free(tile);
  return 0;
}

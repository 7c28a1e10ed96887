// What a family of formats declares. A new family is one file that defines a FormatFamily, one line in
// registry.cpp and a vector in tests/golden.
#pragma once

#include <span>
#include <string_view>

#include "formats/spec.h"
#include "kvant/format.h"

namespace kvant {

// What a family sees when it chooses the metadata of a tile.
struct EncodeContext {
  const TileLayout& layout;
  // [64][row_stride], token-major, row_stride a multiple of 16 with zeros at its end. Tokens that are not
  // live are zero. All magnitudes are 0 or
  // kSmallestValue..kLargestValue.
  const float* rows = nullptr;
  size_t row_stride = 0;
  uint64_t live = 0;
  const float* channel_weight = nullptr;  // [head_dim] with mean 1, or null for all equal
  float static_scale = 0;                 // of static formats; 0: none is known
  // [n_bands], ones before: the factor by which stored scales are larger than those that codes are chosen
  // with.
  float* code_gain = nullptr;
};

// Larger magnitudes count as this one, so that squares stay finite in binary32.
inline constexpr float kLargestValue = 1e15f;
// Smaller magnitudes count as zero in quantized formats (their smallest scale is 2^-41), so that no square is
// subnormal and flush-to-zero changes nothing.
inline constexpr float kSmallestValue = 0x1p-60f;

struct FormatFamily {
  uint8_t id = 0;  // permanent, 1..255; never given to another family
  std::string_view prefix;
  std::string_view summary;
  std::string_view scale_axis;
  std::span<const std::string_view> examples;
  bool comparison = false;  // shows what others do; no named scheme of ours uses it

  // What names may say.
  bool exact = false;  // no widths at all
  int max_widths = 1;  // bands
  bool may_be_asymmetric = false;
  ScaleType default_scale = ScaleType::kNone;  // kNone: no token scales, ":sN" is refused

  // Fills bands (channels, bits), flags and scale type; offsets follow from them (layout.h).
  Status (*configure)(const FormatSpec& spec, TileLayout* layout) = nullptr;
  // Writes the scales, lows and centres into the tile, all of which is zero before. Codes follow from them.
  // Null for exact formats.
  void (*choose_metadata)(const EncodeContext& context, std::byte* tile) = nullptr;
};

std::span<const FormatFamily* const> all_families();

}  // namespace kvant

// Tiles for kernel tests and benchmarks: any layout, also those that no registered format has, filled with
// random codes and scales, and decoded in double precision straight from the definition in kvant/format.h.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvant/format.h"
#include "kvant/half.h"

namespace kvant::test {

struct TileSpec {
  Side side = Side::kKey;
  int head_dim = 128;
  std::vector<std::pair<int, int>> bands;  // channels, bits
  ScaleType token_scale = ScaleType::kE6M10;
  bool asymmetric = false;
  bool channel_scale = false;
  bool channel_centre = false;
};

inline std::vector<int> plane_widths(int bits) {
  if (bits == 8) return {8};
  std::vector<int> out;
  for (int size : {4, 2, 1}) {
    if ((bits & size) != 0) out.push_back(size);
  }
  return out;
}

inline TileLayout make_layout(const TileSpec& spec) {
  TileLayout layout;
  layout.side = spec.side;
  layout.head_dim = spec.head_dim;
  layout.n_bands = static_cast<int>(spec.bands.size());
  layout.asymmetric = spec.asymmetric;
  layout.token_scale = spec.token_scale;
  layout.channel_scale = spec.channel_scale;
  layout.channel_centre = spec.channel_centre;
  uint32_t at = 0;
  const auto take = [&](size_t bytes) {
    const uint32_t here = at;
    at += static_cast<uint32_t>(bytes);
    return here;
  };
  int channel = 0;
  for (int b = 0; b < layout.n_bands; ++b) {
    BandLayout& band = layout.bands[b];
    band.first_channel = channel;
    band.channels = spec.bands[b].first;
    band.stored_channels = spec.side == Side::kValue ? (band.channels + 15) / 16 * 16 : band.channels;
    band.bits = spec.bands[b].second;
    for (int bits : plane_widths(band.bits)) {
      band.plane_bits[band.n_planes] = static_cast<uint8_t>(bits);
      band.plane_offset[band.n_planes++] = take(static_cast<size_t>(band.stored_channels) * 8 * bits);
    }
    channel += band.channels;
  }
  for (int b = 0; b < layout.n_bands; ++b) {
    BandLayout& band = layout.bands[b];
    if (spec.token_scale == ScaleType::kE6M10) band.token_scale_offset = take(128);
    if (spec.token_scale == ScaleType::kLog8) band.token_scale_offset = take(64);
    if (spec.token_scale == ScaleType::kLog4) band.token_scale_offset = take(32);
    if (spec.token_scale == ScaleType::kLog8 || spec.token_scale == ScaleType::kLog4) {
      band.token_base_offset = take(2);
    }
    if (spec.asymmetric && !spec.channel_scale) band.token_low_offset = take(128);
  }
  if (spec.channel_scale) layout.channel_scale_offset = take(2 * spec.head_dim);
  if (spec.channel_centre) layout.channel_centre_offset = take(2 * spec.head_dim);
  layout.tile_bytes = (at + 16 + 63) / 64 * 64;
  layout.trailer_offset = layout.tile_bytes - 16;
  return layout;
}

struct AlignedBytes {
  explicit AlignedBytes(size_t size) : storage(size + 64) {}
  std::byte* data() {
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    return storage.data() + (64 - address % 64) % 64;
  }
  std::vector<std::byte> storage;
};

inline void put_word(std::byte* p, uint16_t w) { std::memcpy(p, &w, sizeof w); }
inline uint16_t get_word(const std::byte* p) {
  uint16_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

// All bytes random; scales between 1/8 and 8 with a few zeros, lows and centres in [-4, 4].
inline void fill_tile(const TileLayout& layout, std::mt19937& rng, std::byte* tile) {
  for (uint32_t i = 0; i < layout.tile_bytes; ++i) tile[i] = static_cast<std::byte>(rng() & 255);
  std::uniform_real_distribution<float> exponent(-3.0f, 3.0f), low(-4.0f, 4.0f);
  const auto scale = [&] { return rng() % 16 == 0 ? uint16_t{0} : float_to_scale(std::exp2(exponent(rng))); };
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    if (band.token_base_offset != 0)
      put_word(tile + band.token_base_offset, float_to_scale(std::exp2(exponent(rng))));
    for (int t = 0; t < kPageTokens; ++t) {
      if (layout.token_scale == ScaleType::kE6M10) put_word(tile + band.token_scale_offset + 2 * t, scale());
      if (band.token_low_offset != 0) put_word(tile + band.token_low_offset + 2 * t, float_to_half(low(rng)));
    }
  }
  for (int c = 0; c < layout.head_dim; ++c) {
    if (layout.channel_scale) put_word(tile + layout.channel_scale_offset + 2 * c, scale());
    if (layout.channel_centre) put_word(tile + layout.channel_centre_offset + 2 * c, float_to_half(low(rng)));
  }
}

// Code of token t, channel c of a band.
inline int code_at(const TileLayout& layout, int b, const std::byte* tile, int t, int c) {
  const BandLayout& band = layout.bands[b];
  const bool key = layout.side == Side::kKey;
  const int element = key ? 4 * (c / 4) + t / 16 : 16 * (c / 16) + t / 4;
  const int byte = key ? 4 * (t % 16) + c % 4 : 4 * (c % 16) + t % 4;
  int code = 0, position = 0;
  for (int i = 0; i < band.n_planes; ++i) {
    const int bits = band.plane_bits[i];
    const int vector = element / (8 / bits), shift = bits * (element % (8 / bits));
    const int field = static_cast<int>(tile[band.plane_offset[i] + 64 * vector + byte]) >> shift;
    code |= (field & ((1 << bits) - 1)) << position;
    position += bits;
  }
  return code;
}

inline double token_scale_at(const TileLayout& layout, int b, const std::byte* tile, int t) {
  const BandLayout& band = layout.bands[b];
  const std::byte* words = tile + band.token_scale_offset;
  if (layout.token_scale == ScaleType::kE6M10) return scale_to_float(get_word(words + 2 * t));
  if (layout.token_scale == ScaleType::kNone) return 1.0;
  const double base = scale_to_float(get_word(tile + band.token_base_offset));
  if (layout.token_scale == ScaleType::kLog8) {
    const int k = static_cast<int>(words[t]);
    return k == 0 ? 0.0 : base * std::exp2((k - 255) / 8.0);
  }
  const int k = (static_cast<int>(words[t / 2]) >> (t % 2 * 4)) & 15;
  return k == 0 ? 0.0 : base * std::exp2((k - 15) / 4.0);
}

inline double token_low_at(const TileLayout& layout, int b, const std::byte* tile, int t) {
  const uint32_t offset = layout.bands[b].token_low_offset;
  return offset == 0 ? 0.0 : half_to_float(get_word(tile + offset + 2 * t));
}
inline double channel_scale_at(const TileLayout& layout, const std::byte* tile, int c) {
  return layout.channel_scale ? scale_to_float(get_word(tile + layout.channel_scale_offset + 2 * c)) : 1.0;
}
inline double channel_centre_at(const TileLayout& layout, const std::byte* tile, int c) {
  return layout.channel_centre ? half_to_float(get_word(tile + layout.channel_centre_offset + 2 * c)) : 0.0;
}

}  // namespace kvant::test

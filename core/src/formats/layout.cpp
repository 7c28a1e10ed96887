#include "formats/layout.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvant/half.h"
#include "kvant/memory.h"
#include "simd/scale_tables.h"

namespace kvant {
namespace {

int token_scale_bits(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kE6M10:
      return 16;
    case ScaleType::kLog8:
      return 8;
    case ScaleType::kLog4:
      return 4;
  }
  return 0;
}

bool has_base(ScaleType type) { return type == ScaleType::kLog8 || type == ScaleType::kLog4; }

uint32_t place_planes(BandLayout* band, uint32_t at) {
  band->n_planes = 0;
  for (int bits : {8, 4, 2, 1}) {
    if ((band->bits & bits) == 0) continue;
    band->plane_bits[band->n_planes] = static_cast<uint8_t>(bits);
    band->plane_offset[band->n_planes] = at;
    ++band->n_planes;
    at += static_cast<uint32_t>(band->stored_channels * kPageTokens * bits / 8);
  }
  return at;
}

}  // namespace

Status split_bands(const FormatSpec& spec, TileLayout* layout) {
  const int unit = band_unit(layout->side);
  const int units = (layout->head_dim + unit - 1) / unit;
  if (spec.n_widths > units) {
    FormatSpec fewer = spec;
    fewer.n_widths = units;
    return Status(Code::kUnsupported,
                  "format '" + format_spec_name(spec) + "': " + std::to_string(spec.n_widths) +
                      " bands do not fit a " + side_name(layout->side) + " head of " +
                      std::to_string(layout->head_dim) + " channels, the smallest that they fit has " +
                      std::to_string((spec.n_widths - 1) * unit + 8) + "; nearest: '" +
                      format_spec_name(fewer) + "'");
  }
  int channel = 0;
  layout->n_bands = spec.n_widths;
  for (int b = 0; b < spec.n_widths; ++b) {
    BandLayout& band = layout->bands[b];
    band.first_channel = channel;
    const int wanted = (units / spec.n_widths + (b < units % spec.n_widths ? 1 : 0)) * unit;
    band.channels = std::min(wanted, layout->head_dim - channel);
    band.bits = spec.widths[b];
    channel += band.channels;
  }
  return Status();
}

void split_groups(const FormatSpec& spec, int group, TileLayout* layout) {
  layout->n_bands = 0;
  for (int channel = 0; channel < layout->head_dim; channel += group) {
    BandLayout& band = layout->bands[layout->n_bands++];
    band.first_channel = channel;
    band.channels = std::min(group, layout->head_dim - channel);
    band.bits = spec.widths[0];
  }
}

void place_tile(TileLayout* layout) {
  uint32_t at = 0;
  if (layout->exact) at = static_cast<uint32_t>(layout->head_dim) * kPageTokens * 2;
  for (int b = 0; b < layout->n_bands; ++b) {
    BandLayout& band = layout->bands[b];
    const size_t unit = layout->side == Side::kValue ? 16 : 8;
    band.stored_channels = static_cast<int>(align_up(static_cast<size_t>(band.channels), unit));
    at = place_planes(&band, at);
  }
  const auto scale_bytes = static_cast<uint32_t>(token_scale_bits(layout->token_scale) * kPageTokens / 8);
  for (int b = 0; b < layout->n_bands && scale_bytes != 0; ++b, at += scale_bytes) {
    layout->bands[b].token_scale_offset = at;
  }
  const bool token_lows = layout->asymmetric && layout->token_scale != ScaleType::kNone;
  for (int b = 0; b < layout->n_bands && token_lows; ++b, at += 2 * kPageTokens) {
    layout->bands[b].token_low_offset = at;
  }
  const auto channel_bytes = static_cast<uint32_t>(2 * layout->head_dim);
  if (layout->channel_scale) {
    layout->channel_scale_offset = at;
    at += channel_bytes;
  }
  if (layout->channel_centre) {
    layout->channel_centre_offset = at;
    at += channel_bytes;
  }
  for (int b = 0; b < layout->n_bands && has_base(layout->token_scale); ++b, at += 2) {
    layout->bands[b].token_base_offset = at;
  }
  layout->tile_bytes = static_cast<uint32_t>(align_up(at + sizeof(TileTrailer), kTileAlign));
  layout->trailer_offset = layout->tile_bytes - static_cast<uint32_t>(sizeof(TileTrailer));
}

uint16_t load_word(const std::byte* p) {
  return static_cast<uint16_t>(std::to_integer<unsigned>(p[0]) | (std::to_integer<unsigned>(p[1]) << 8));
}

void store_word(std::byte* p, uint16_t word) {
  p[0] = static_cast<std::byte>(word & 0xff);
  p[1] = static_cast<std::byte>(word >> 8);
}

void store_nibble(std::byte* p, int index, int value) {
  const int shift = 4 * (index & 1);
  std::byte& byte = p[index / 2];
  byte = (byte & ~static_cast<std::byte>(15 << shift)) | static_cast<std::byte>(value << shift);
}

float log8_scale(float base, int k) {
  if (k == 0) return 0.0f;
  const int octave = ((k + 1) >> 3) - 32;
  return base * simd::kEighthOctave[(k + 1) & 7] *
         std::bit_cast<float>(static_cast<uint32_t>(127 + octave) << 23);
}

void read_metadata(const TileLayout& layout, const std::byte* tile, TileMetadata* out) {
  const bool token_lows = layout.asymmetric && layout.token_scale != ScaleType::kNone;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    const std::byte* scales = tile + band.token_scale_offset;
    const float base =
        has_base(layout.token_scale) ? scale_to_float(load_word(tile + band.token_base_offset)) : 1.0f;
    for (int t = 0; t < kPageTokens; ++t) {
      float scale = 1.0f;
      if (layout.token_scale == ScaleType::kE6M10) {
        scale = scale_to_float(load_word(scales + 2 * t));
      } else if (layout.token_scale == ScaleType::kLog8) {
        scale = log8_scale(base, std::to_integer<int>(scales[t]));
      } else if (layout.token_scale == ScaleType::kLog4) {
        scale = base * simd::kLog4Steps[(std::to_integer<unsigned>(scales[t / 2]) >> (4 * (t & 1))) & 15u];
      }
      out->token_scale[b][t] = scale;
      out->token_low[b][t] =
          token_lows ? half_to_float(load_word(tile + band.token_low_offset + 2 * t)) : 0.0f;
    }
  }
  for (int c = 0; c < layout.head_dim; ++c) {
    out->channel_scale[c] =
        layout.channel_scale ? scale_to_float(load_word(tile + layout.channel_scale_offset + 2 * c)) : 1.0f;
    out->channel_centre[c] =
        layout.channel_centre ? half_to_float(load_word(tile + layout.channel_centre_offset + 2 * c)) : 0.0f;
  }
}

}  // namespace kvant

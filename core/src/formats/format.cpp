// Format: parsing, and the steps of encode and decode that are the same for every family.
#include "kvant/format.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "formats/family.h"
#include "formats/layout.h"
#include "formats/scale_search.h"
#include "kvant/half.h"
#include "kvant/memory.h"
#include "simd/kernels.h"

namespace kvant {

static_assert(std::endian::native == std::endian::little, "tiles are little-endian");

struct FormatAccess {
  static Result<Format> make(const FormatSpec& spec, Side side, int head_dim) {
    Format format;
    format.name_ = format_spec_name(spec);
    format.id_ = format_spec_id(spec);
    format.family_ = spec.family;
    format.layout_.side = side;
    format.layout_.head_dim = head_dim;
    KVANT_RETURN_IF_ERROR(spec.family->configure(spec, &format.layout_));
    place_tile(&format.layout_);
    return format;
  }
};

namespace {

Status check_head_dim(int head_dim) {
  if (head_dim >= kMinHeadDim && head_dim <= kMaxHeadDim && head_dim % 8 == 0) return Status();
  const int bounded = std::clamp(head_dim, kMinHeadDim, kMaxHeadDim);
  const int nearest = std::clamp((bounded + 4) / 8 * 8, kMinHeadDim, kMaxHeadDim);
  return Status(Code::kUnsupported,
                "head size " + std::to_string(head_dim) +
                    " is not a multiple of 8 in 32..256; nearest: " + std::to_string(nearest));
}

// 64 finite rows, padded; zeros for tokens that are not live. Magnitudes below `smallest` are zero.
struct Rows {
  size_t stride;
  alignas(64) float x[kPageTokens * kMaxHeadDim];

  Rows(const EncodeInput& in, int head_dim, float smallest)
      : stride(align_up(static_cast<size_t>(head_dim), 16)) {
    for (int t = 0; t < kPageTokens; ++t) {
      float* row = x + t * stride;
      const float* from = in.x + static_cast<size_t>(t) * head_dim;
      if ((in.live >> t) & 1) {
        for (int c = 0; c < head_dim; ++c) {
          const float magnitude = std::fabs(from[c]);  // NaN fails the first comparison
          const float bounded = magnitude < kLargestValue ? magnitude : kLargestValue;
          const float value = magnitude >= smallest ? bounded : 0.0f;
          row[c] = std::copysign(value, from[c]);
        }
      } else {
        std::fill_n(row, head_dim, 0.0f);
      }
      std::fill(row + head_dim, row + stride, 0.0f);
    }
  }
};

// Weights with mean 1; false when there are none to use (null, or no positive sum).
bool normalize_weights(const float* weight, int head_dim, float* out) {
  if (weight == nullptr) return false;
  double sum = 0;
  for (int c = 0; c < head_dim; ++c) {
    out[c] = weight[c] > 0.0f ? std::min(weight[c], kLargestValue) : 0.0f;
    sum += out[c];
  }
  if (!(sum > 0)) return false;
  const auto norm = static_cast<float>(head_dim / sum);
  for (int c = 0; c < head_dim; ++c) out[c] = out[c] * norm;
  return true;
}

simd::BandGrid band_grid(const TileLayout& layout, int b, const TileMetadata& metadata) {
  const BandLayout& band = layout.bands[b];
  return {.channels = band.channels,
          .bits = band.bits,
          .mid = layout.mid(b),
          .token = metadata.token_scale[b],
          .low = metadata.token_low[b],
          .channel = metadata.channel_scale + band.first_channel,
          .centre = metadata.channel_centre + band.first_channel};
}

// `gain` [n_bands]: stored scales / the scales that codes are chosen with.
EncodeStats encode_codes(const TileLayout& layout, const Rows& rows, uint64_t live, const float* gain,
                         std::byte* tile) {
  const simd::EncodeKernels& kernels = *simd::kernels().encode;
  TileMetadata metadata;
  read_metadata(layout, tile, &metadata);
  alignas(64) float inverse_token[kPageTokens], inverse_channel[kMaxHeadDim];
  for (int c = 0; c < layout.head_dim; ++c) inverse_channel[c] = inverse_scale(metadata.channel_scale[c]);
  alignas(64) uint8_t codes[kPageTokens * kMaxHeadDim];
  EncodeStats stats;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    for (int t = 0; t < kPageTokens; ++t) {
      inverse_token[t] = inverse_scale(metadata.token_scale[b][t]) * gain[b];
    }
    simd::BandGrid grid = band_grid(layout, b, metadata);
    grid.inverse_token = inverse_token;
    grid.inverse_channel = inverse_channel + band.first_channel;
    const auto code_stride = static_cast<size_t>(band.stored_channels);
    if (band.stored_channels != band.channels) std::memset(codes, 0, kPageTokens * code_stride);
    simd::BandErrors errors;
    kernels.quantize(grid, rows.x + band.first_channel, rows.stride, live, codes, code_stride, &errors);
    kernels.pack_band(band, layout.side, codes, tile);
    for (int i = 0; i < 16; ++i) {
      stats.signal += static_cast<double>(errors.signal[i]);
      stats.error += static_cast<double>(errors.error[i]);
    }
    stats.max_error = std::max(stats.max_error, errors.max_error);
  }
  return stats;
}

EncodeStats encode_exact(const TileLayout& layout, const Rows& rows, uint64_t live, std::byte* tile) {
  const simd::EncodeKernels& kernels = *simd::kernels().encode;
  EncodeStats stats;
  uint16_t words[kMaxHeadDim];
  float decoded[kMaxHeadDim];
  const auto n = static_cast<size_t>(layout.head_dim);
  for (int t = 0; t < kPageTokens; ++t) {
    const float* x = rows.x + t * rows.stride;
    if (layout.exact_bf16) {
      for (size_t c = 0; c < n; ++c) words[c] = float_to_bf16(x[c]);
      for (size_t c = 0; c < n; ++c) decoded[c] = bf16_to_float(words[c]);
    } else {
      for (size_t c = 0; c < n; ++c) decoded[c] = std::clamp(x[c], -kLargestHalf, kLargestHalf);
      kernels.to_half(decoded, words, n);
      kernels.from_half(words, decoded, n);
    }
    std::memcpy(tile + t * n * 2, words, n * 2);
    if (((live >> t) & 1) == 0) continue;
    for (size_t c = 0; c < n; ++c) {
      const float difference = decoded[c] - x[c];
      stats.signal += static_cast<double>(x[c]) * static_cast<double>(x[c]);
      stats.error += static_cast<double>(difference) * static_cast<double>(difference);
      stats.max_error = std::max(stats.max_error, std::fabs(difference));
    }
  }
  return stats;
}

// Low half of XXH3-64 over the tile with the trailer's checksum field zero.
uint32_t tile_checksum(const TileLayout& layout, const std::byte* tile) {
  const size_t at = layout.trailer_offset + offsetof(TileTrailer, checksum);
  const uint32_t zero = 0;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, tile, at);
  XXH3_64bits_update(&state, &zero, sizeof(zero));
  XXH3_64bits_update(&state, tile + at + sizeof(zero), layout.tile_bytes - at - sizeof(zero));
  return static_cast<uint32_t>(XXH3_64bits_digest(&state));
}

void write_trailer(const Format& format, uint64_t live, const EncodeStats& stats, std::byte* tile) {
  const TileLayout& layout = format.layout();
  const double count = static_cast<double>(std::popcount(live)) * layout.head_dim;
  const double share = count > 0 ? 1.0 / count : 0.0;
  TileTrailer trailer = {.format_id = format.id(),
                         .checksum = 0,
                         .rms = float_to_scale(static_cast<float>(std::sqrt(stats.signal * share))),
                         .rms_error = float_to_scale(static_cast<float>(std::sqrt(stats.error * share))),
                         .max_error = float_to_scale(stats.max_error),
                         .version = kTileVersion,
                         .reserved = 0};
  std::memcpy(tile + layout.trailer_offset, &trailer, sizeof(trailer));
  trailer.checksum = tile_checksum(layout, tile);
  std::memcpy(tile + layout.trailer_offset, &trailer, sizeof(trailer));
}

}  // namespace

Result<Format> Format::parse(std::string_view name, Side side, int head_dim) {
  Result<FormatSpec> spec = parse_format_spec(name);
  if (!spec.ok()) return spec.status();
  KVANT_RETURN_IF_ERROR(check_head_dim(head_dim));
  return FormatAccess::make(spec.value(), side, head_dim);
}

Result<Format> Format::from_id(uint32_t id, Side side, int head_dim) {
  Result<FormatSpec> spec = format_spec_from_id(id);
  if (!spec.ok()) return spec.status();
  KVANT_RETURN_IF_ERROR(check_head_dim(head_dim));
  return FormatAccess::make(spec.value(), side, head_dim);
}

double Format::bits_per_value() const {
  return 8.0 * static_cast<double>(layout_.tile_bytes) /
         (kPageTokens * static_cast<double>(layout_.head_dim));
}

EncodeStats Format::encode(const EncodeInput& in, std::byte* tile) const {
  const Rows rows(in, layout_.head_dim, layout_.exact ? 0.0f : kSmallestValue);
  std::memset(tile, 0, layout_.tile_bytes);
  EncodeStats stats;
  if (layout_.exact) {
    stats = encode_exact(layout_, rows, in.live, tile);
  } else {
    float weight[kMaxHeadDim];
    float gain[kMaxBands];
    std::fill_n(gain, kMaxBands, 1.0f);
    const bool weighted = normalize_weights(in.channel_weight, layout_.head_dim, weight);
    family_->choose_metadata({.layout = layout_,
                              .rows = rows.x,
                              .row_stride = rows.stride,
                              .live = in.live,
                              .channel_weight = weighted ? weight : nullptr,
                              .static_scale = in.static_scale,
                              .code_gain = gain},
                             tile);
    stats = encode_codes(layout_, rows, in.live, gain, tile);
  }
  write_trailer(*this, in.live, stats, tile);
  return stats;
}

void Format::decode(const std::byte* tile, float* x) const {
  const simd::EncodeKernels& kernels = *simd::kernels().encode;
  const auto n = static_cast<size_t>(layout_.head_dim);
  if (layout_.exact) {
    uint16_t words[kMaxHeadDim];
    for (int t = 0; t < kPageTokens; ++t, x += n) {
      std::memcpy(words, tile + t * n * 2, n * 2);
      if (layout_.exact_bf16) {
        for (size_t c = 0; c < n; ++c) x[c] = bf16_to_float(words[c]);
      } else {
        kernels.from_half(words, x, n);
      }
    }
    return;
  }
  TileMetadata metadata;
  read_metadata(layout_, tile, &metadata);
  alignas(64) uint8_t codes[kPageTokens * kMaxHeadDim];
  for (int b = 0; b < layout_.n_bands; ++b) {
    const BandLayout& band = layout_.bands[b];
    kernels.unpack_band(band, layout_.side, tile, codes);
    kernels.dequantize(band_grid(layout_, b, metadata), codes, static_cast<size_t>(band.stored_channels),
                       x + band.first_channel, n);
  }
}

Status Format::verify(const std::byte* tile) const {
  TileTrailer trailer;
  std::memcpy(&trailer, tile + layout_.trailer_offset, sizeof(trailer));
  if (trailer.checksum != tile_checksum(layout_, tile)) {
    return Status(Code::kCorrupt, "tile fails its checksum");
  }
  if (trailer.version != kTileVersion) {
    return Status(Code::kMismatch, "tile version " + std::to_string(trailer.version) + ", this build reads " +
                                       std::to_string(kTileVersion));
  }
  if (trailer.format_id != id_) {
    return Status(Code::kMismatch, "tile holds format id " + std::to_string(trailer.format_id) +
                                       ", expected " + std::to_string(id_) + " (" + name_ + ")");
  }
  return Status();
}

}  // namespace kvant

// From bands and flags to byte offsets, and metadata of a tile as floats.
#pragma once

#include <string>

#include "formats/spec.h"
#include "kvant/format.h"

namespace kvant {

// Channels that a band boundary must be a multiple of.
inline int band_unit(Side side) { return side == Side::kKey ? 8 : 16; }

// Of a grid of so many bits that is symmetric about 0, in steps.
inline float outermost_level(int bits) { return static_cast<float>(1 << (bits - 1)) - 0.5f; }

// Splits head_dim into spec.n_widths bands as evenly as units allow; the first bands take what is left over.
// Fails when a band would be empty.
Status split_bands(const FormatSpec& spec, TileLayout* layout);
// Bands of `group` channels (the last one may be smaller), all of the first width.
void split_groups(const FormatSpec& spec, int group, TileLayout* layout);

// Fills planes, stored_channels, all offsets and tile_bytes from side, head_dim, bands and flags.
void place_tile(TileLayout* layout);

// Metadata of a tile, decoded. Absent parts are 1 (scales) and 0 (low, centre).
struct TileMetadata {
  alignas(64) float token_scale[kMaxBands][kPageTokens];
  alignas(64) float token_low[kMaxBands][kPageTokens];
  alignas(64) float channel_scale[kMaxHeadDim];
  alignas(64) float channel_centre[kMaxHeadDim];
};
void read_metadata(const TileLayout& layout, const std::byte* tile, TileMetadata* out);

// base * 2^((k - 255) / 8), 0 for k = 0.
float log8_scale(float base, int k);

// Little-endian words in a tile.
uint16_t load_word(const std::byte* p);
void store_word(std::byte* p, uint16_t word);
void store_nibble(std::byte* p, int index, int value);

}  // namespace kvant

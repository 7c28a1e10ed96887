// Formats: how one tile (64 tokens of one layer, KV head and side) is encoded.
//
// A tile is one contiguous, 64-byte aligned byte range:
//
//   codes of band 0, band 1, ...   bit planes in quad order (below)
//   token scales, per band         64 words of 16, 8 or 4 bits
//   token lows, per band           64 x binary16, asymmetric token formats only
//   channel scales                 head_dim x e6m10, channel formats only
//   channel centres                head_dim x binary16, channel formats only
//   bases, per band                e6m10, token scales of 8 and 4 bits only
//   padding
//   trailer                        16 bytes, the last of the tile: TileTrailer
//
// and what a code means is the same for every format:
//
//   x[t][c] = centre[c] + low[t][band] + channel_scale[c] * token_scale[t][band] * (code[t][c] - mid)
//
// where absent parts are 0 (centre, low) or 1 (scales), mid = (2^bits - 1) / 2 for symmetric grids
// (levels at half steps, no zero level) and mid = 0 for asymmetric ones. A scale of 0 decodes to exactly 0.
//
// Quad order. Codes of b bits are kept as bit planes of 8, 4, 2 and 1 bits whose sum is b (3 = 2 + 1,
// 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1; the wider plane holds the lower bits). A plane is a sequence of
// elements; element e is 64 values v[e][0..63]:
//   keys    v[e][j] = code of token 16 * (e % 4) + j / 4, channel 4 * (e / 4) + j % 4   (of the band)
//   values  v[e][j] = code of channel 16 * (e / 16) + j / 4, token 4 * (e % 16) + j % 4
// In a plane of b bits, 8 / b consecutive elements share 64 bytes: byte j of vector e / (8 / b) holds
// v[e][j] in the bits starting at b * (e % (8 / b)). So one 64-byte vector yields, by shift and mask,
// operands for 4-byte dot products (vpdpbusd, vpmaddubsw, udot) whose 16 lanes are 16 tokens (keys) or 16
// channels (values). Value bands are padded to a multiple of 16 channels (code 0); key bands are multiples
// of 8.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/status.h"
#include "kvant/types.h"

namespace kvant {

inline constexpr int kMaxBands = 8;

enum class ScaleType : uint8_t {
  kNone = 0,
  kE6M10,  // 16 bits, half.h
  kLog8,   // 8 bits: base * 2^((k - 255) / 8), k = 0 is zero; base is an e6m10 word per tile and band
  kLog4,   // 4 bits: base * 2^((k - 15) / 4), k = 0 is zero; two tokens per byte, even token low
};

// Whether all values share a scale that is fixed before anything is written (families "s" and "st").
enum class StaticScale : uint8_t { kNone = 0, kHead, kTensor };

struct BandLayout {
  int first_channel = 0;
  int channels = 0;
  int stored_channels = 0;  // channels, padded to 16 for values
  int bits = 0;             // 2..8
  // Byte offset of each plane in the tile, widest first; planes[i] bits per value; n_planes used.
  std::array<uint32_t, 3> plane_offset{};
  std::array<uint8_t, 3> plane_bits{};
  int n_planes = 0;
  uint32_t token_scale_offset = 0;  // valid when the layout has token scales
  uint32_t token_base_offset = 0;   // e6m10 word, kLog8 and kLog4 only
  uint32_t token_low_offset = 0;    // valid when asymmetric and not per channel
};

// Where everything lies in a tile. For exact formats `n_bands` is 0 and the tile is 64 rows of head_dim
// 16-bit words, token-major.
struct TileLayout {
  Side side = Side::kKey;
  int head_dim = 0;
  int n_bands = 0;
  std::array<BandLayout, kMaxBands> bands{};
  bool exact = false;
  bool exact_bf16 = false;
  bool asymmetric = false;
  ScaleType token_scale = ScaleType::kNone;
  StaticScale static_scale = StaticScale::kNone;
  bool channel_scale = false;   // e6m10 per channel
  bool channel_centre = false;  // binary16 per channel
  uint32_t channel_scale_offset = 0;
  uint32_t channel_centre_offset = 0;
  uint32_t trailer_offset = 0;
  uint32_t tile_bytes = 0;  // multiple of kTileAlign

  float mid(int band) const {
    return asymmetric ? 0.0f : 0.5f * static_cast<float>((1 << bands[band].bits) - 1);
  }
};

struct TileTrailer {
  uint32_t format_id;
  uint32_t checksum;   // low half of XXH3-64 over the tile with this field zero
  uint16_t rms;        // e6m10: root mean square of the encoded values (after the transform)
  uint16_t rms_error;  // e6m10: root mean square of decoded - original
  uint16_t max_error;  // e6m10: largest |decoded - original|
  uint8_t version;     // kTileVersion
  uint8_t reserved;
};
static_assert(sizeof(TileTrailer) == 16);
inline constexpr uint8_t kTileVersion = 1;

// Input of encode: 64 tokens, already centred and transformed.
struct EncodeInput {
  const float* x = nullptr;               // [64][head_dim], token-major
  uint64_t live = ~uint64_t{0};           // bit t clear: token t is kept elsewhere, its code does not matter
  const float* channel_weight = nullptr;  // [head_dim] importance of squared error, or null for all equal
  float static_scale = 0;  // step of static formats; 0: the one that clips nothing of this tile
};

struct EncodeStats {
  double signal = 0;  // sum of squares of live values
  double error = 0;   // sum of squared errors over live values
  float max_error = 0;
};

// A format for one side and head size. Cheap to copy; immutable.
class Format {
 public:
  // `name` follows the grammar of docs/formats.md: f16 | bf16 | FAMILY WIDTHS [a] [:sN], for example
  // "t4", "t5-3", "t4a:s16", "c4", "g4". Errors name the nearest legal value.
  static Result<Format> parse(std::string_view name, Side side, int head_dim);
  // The format whose permanent id stands in a tile.
  static Result<Format> from_id(uint32_t id, Side side, int head_dim);

  const std::string& name() const { return name_; }
  uint32_t id() const { return id_; }
  const TileLayout& layout() const { return layout_; }
  bool exact() const { return layout_.exact; }
  size_t tile_bytes() const { return layout_.tile_bytes; }
  // Bits per stored value, all metadata and padding of the tile counted.
  double bits_per_value() const;

  // Writes the whole tile, trailer included. Deterministic: the same bytes on every ISA, whatever the tile
  // held before. Never fails: NaN counts as zero, magnitudes above 1e15 as 1e15 (callers refuse them first).
  EncodeStats encode(const EncodeInput& in, std::byte* tile) const;
  // x: [64][head_dim] what the tile stores (still transformed and centred).
  void decode(const std::byte* tile, float* x) const;
  // Format id, version and checksum agree with the bytes.
  Status verify(const std::byte* tile) const;

 private:
  friend struct FormatAccess;
  std::string name_;
  uint32_t id_ = 0;
  TileLayout layout_;
  const struct FormatFamily* family_ = nullptr;
};

struct FamilyInfo {
  std::string_view prefix;                     // "t", "c", "g", "f16", ...
  std::string_view summary;                    // one line for `kvant formats`
  std::string_view scale_axis;                 // "token x band", "channel x page", ...
  std::span<const std::string_view> examples;  // names to iterate in tests, benchmarks and tables
  bool comparison = false;                     // shows what others do; no named scheme of ours uses it
};
// Every registered family, in id order.
std::vector<FamilyInfo> format_families();
// Every example name of every family: what tests, benchmarks and tables iterate.
std::vector<std::string> format_names();

}  // namespace kvant

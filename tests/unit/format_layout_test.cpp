#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvant/format.h"
#include "simd/encode.h"
#include "simd/kernels.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using testing::must_parse;

struct Range {
  size_t begin, end;
};

size_t scale_bytes(ScaleType type) {
  return type == ScaleType::kE6M10 ? 128 : type == ScaleType::kLog8 ? 64 : type == ScaleType::kLog4 ? 32 : 0;
}

std::vector<Range> parts_of(const TileLayout& layout) {
  std::vector<Range> parts;
  const auto add = [&](size_t at, size_t bytes) { parts.push_back({at, at + bytes}); };
  if (layout.exact) add(0, static_cast<size_t>(layout.head_dim) * 128);
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    for (int p = 0; p < band.n_planes; ++p) {
      add(band.plane_offset[p], static_cast<size_t>(band.stored_channels) * 8 * band.plane_bits[p]);
      EXPECT_EQ(band.plane_offset[p] % 64, 0u);
    }
    const size_t scales = scale_bytes(layout.token_scale);
    if (scales != 0) add(band.token_scale_offset, scales);
    if (scales == 64 || scales == 32) add(band.token_base_offset, 2);
    if (layout.asymmetric && scales != 0) add(band.token_low_offset, 128);
  }
  if (layout.channel_scale) add(layout.channel_scale_offset, 2 * static_cast<size_t>(layout.head_dim));
  if (layout.channel_centre) add(layout.channel_centre_offset, 2 * static_cast<size_t>(layout.head_dim));
  add(layout.trailer_offset, sizeof(TileTrailer));
  return parts;
}

TEST(TileLayout, PartsFillTheTileWithoutOverlap) {
  testing::for_each_format([](const Format& format) {
    const TileLayout& layout = format.layout();
    EXPECT_EQ(layout.tile_bytes % kTileAlign, 0u);
    EXPECT_EQ(layout.trailer_offset + sizeof(TileTrailer), layout.tile_bytes);
    std::vector<Range> parts = parts_of(layout);
    std::sort(parts.begin(), parts.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    EXPECT_EQ(parts[0].begin, 0u);
    for (size_t i = 1; i < parts.size(); ++i) {
      const size_t gap = parts[i].begin - parts[i - 1].end;
      EXPECT_LE(parts[i - 1].end, parts[i].begin);
      EXPECT_LT(gap, i + 1 == parts.size() ? kTileAlign : 1) << "padding stands only before the trailer";
    }
    EXPECT_DOUBLE_EQ(format.bits_per_value(), 8.0 * layout.tile_bytes / (64.0 * layout.head_dim));
  });
}

TEST(TileLayout, BandsCoverTheHeadInUnits) {
  testing::for_each_format([](const Format& format) {
    const TileLayout& layout = format.layout();
    if (layout.exact) return;
    int channel = 0;
    for (int b = 0; b < layout.n_bands; ++b) {
      const BandLayout& band = layout.bands[b];
      EXPECT_EQ(band.first_channel, channel);
      EXPECT_GT(band.channels, 0);
      channel += band.channels;
      EXPECT_EQ(band.channels % 8, 0);
      if (layout.side == Side::kValue) {
        EXPECT_EQ(band.first_channel % 16, 0);
        EXPECT_EQ(band.stored_channels, (band.channels + 15) / 16 * 16);
      } else {
        EXPECT_EQ(band.stored_channels, band.channels);
      }
      int bits = 0;
      for (int p = 0; p < band.n_planes; ++p) {
        bits += band.plane_bits[p];
        if (p > 0) {
          EXPECT_LT(band.plane_bits[p], band.plane_bits[p - 1]);
        }
      }
      EXPECT_EQ(bits, band.bits);
    }
    EXPECT_EQ(channel, layout.head_dim);
  });
}

TEST(TileLayout, FirstBandsTakeTheRemainder) {
  const auto channels = [](const char* name, Side side, int head_dim) {
    const Format format = must_parse(name, side, head_dim);
    std::vector<int> out;
    for (int b = 0; b < format.layout().n_bands; ++b) out.push_back(format.layout().bands[b].channels);
    return out;
  };
  EXPECT_EQ(channels("t6-4-3-3", Side::kKey, 64), (std::vector<int>{16, 16, 16, 16}));
  EXPECT_EQ(channels("t5-3", Side::kKey, 72), (std::vector<int>{40, 32}));
  EXPECT_EQ(channels("t6-4-3-3", Side::kKey, 80), (std::vector<int>{24, 24, 16, 16}));
  EXPECT_EQ(channels("t5-3", Side::kValue, 72), (std::vector<int>{48, 24}));
  EXPECT_EQ(channels("t4-4-3-3", Side::kValue, 80), (std::vector<int>{32, 16, 16, 16}));
  EXPECT_EQ(channels("g4", Side::kKey, 80), (std::vector<int>{32, 32, 16}));
  EXPECT_EQ(channels("g4", Side::kKey, 256).size(), 8u);
}

TEST(TileLayout, KnownSizes) {
  EXPECT_EQ(must_parse("f16", Side::kKey, 64).tile_bytes(), 8192u + 64);
  EXPECT_EQ(must_parse("t4", Side::kKey, 64).tile_bytes(), 2112u);         // 2048 + 32 + 2 + 16
  EXPECT_EQ(must_parse("t6-4-3-3", Side::kKey, 128).tile_bytes(), 4288u);  // 4096 + 128 + 8 + 16
  EXPECT_EQ(must_parse("c4", Side::kKey, 64).tile_bytes(), 2368u);         // 2048 + 256 + 16
  EXPECT_EQ(must_parse("t4", Side::kValue, 72).tile_bytes(), 2624u);       // 80 * 32 + 32 + 2 + 16
}

// The published position of code (token, channel), written out from kvant/format.h.
unsigned code_at(const BandLayout& band, Side side, const std::byte* tile, int token, int channel) {
  unsigned code = 0;
  int shift = 0;
  for (int p = 0; p < band.n_planes; ++p) {
    const int bits = band.plane_bits[p];
    for (int e = 0; e < band.stored_channels; ++e) {
      for (int j = 0; j < 64; ++j) {
        const bool key = side == Side::kKey;
        const int t = key ? 16 * (e % 4) + j / 4 : 4 * (e % 16) + j % 4;
        const int c = key ? 4 * (e / 4) + j % 4 : 16 * (e / 16) + j / 4;
        if (t != token || c != channel) continue;
        const auto byte = std::to_integer<unsigned>(tile[band.plane_offset[p] + 64 * (e / (8 / bits)) + j]);
        code |= (byte >> (bits * (e % (8 / bits))) & ((1u << bits) - 1)) << shift;
      }
    }
    shift += bits;
  }
  return code;
}

// Every code at every lane position: the code at (token, channel) runs through all 2^bits values.
TEST(PackBand, EveryCodeAtEveryPosition) {
  for (const simd::KernelTable* table : simd::available_kernels()) {
    for (Side side : testing::kSides) {
      for (int bits = 2; bits <= 8; ++bits) {
        SCOPED_TRACE(std::string(table->name) + " " + side_name(side) + " " + std::to_string(bits));
        const Format format = must_parse("t" + std::to_string(bits), side, 72);
        const BandLayout& band = format.layout().bands[0];
        const auto n = static_cast<size_t>(kPageTokens) * band.stored_channels;
        for (int first = 0; first < (1 << bits); ++first) {
          std::vector<uint8_t> codes(n), back(n, 0xaa);
          for (size_t i = 0; i < n; ++i) {
            codes[i] = static_cast<uint8_t>((first + 37 * i + i / 64) & ((1u << bits) - 1));
          }
          testing::GuardedTile tile(format.tile_bytes());
          table->encode->pack_band(band, side, codes.data(), tile.data());
          table->encode->unpack_band(band, side, tile.data(), back.data());
          ASSERT_EQ(codes, back) << first;
          ASSERT_TRUE(tile.guards_intact());
          const size_t spot = static_cast<size_t>(first) * 131 % n;
          const int token = static_cast<int>(spot) / band.stored_channels;
          const int channel = static_cast<int>(spot) % band.stored_channels;
          ASSERT_EQ(code_at(band, side, tile.data(), token, channel), codes[spot]);
        }
      }
    }
  }
}

// A single code of all ones, alone among zeros and a zero alone among ones: no neighbour is touched.
TEST(PackBand, NeighboursKeepTheirCodes) {
  for (const simd::KernelTable* table : simd::available_kernels()) {
    for (Side side : testing::kSides) {
      for (int bits = 2; bits <= 8; ++bits) {
        const Format format = must_parse("t" + std::to_string(bits), side, 32);
        const BandLayout& band = format.layout().bands[0];
        const auto n = static_cast<size_t>(kPageTokens) * band.stored_channels;
        const auto ones = static_cast<uint8_t>((1u << bits) - 1);
        for (size_t spot = 0; spot < n; spot += 5) {
          std::vector<uint8_t> codes(n, spot % 2 == 0 ? 0 : ones), back(n);
          codes[spot] = static_cast<uint8_t>(ones - codes[spot]);
          testing::GuardedTile tile(format.tile_bytes(), 0xff);
          table->encode->pack_band(band, side, codes.data(), tile.data());
          table->encode->unpack_band(band, side, tile.data(), back.data());
          ASSERT_EQ(codes, back) << table->name << " " << side_name(side) << " " << bits << " at " << spot;
        }
      }
    }
  }
}

// A value that names its token and channel comes back from its own place.
TEST(TileLayout, EachValueComesBackFromItsPlace) {
  for (const char* name : {"f16", "t8:s16", "t8", "g8", "c8", "t8-8", "t8a:s16", "ct8"}) {
    for (Side side : testing::kSides) {
      for (int head_dim : testing::kHeadDims) {
        Result<Format> format = Format::parse(name, side, head_dim);
        if (!format.ok()) continue;
        SCOPED_TRACE(std::string(name) + " " + side_name(side) + " " + std::to_string(head_dim));
        // Exact: values are integers below 2048. Else one hot value per tile, in turn at many places.
        if (format.value().exact()) {
          std::vector<float> x(static_cast<size_t>(kPageTokens) * head_dim);
          for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 2039) - 1000.0f;
          EXPECT_EQ(testing::encode_decode(format.value(), x).decoded, x);
          continue;
        }
        for (int i = 0; i < 15; ++i) {
          const size_t spot = static_cast<size_t>(i) * 40503 % (static_cast<size_t>(kPageTokens) * head_dim);
          std::vector<float> x = testing::normal_tile(head_dim, 7, 0.01f);
          x[spot] = 1.0f;
          const std::vector<float> y = testing::encode_decode(format.value(), x).decoded;
          const size_t largest = std::max_element(y.begin(), y.end()) - y.begin();
          ASSERT_EQ(largest, spot);
          // Rows and channels without the spot do not feel it.
          for (size_t k = 0; k < y.size(); ++k) {
            const bool shares = k / head_dim == spot / head_dim || k % head_dim == spot % head_dim;
            if (!shares) {
              ASSERT_NEAR(y[k], x[k], 0.002f);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant

// Properties of encode and decode over random data of every kind that a cache may meet.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "formats/layout.h"
#include "kvant/format.h"
#include "kvant/half.h"
#include "simd/kernels.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using testing::encode_decode;
using testing::Encoded;
using testing::Random;

enum class Kind {
  kNormal,
  kHuge,
  kTiny,
  kSubnormal,
  kConstant,
  kOutliers,
  kMixedTokens,
  kMixedChannels,
  kSparse
};
constexpr int kKinds = 9;

std::vector<float> make_data(Kind kind, int head_dim, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(kPageTokens) * head_dim);
  std::vector<float> channel(head_dim, 1.0f), token(kPageTokens, 1.0f);
  if (kind == Kind::kMixedChannels) {
    for (float& v : channel) v = std::ldexp(1.0f, static_cast<int>(random.next() % 16) - 8);
  }
  if (kind == Kind::kMixedTokens) {
    for (float& v : token) v = std::ldexp(1.0f, static_cast<int>(random.next() % 24) - 12);
  }
  const float constant = 100.0f * random.uniform();
  for (size_t i = 0; i < x.size(); ++i) {
    float v = random.normal() * channel[i % head_dim] * token[i / head_dim];
    if (kind == Kind::kHuge) v *= 1e4f;
    if (kind == Kind::kTiny) v *= 1e-6f;
    if (kind == Kind::kSubnormal) v *= 1e-40f;
    if (kind == Kind::kConstant) v = constant;
    if (kind == Kind::kOutliers && random.next() % 40 == 0) v *= 60.0f;
    if (kind == Kind::kSparse && random.next() % 8 != 0) v = 0.0f;
    x[i] = v;
  }
  return x;
}

// The whole range from the first case on, instead of growing with the number of cases.
int any_int(int first, int end) { return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(first, end)); }
uint64_t any_bits() { return *rc::gen::resize(rc::kNominalSize, rc::gen::arbitrary<uint64_t>()); }

Format any_format() {
  const std::vector<std::string> names = format_names();
  for (;;) {
    const auto& name = *rc::gen::elementOf(names);
    const Side side = *rc::gen::element(Side::kKey, Side::kValue);
    const int head_dim = 8 * any_int(4, 33);
    Result<Format> format = Format::parse(name, side, head_dim);
    if (format.ok()) return format.value();
  }
}

std::vector<float> any_data(int head_dim) {
  const auto kind = static_cast<Kind>(any_int(0, kKinds));
  RC_TAG(static_cast<int>(kind));
  return make_data(kind, head_dim, any_bits());
}

// How far, in steps, the border between two codes may lie from the middle of their levels: bands of 2 to 4
// bits store scales that are larger than those that codes are chosen with (scale_search.h, "Gain").
double border_shift(const TileLayout& layout, int bits) {
  if (layout.asymmetric || bits > 4 || layout.token_scale == ScaleType::kNone ||
      layout.token_scale == ScaleType::kE6M10)
    return 0;
  const double most_gain = bits == 2 ? 1.25 : bits == 3 ? 1.1 : 1.05;
  return ((1 << (bits - 1)) - 1) * (1 - 1 / most_gain);
}

// Every value lies within half a step of its decoded value (and what the gain shifts), or beyond the
// outermost level, to which it is clipped.
RC_GTEST_PROP(FormatProperty, ErrorIsHalfAStepOrTheClip, ()) {
  const Format format = any_format();
  const TileLayout& layout = format.layout();
  RC_PRE(!layout.exact);
  const std::vector<float> x = any_data(layout.head_dim);
  const Encoded out = encode_decode(format, x);
  TileMetadata metadata;
  read_metadata(layout, out.bytes.data(), &metadata);
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    const double top = (1 << band.bits) - 1;
    for (int t = 0; t < kPageTokens; ++t) {
      for (int c = band.first_channel; c < band.first_channel + band.channels; ++c) {
        const size_t i = static_cast<size_t>(t) * layout.head_dim + c;
        const double step = static_cast<double>(metadata.channel_scale[c]) * metadata.token_scale[b][t];
        const double shift = static_cast<double>(metadata.channel_centre[c]) + metadata.token_low[b][t];
        const double lowest = shift - step * layout.mid(b), highest = lowest + step * top;
        const double nearest = std::clamp(static_cast<double>(x[i]), lowest, highest);
        const double slack = 1e-6 * (std::fabs(x[i]) + std::fabs(shift) + step * top) + 0x1p-60;
        RC_ASSERT(std::fabs(out.decoded[i] - nearest) <=
                  step * (0.5 + border_shift(layout, band.bits)) + slack);
        RC_ASSERT(out.decoded[i] >= lowest - slack);
        RC_ASSERT(out.decoded[i] <= highest + slack);
      }
    }
  }
}

// Zero tokens stay exactly zero where nothing is stored per channel.
RC_GTEST_PROP(FormatProperty, ZeroTokensAreExact, ()) {
  const Format format = any_format();
  const TileLayout& layout = format.layout();
  RC_PRE(!layout.channel_centre);
  std::vector<float> x = any_data(layout.head_dim);
  const uint64_t zero = any_bits();
  for (int t = 0; t < kPageTokens; ++t) {
    if ((zero >> t) & 1) std::fill_n(x.begin() + t * layout.head_dim, layout.head_dim, 0.0f);
  }
  const Encoded out = encode_decode(format, x);
  for (int t = 0; t < kPageTokens; ++t) {
    if (((zero >> t) & 1) == 0) continue;
    for (int c = 0; c < layout.head_dim; ++c) RC_ASSERT(out.decoded[t * layout.head_dim + c] == 0.0f);
  }
}

// Never worse than storing nothing but centres (where scales are searched for plain squared error).
RC_GTEST_PROP(FormatProperty, ErrorIsAtMostTheSignal, ()) {
  const Format format = any_format();
  const std::vector<float> x = any_data(format.layout().head_dim);
  const Encoded out = encode_decode(format, x);
  double error = 0, signal = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    RC_ASSERT(std::isfinite(out.decoded[i]));
    error += std::pow(static_cast<double>(out.decoded[i]) - x[i], 2);
    signal += std::pow(static_cast<double>(x[i]), 2);
  }
  // Lows and centres are binary16: their own rounding (2^-11 of them, or 2^-25) comes on top.
  const double rounding = static_cast<double>(x.size()) * 0x1p-46;
  RC_ASSERT(error <= 1.001 * signal + rounding);
}

// Decoded values are encoded again without a further loss beyond the first one.
RC_GTEST_PROP(FormatProperty, EncodingAgainIsStable, ()) {
  const Format format = any_format();
  const std::vector<float> x = any_data(format.layout().head_dim);
  const Encoded once = encode_decode(format, x);
  const Encoded twice = encode_decode(format, once.decoded);
  if (format.exact()) {
    RC_ASSERT(twice.decoded == once.decoded);
    return;
  }
  const double rounding = static_cast<double>(x.size()) * 0x1p-46;
  RC_ASSERT(twice.stats.error <= once.stats.error + 0.02 * once.stats.signal + rounding);
}

RC_GTEST_PROP(FormatProperty, EveryTargetGivesTheSameBytes, ()) {
  const Format format = any_format();
  const std::vector<float> x = any_data(format.layout().head_dim);
  const uint64_t live = any_bits();
  const char* before = simd::kernels().name;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::vector<float>> decoded;
  for (const simd::KernelTable* table : simd::available_kernels()) {
    RC_ASSERT(simd::force_kernels(table->name).ok());
    const Encoded out = encode_decode(format, EncodeInput{.x = x.data(), .live = live});
    bytes.push_back(out.bytes);
    decoded.push_back(out.decoded);
  }
  RC_ASSERT(simd::force_kernels(before).ok());
  for (size_t i = 1; i < bytes.size(); ++i) {
    RC_ASSERT(bytes[i] == bytes[0]);
    RC_ASSERT(std::memcmp(decoded[i].data(), decoded[0].data(), decoded[0].size() * sizeof(float)) == 0);
  }
}

// Each token is encoded by itself in formats with a scale per token of 16 bits: others do not change its
// values.
RC_GTEST_PROP(FormatProperty, TokensWithTheirOwnScalesDoNotFeelEachOther, ()) {
  const std::string name =
      *rc::gen::element(std::string("t4:s16"), std::string("g4"), std::string("t4a:s16"));
  const Format format = testing::must_parse(name, Side::kKey, 64);
  std::vector<float> x = any_data(64);
  const int kept = any_int(0, 64);
  const Encoded first = encode_decode(format, x);
  for (int t = 0; t < kPageTokens; ++t) {
    for (int c = 0; t != kept && c < 64; ++c) x[t * 64 + c] = -3.0f * x[t * 64 + c] + 1.0f;
  }
  const Encoded second = encode_decode(format, x);
  for (int c = 0; c < 64; ++c) RC_ASSERT(first.decoded[kept * 64 + c] == second.decoded[kept * 64 + c]);
}

// Any bytes decode without harm, and none of them passes for a tile by accident.
RC_GTEST_PROP(FormatProperty, ArbitraryBytesDecodeToSomething, ()) {
  const Format format = any_format();
  Random random(any_bits());
  testing::GuardedTile tile(format.tile_bytes());
  for (size_t i = 0; i < format.tile_bytes(); ++i) tile.data()[i] = static_cast<std::byte>(random.next());
  RC_ASSERT(!format.verify(tile.data()).ok());
  std::vector<float> x(static_cast<size_t>(kPageTokens) * format.layout().head_dim);
  format.decode(tile.data(), x.data());
  RC_ASSERT(tile.guards_intact());
}

}  // namespace
}  // namespace kvant

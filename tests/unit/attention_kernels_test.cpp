// Attention kernels of every ISA that this CPU runs, against double precision over decoded values.
//
// Bounds. Keys: q is rounded to a grid of step amax / 127 (amax / 4063 for bands of two terms) per row and
// band, so a logit is off by at most step / 2 * sum over channels of token_scale * |code - middle|. Values:
// weight times token scale is rounded to max / 255 (max / 4095), so an output is off by at most step / 2 *
// sum over tokens of channel_scale * |code - middle|. Middle: of the codes, also where they start at a low.
// Float rounding is far below both.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "simd/attention_constants.h"
#include "simd/kernels.h"
#include "unit/kernel_tiles.h"

namespace kvant {
namespace {

using simd::AttentionKernels;
using simd::KernelTable;
using test::TileSpec;

constexpr int kRows = 64;
constexpr int kHeadDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256};
constexpr double kFloatError = 4e-6;
constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

class KernelTest : public testing::TestWithParam<const KernelTable*> {
 protected:
  const AttentionKernels& kernels() const { return *GetParam()->attention; }
  bool scalar() const { return std::string(GetParam()->name) == "scalar"; }
  std::vector<int> row_counts() const {
    return scalar() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 4, 5, 7, 8, 16};
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, KernelTest, testing::ValuesIn(simd::available_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

// The layouts of one side, width and head size: bands, groups, scale types, channel scales, lows.
std::vector<TileSpec> specs(Side side, int dim, int bits) {
  const int other = bits == 8 ? 4 : bits + 1;
  const auto make = [&](std::vector<std::pair<int, int>> bands, ScaleType scale) {
    TileSpec spec;
    spec.side = side;
    spec.head_dim = dim;
    spec.bands = std::move(bands);
    spec.token_scale = scale;
    return spec;
  };
  const int half = dim / 16 * 8;
  std::vector<TileSpec> out = {
      make({{dim, bits}}, ScaleType::kE6M10),
      make({{half, bits}, {dim - half, other}}, ScaleType::kLog4),
      make({{8, other}, {8, bits}, {8, bits}, {dim - 24, bits}}, ScaleType::kLog8),
      make({{dim, bits}}, ScaleType::kNone),
  };
  if (dim % 32 == 0)
    out.push_back(make(std::vector<std::pair<int, int>>(dim / 32, {32, bits}), ScaleType::kE6M10));
  TileSpec asymmetric = make({{half, bits}, {dim - half, bits}}, ScaleType::kE6M10);
  asymmetric.asymmetric = true;
  out.push_back(asymmetric);
  TileSpec channel = make({{dim, bits}}, ScaleType::kNone);
  channel.channel_scale = channel.channel_centre = true;
  out.push_back(channel);
  channel.asymmetric = true;
  out.push_back(channel);
  TileSpec both = make({{24, bits}, {dim - 24, other}}, ScaleType::kLog4);
  both.channel_scale = true;
  out.push_back(both);
  return out;
}

std::string describe(const TileSpec& spec) {
  std::string text = "dim " + std::to_string(spec.head_dim) + " bands";
  for (const auto& [channels, bits] : spec.bands)
    text += " " + std::to_string(channels) + "x" + std::to_string(bits);
  text += " scale type " + std::to_string(static_cast<int>(spec.token_scale));
  return text + (spec.asymmetric ? " asymmetric" : "") + (spec.channel_scale ? " channel scale" : "");
}

// A tile with its values as doubles; all arrays are [64][head_dim].
struct Tile {
  Tile(const TileSpec& spec, uint32_t seed) : Tile(test::make_layout(spec)) {
    std::mt19937 rng(seed);
    test::fill_tile(layout, rng, data());
    describe_values();
  }
  // [64][head_dim] values through the format's own encoder.
  Tile(const Format& format, const std::vector<float>& x) : Tile(format.layout()) {
    format.encode({.x = x.data()}, data());
    describe_values();
  }
  std::byte* data() { return bytes.data(); }
  TileLayout layout;
  test::AlignedBytes bytes;
  std::vector<double> value;
  std::vector<double> size;        // magnitude of the terms that float arithmetic adds
  std::vector<double> per_query;   // error of a logit per error of (folded) q
  std::vector<double> per_weight;  // error of an output per error of weight times token scale

 private:
  explicit Tile(const TileLayout& layout_)
      : layout(layout_),
        bytes(layout.tile_bytes),
        value(static_cast<size_t>(kPageTokens) * layout.head_dim),
        size(value.size()),
        per_query(value.size()),
        per_weight(value.size()) {}
  void describe_values() {
    for (int b = 0; b < layout.n_bands; ++b) {
      const BandLayout& band = layout.bands[b];
      for (int t = 0; t < kPageTokens; ++t) {
        const double token_scale = test::token_scale_at(layout, b, data(), t);
        const double low = test::token_low_at(layout, b, data(), t);
        for (int c = 0; c < band.channels; ++c) {
          const int channel = band.first_channel + c, i = t * layout.head_dim + channel;
          const int code = test::code_at(layout, b, data(), t, c);
          const double level = code - static_cast<double>(layout.mid(b));
          const double middle = ((1 << band.bits) - 1) / 2.0;
          const double centre = test::channel_centre_at(layout, data(), channel);
          const double scale = test::channel_scale_at(layout, data(), channel);
          value[i] = centre + low + scale * token_scale * level;
          size[i] = std::abs(low) + std::abs(centre) + scale * token_scale * (std::abs(level) + middle);
          per_query[i] = token_scale * std::abs(code - middle);
          per_weight[i] = scale * std::abs(code - middle);
        }
      }
    }
  }
};

std::vector<float> random_rows(int rows, int dim, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(rows) * dim);
  for (float& v : x) v = normal(rng);
  return x;
}

// Normal values, channel c times 1 + c % 5.
std::vector<float> uneven_rows(int rows, int dim, uint32_t seed) {
  std::vector<float> x = random_rows(rows, dim, seed);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(1 + i % dim % 5);
  return x;
}

std::vector<float> random_weights(int rows, uint32_t seed) {
  std::mt19937 rng(seed);
  std::exponential_distribution<float> exponential;
  std::vector<float> w(static_cast<size_t>(rows) * kPageTokens);
  for (float& v : w) v = std::exp2(-2.0f * exponential(rng));
  return w;
}

std::vector<float> run_qk(const AttentionKernels& k, Tile& tile, const std::vector<float>& q, int rows,
                          const std::vector<uint64_t>& live, const std::vector<float>& base) {
  test::AlignedBytes memory(simd::prepared_query_bytes(tile.layout, rows));
  simd::PreparedQueries prepared;
  simd::place_prepared_queries(tile.layout, rows, memory.data(), &prepared);
  k.prepare_queries(tile.layout, q.data(), rows, &prepared);
  std::vector<float> logits(static_cast<size_t>(rows) * kPageTokens, kPoison);
  const simd::KeyTask task = {.layout = &tile.layout,
                              .tile = tile.data(),
                              .next = tile.data(),
                              .queries = &prepared,
                              .base = base.data(),
                              .live = live.data(),
                              .logits = logits.data()};
  k.qk_tiles(&task, 1);
  return logits;
}

std::vector<float> run_pv(const AttentionKernels& k, Tile& tile, const std::vector<float>& weights, int rows,
                          const std::vector<uint64_t>& live, float start) {
  test::AlignedBytes workspace(simd::pv_workspace_bytes(tile.layout, rows));
  std::vector<float> acc(static_cast<size_t>(rows) * tile.layout.head_dim, start);
  const simd::ValueTask task = {.layout = &tile.layout,
                                .tile = tile.data(),
                                .next = tile.data(),
                                .weights = weights.data(),
                                .rows = rows,
                                .live = live.data(),
                                .acc = acc.data()};
  k.pv_tiles(&task, 1, workspace.data());
  return acc;
}

// Half the rounding step of q in band b.
double query_error(const TileLayout& layout, int b, const float* q, Tile& tile) {
  const BandLayout& band = layout.bands[b];
  double amax = 0;
  for (int c = 0; c < band.channels; ++c) {
    const int channel = band.first_channel + c;
    amax = std::max(amax, std::abs(q[channel]) * test::channel_scale_at(layout, tile.data(), channel));
  }
  const bool two_terms = simd::query_terms(layout.channel_scale, band.bits) == 2;
  return amax / (two_terms ? simd::kQueryMaxTwoTerms : simd::kQueryMaxOneTerm) / 2;
}

void expect_scores(Tile& tile, const std::vector<float>& q, const std::vector<float>& base,
                   const std::vector<uint64_t>& live, const std::vector<float>& logits) {
  const TileLayout& layout = tile.layout;
  const int dim = layout.head_dim;
  for (int r = 0; r < kRows; ++r) {
    if (live[r] == 0) continue;
    const float* row = q.data() + static_cast<size_t>(r) * dim;
    double half_step[kMaxBands];
    for (int b = 0; b < layout.n_bands; ++b) half_step[b] = query_error(layout, b, row, tile);
    for (int t = 0; t < kPageTokens; ++t) {
      double expected = base[r], bound = 0, size = std::abs(base[r]);
      for (int b = 0; b < layout.n_bands; ++b) {
        const BandLayout& band = layout.bands[b];
        for (int c = band.first_channel; c < band.first_channel + band.channels; ++c) {
          expected += row[c] * tile.value[t * dim + c];
          size += std::abs(row[c]) * tile.size[t * dim + c];
          bound += half_step[b] * tile.per_query[t * dim + c];
        }
      }
      ASSERT_NEAR(logits[r * kPageTokens + t], expected, bound * 1.0001 + kFloatError * size)
          << "row " << r << " token " << t;
    }
  }
}

void expect_sums(Tile& tile, const std::vector<float>& weights, const std::vector<uint64_t>& live,
                 float start, const std::vector<float>& acc) {
  const TileLayout& layout = tile.layout;
  const int dim = layout.head_dim;
  for (int r = 0; r < kRows; ++r) {
    const float* w = weights.data() + static_cast<size_t>(r) * kPageTokens;
    for (int b = 0; b < layout.n_bands; ++b) {
      const BandLayout& band = layout.bands[b];
      double max = 0;
      for (int t = 0; t < kPageTokens; ++t)
        max = std::max(max, w[t] * test::token_scale_at(layout, b, tile.data(), t));
      const double half_step =
          max / (band.bits >= simd::kTwoTermBits ? simd::kWeightMaxTwoTerms : simd::kWeightMaxOneTerm) / 2;
      for (int c = band.first_channel; c < band.first_channel + band.channels; ++c) {
        double expected = start, bound = 0, size = std::abs(start);
        for (int t = 0; t < kPageTokens && live[r] != 0; ++t) {
          expected += w[t] * tile.value[t * dim + c];
          size += w[t] * tile.size[t * dim + c];
          bound += half_step * tile.per_weight[t * dim + c];
        }
        ASSERT_NEAR(acc[static_cast<size_t>(r) * dim + c], expected, bound * 1.0001 + kFloatError * size)
            << "row " << r << " channel " << c;
      }
    }
  }
}

template <class T>
std::vector<T> first_rows(const std::vector<T>& all, int rows, int per_row) {
  return {all.begin(), all.begin() + static_cast<ptrdiff_t>(rows) * per_row};
}

// Some rows see nothing; their outputs must stay as they are.
std::vector<uint64_t> mostly_live() {
  std::vector<uint64_t> live(kRows, ~uint64_t{0});
  live[1] = live[6] = live[40] = live[41] = live[42] = live[43] = 0;
  return live;
}

TEST_P(KernelTest, ScoresOfQuantizedKeys) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (int dim : kHeadDims) {
      for (const TileSpec& spec : specs(Side::kKey, dim, bits)) {
        SCOPED_TRACE(describe(spec));
        Tile tile(spec, 100 * bits + dim);
        const std::vector<float> q = random_rows(kRows, dim, 7);
        std::vector<float> base(kRows);
        for (int r = 0; r < kRows; ++r) base[r] = 0.25f * r;
        const auto live = mostly_live();
        const auto all = run_qk(kernels(), tile, q, kRows, live, base);
        expect_scores(tile, q, base, live, all);
        for (int rows : row_counts()) {
          const auto some = run_qk(kernels(), tile, first_rows(q, rows, dim), rows, live, base);
          for (int r = 0; r < rows; ++r) {
            if (live[r] == 0) continue;
            ASSERT_EQ(std::memcmp(&some[r * kPageTokens], &all[r * kPageTokens], 256), 0)
                << "row " << r << " of " << rows << " differs from row " << r << " of 64";
          }
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(KernelTest, SumsOfQuantizedValues) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (int dim : kHeadDims) {
      for (const TileSpec& spec : specs(Side::kValue, dim, bits)) {
        SCOPED_TRACE(describe(spec));
        Tile tile(spec, 100 * bits + dim);
        const std::vector<float> weights = random_weights(kRows, 9);
        const auto live = mostly_live();
        const auto all = run_pv(kernels(), tile, weights, kRows, live, 1.5f);
        expect_sums(tile, weights, live, 1.5f, all);
        for (int rows : row_counts()) {
          const auto some = run_pv(kernels(), tile, weights, rows, live, 1.5f);
          ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)), 0)
              << "the first " << rows << " rows differ when they come alone";
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Tiles as the registered formats write them, which also ties the layouts above to Format::decode.
TEST_P(KernelTest, TilesOfRegisteredFormats) {
  int checked = 0;
  for (const std::string& name : format_names()) {
    for (Side side : {Side::kKey, Side::kValue}) {
      for (int dim : {64, 80, 128}) {
        const Result<Format> format = Format::parse(name, side, dim);
        if (!format.ok() || format.value().exact()) continue;
        SCOPED_TRACE(name + " " + side_name(side) + " " + std::to_string(dim));
        Tile tile(format.value(), uneven_rows(kPageTokens, dim, 17));
        std::vector<float> decoded(tile.value.size());
        format.value().decode(tile.data(), decoded.data());
        for (size_t i = 0; i < decoded.size(); ++i)
          ASSERT_NEAR(decoded[i], tile.value[i], 1e-5 * tile.size[i] + 1e-6);
        const std::vector<uint64_t> live(kRows, ~uint64_t{0});
        if (side == Side::kKey) {
          const std::vector<float> q = random_rows(kRows, dim, 7), base(kRows, 0.0f);
          expect_scores(tile, q, base, live, run_qk(kernels(), tile, q, kRows, live, base));
        } else {
          const std::vector<float> weights = random_weights(kRows, 9);
          expect_sums(tile, weights, live, 0.0f, run_pv(kernels(), tile, weights, kRows, live, 0.0f));
        }
        if (HasFatalFailure()) return;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 20);
}

// Mean squares over logits: of what rounding q adds, and of what the format lost before.
struct LogitErrors {
  double rounding = 0, format = 0;
};

// Channel c of the keys has a size between 1 / spread and 1, even in its logarithm.
LogitErrors logit_errors(const AttentionKernels& kernels, const Format& format, double spread,
                         uint32_t seed) {
  const int dim = format.layout().head_dim, rows = 8;
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> exponent(-1.0, 0.0);
  std::vector<float> size(dim), x(static_cast<size_t>(kPageTokens) * dim), decoded(x.size());
  for (float& v : size) v = static_cast<float>(std::pow(spread, exponent(rng)));
  for (size_t i = 0; i < x.size(); ++i) x[i] = normal(rng) * size[i % dim];
  Tile tile(format, x);
  format.decode(tile.data(), decoded.data());
  const std::vector<float> q = random_rows(rows, dim, seed + 1), base(rows, 0.0f);
  const std::vector<uint64_t> live(rows, ~uint64_t{0});
  const std::vector<float> logits = run_qk(kernels, tile, q, rows, live, base);
  LogitErrors errors;
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < kPageTokens; ++t) {
      double original = 0, stored = 0;
      for (int c = 0; c < dim; ++c) {
        original += static_cast<double>(q[r * dim + c]) * x[t * dim + c];
        stored += static_cast<double>(q[r * dim + c]) * decoded[t * dim + c];
      }
      errors.rounding += std::pow(logits[r * kPageTokens + t] - stored, 2);
      errors.format += std::pow(stored - original, 2);
    }
  }
  return errors;
}

// KL grows with the square of errors: these shares are what attention on packed codes adds to a format's KL.
TEST_P(KernelTest, RoundingQueriesAddsLittleToWhatChannelFormatsLose) {
  for (const char* name : {"c2a", "c3a", "c4a", "c4", "ct4", "c5a", "c6a", "c6", "c8a"}) {
    for (int dim : {64, 128, 256}) {
      for (double spread : {1.0, 100.0}) {
        const Result<Format> format = Format::parse(name, Side::kKey, dim);
        ASSERT_TRUE(format.ok());
        LogitErrors all;
        for (uint32_t seed = 0; seed < 4; ++seed) {
          const LogitErrors errors = logit_errors(kernels(), format.value(), spread, 10 * seed);
          all.rounding += errors.rounding;
          all.format += errors.format;
        }
        EXPECT_LT(all.rounding, 0.05 * all.format)
            << name << ", head size " << dim << ", channels spread over " << spread << ": "
            << 100 * all.rounding / all.format << " %";
      }
    }
  }
}

// With scales of one, outputs are integer sums: equal on every ISA, and exactly what they should be.
TileSpec unit_spec(Side side, int dim, int bits) {
  TileSpec spec;
  spec.side = side;
  spec.head_dim = dim;
  spec.bands = {{dim, bits}};
  spec.token_scale = ScaleType::kNone;
  return spec;
}

enum class Extreme { kRandom, kMost, kLeast, kAlternating };

TEST_P(KernelTest, IntegerScoresAreExact) {
  const AttentionKernels& reference = *simd::available_kernels().front()->attention;
  for (int bits = 2; bits <= 8; ++bits) {
    for (int dim : kHeadDims) {
      for (Extreme extreme : {Extreme::kRandom, Extreme::kMost, Extreme::kLeast, Extreme::kAlternating}) {
        Tile tile(unit_spec(Side::kKey, dim, bits), 3);
        const int largest =
            static_cast<int>(bits >= simd::kTwoTermBits ? simd::kQueryMaxTwoTerms : simd::kQueryMaxOneTerm);
        std::mt19937 rng(bits * dim);
        if (extreme != Extreme::kRandom) std::memset(tile.data(), 0xff, tile.layout.trailer_offset);
        std::vector<float> q(static_cast<size_t>(5) * dim);
        for (size_t i = 0; i < q.size(); ++i) {
          int v = static_cast<int>(rng() % (2 * largest + 1)) - largest;
          if (extreme == Extreme::kMost || i % dim == 0) v = largest;
          if (extreme == Extreme::kLeast) v = -largest;
          if (extreme == Extreme::kAlternating) v = i / 2 % 2 == 0 ? largest : -largest;
          q[i] = static_cast<float>(v);
        }
        const std::vector<uint64_t> live(5, ~uint64_t{0});
        const std::vector<float> base(5, 0.0f);
        const auto logits = run_qk(kernels(), tile, q, 5, live, base);
        const auto expected = run_qk(reference, tile, q, 5, live, base);
        ASSERT_EQ(std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)), 0)
            << bits << " bits, dim " << dim << ", case " << static_cast<int>(extreme);
        for (int r = 0; r < 5; ++r) {
          for (int t = 0; t < kPageTokens; ++t) {
            int64_t sum = 0, q_sum = 0;
            for (int c = 0; c < dim; ++c) {
              const auto v = static_cast<int64_t>(q[r * dim + c]);
              sum += v * test::code_at(tile.layout, 0, tile.data(), t, c);
              q_sum += v;
            }
            const float exact = static_cast<float>(sum) + -tile.layout.mid(0) * static_cast<float>(q_sum);
            ASSERT_EQ(logits[r * kPageTokens + t], exact) << bits << " bits, dim " << dim << " row " << r;
          }
        }
      }
    }
  }
}

TEST_P(KernelTest, IntegerSumsAreExact) {
  const AttentionKernels& reference = *simd::available_kernels().front()->attention;
  for (int bits = 2; bits <= 8; ++bits) {
    for (int dim : kHeadDims) {
      for (Extreme extreme : {Extreme::kRandom, Extreme::kMost}) {
        Tile tile(unit_spec(Side::kValue, dim, bits), 4);
        const int largest =
            static_cast<int>(bits >= simd::kTwoTermBits ? simd::kWeightMaxTwoTerms : simd::kWeightMaxOneTerm);
        std::mt19937 rng(bits * dim);
        if (extreme != Extreme::kRandom) std::memset(tile.data(), 0xff, tile.layout.trailer_offset);
        std::vector<float> weights(5 * kPageTokens);
        for (size_t i = 0; i < weights.size(); ++i) {
          const bool most = extreme == Extreme::kMost || i % kPageTokens == 0;
          weights[i] = static_cast<float>(most ? largest : static_cast<int>(rng() % (largest + 1)));
        }
        const std::vector<uint64_t> live(5, ~uint64_t{0});
        const auto acc = run_pv(kernels(), tile, weights, 5, live, 0.0f);
        const auto expected = run_pv(reference, tile, weights, 5, live, 0.0f);
        ASSERT_EQ(std::memcmp(acc.data(), expected.data(), acc.size() * sizeof(float)), 0)
            << bits << " bits, dim " << dim;
        for (int r = 0; r < 5; ++r) {
          for (int c = 0; c < dim; ++c) {
            int64_t sum = 0, weight_sum = 0;
            for (int t = 0; t < kPageTokens; ++t) {
              const auto w = static_cast<int64_t>(weights[r * kPageTokens + t]);
              sum += w * test::code_at(tile.layout, 0, tile.data(), t, c);
              weight_sum += w;
            }
            const float exact =
                static_cast<float>(sum) + -tile.layout.mid(0) * static_cast<float>(weight_sum);
            ASSERT_EQ(acc[r * dim + c], exact) << bits << " bits, dim " << dim << " row " << r;
          }
        }
      }
    }
  }
}

TEST_P(KernelTest, QueriesAreQuantizedAlikeOnEveryIsa) {
  const AttentionKernels& reference = *simd::available_kernels().front()->attention;
  for (int bits : {4, 8}) {
    for (int dim : {40, 128}) {
      TileSpec spec = unit_spec(Side::kKey, dim, bits);
      spec.bands = {{24, bits}, {dim - 24, bits}};
      const TileLayout layout = test::make_layout(spec);
      std::vector<float> q = random_rows(3, dim, 11);
      for (int c = 0; c < dim; ++c) q[dim + c] *= 1e-33f;  // below the floor: all zeros
      const size_t bytes = simd::prepared_query_bytes(layout, 3);
      test::AlignedBytes memory[2] = {test::AlignedBytes(bytes), test::AlignedBytes(bytes)};
      simd::PreparedQueries prepared[2];
      for (int i = 0; i < 2; ++i) {
        simd::place_prepared_queries(layout, 3, memory[i].data(), &prepared[i]);
        (i == 0 ? reference : kernels()).prepare_queries(layout, q.data(), 3, &prepared[i]);
      }
      const size_t q8_bytes = static_cast<size_t>(3) * dim * (bits == 8 ? 2 : 1);
      EXPECT_EQ(std::memcmp(prepared[0].q8, prepared[1].q8, q8_bytes), 0);
      for (int i = 0; i < 2 * 3; ++i) {
        EXPECT_EQ(prepared[0].scale[i], prepared[1].scale[i]);
        EXPECT_EQ(prepared[0].offset[i], prepared[1].offset[i]);
        EXPECT_NEAR(prepared[0].q_sum[i], prepared[1].q_sum[i], 1e-4);
        EXPECT_EQ(prepared[1].scale[i] == 0.0f, i % 3 == 1);
      }
    }
  }
}

TEST_P(KernelTest, NegligibleWeightsAddNothing) {
  Tile tile(unit_spec(Side::kValue, 64, 4), 5);
  const std::vector<uint64_t> live(1, ~uint64_t{0});
  for (float w : {0.0f, 1e-38f, 1e-31f}) {
    for (float x : run_pv(kernels(), tile, std::vector<float>(kPageTokens, w), 1, live, 2.0f))
      EXPECT_EQ(x, 2.0f);
  }
}

}  // namespace
}  // namespace kvant

// Every target against the scalar kernels, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "kvant/half.h"
#include "simd/encode.h"
#include "simd/hadamard_factors.h"
#include "simd/kernels.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using simd::EncodeKernels;
using testing::Random;

class ForcedKernels {
 public:
  explicit ForcedKernels(const char* name) : before_(simd::kernels().name) {
    EXPECT_TRUE(simd::force_kernels(name).ok()) << name;
    EXPECT_STREQ(simd::kernels().name, name);
  }
  ~ForcedKernels() { EXPECT_TRUE(simd::force_kernels(before_).ok()); }

 private:
  const char* before_;
};

std::vector<float> awkward_tile(int head_dim, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(kPageTokens) * head_dim);
  for (size_t i = 0; i < x.size(); ++i) {
    const float size = std::ldexp(1.0f, static_cast<int>(random.next() % 24) - 12);
    x[i] = random.next() % 16 == 0 ? size * random.normal() : random.normal();
    if (random.next() % 64 == 0) x[i] = 0.0f;
    if (random.next() % 512 == 0) x[i] = 1e-40f;
    if ((i / head_dim) % 9 == 4) x[i] *= 0.02f;
  }
  return x;
}

TEST(EncodeKernels, TilesAreTheSameOnEveryTarget) {
  int compared = 0;
  testing::for_each_format([&](const Format& format) {
    const std::vector<float> x = awkward_tile(format.layout().head_dim, 21);
    std::vector<float> weight(format.layout().head_dim);
    for (size_t c = 0; c < weight.size(); ++c) weight[c] = 0.25f + static_cast<float>(c % 7);
    for (const bool weighted : {false, true}) {
      const EncodeInput in = {.x = x.data(),
                              .live = weighted ? ~uint64_t{0} : 0xfff0ffffffff7ffeu,
                              .channel_weight = weighted ? weight.data() : nullptr};
      std::vector<testing::Encoded> results;
      for (const simd::KernelTable* table : simd::available_kernels()) {
        const ForcedKernels forced(table->name);
        results.push_back(testing::encode_decode(format, in));
        ASSERT_EQ(results[0].bytes, results.back().bytes) << table->name;
        ASSERT_EQ(std::memcmp(results[0].decoded.data(), results.back().decoded.data(), 4 * x.size()), 0)
            << table->name;
        ASSERT_EQ(results[0].stats.signal, results.back().stats.signal) << table->name;
        ASSERT_EQ(results[0].stats.error, results.back().stats.error) << table->name;
        ASSERT_EQ(results[0].stats.max_error, results.back().stats.max_error) << table->name;
        ++compared;
      }
    }
  });
  EXPECT_GT(compared, 1000);
}

std::vector<const EncodeKernels*> encode_tables() {
  std::vector<const EncodeKernels*> tables;
  for (const simd::KernelTable* table : simd::available_kernels()) tables.push_back(table->encode);
  return tables;
}

TEST(EncodeKernels, BestTableOfThisMachineIsNotTheReference) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "no AVX2 here";
  EXPECT_NE(encode_tables().back(), simd::scalar_encode_kernels());
#else
  GTEST_SKIP() << "only x86-64 has its own kernels";
#endif
}

TEST(EncodeKernels, MatvecIsTheSameAndRight) {
  for (int dim : testing::kHeadDims) {
    Random random(static_cast<uint64_t>(dim));
    std::vector<uint16_t> m(static_cast<size_t>(dim) * dim);
    std::vector<float> x(static_cast<size_t>(dim) * 5);
    for (uint16_t& v : m) v = float_to_half(random.normal());
    m[1] = 0x8001;  // the smallest subnormal
    for (float& v : x) v = random.normal();
    std::vector<float> expected(x.size());
    const float scale = 0.25f;
    for (int r = 0; r < 5; ++r) {
      for (int i = 0; i < dim; ++i) {
        float sum = 0.0f;
        for (int j = 0; j < dim; ++j) {
          const float product =
              half_to_float(m[static_cast<size_t>(j) * dim + i]) * x[static_cast<size_t>(r) * dim + j];
          sum += product;
        }
        expected[static_cast<size_t>(r) * dim + i] = scale * sum;
      }
    }
    for (const EncodeKernels* kernels : encode_tables()) {
      std::vector<float> y(x.size(), -1.0f);
      kernels->matvec(m.data(), scale, x.data(), y.data(), dim, 5);
      ASSERT_EQ(y, expected) << dim;
    }
  }
}

// In the order that simd/encode.h states, since stored bytes depend on it: factor, butterflies of growing
// stride, norm.
void plain_hadamard(float* x, int block) {
  const int factor = simd::hadamard_factor(block), n = block / factor;
  const std::vector<float> in(x, x + block);
  for (int i = 0; i < block && factor != 1; ++i) {
    x[i] = 0.0f;
    for (int j = 0; j < factor; ++j) {
      x[i] += simd::hadamard_matrix(factor)[i / n * simd::kHadamardStride + j] * in[j * n + i % n];
    }
  }
  for (int stride = 1; stride < n; stride *= 2) {
    for (int i = 0; i < block; ++i) {
      if ((i % n & stride) != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  for (int i = 0; i < block; ++i) x[i] *= static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
}

TEST(EncodeKernels, HadamardIsTheSame) {
  const int kBlocks[][2] = {{32, 32},   {40, 40},   {64, 64},   {72, 24},   {80, 80},   {96, 96},   {104, 8},
                            {112, 112}, {128, 128}, {160, 160}, {192, 192}, {224, 224}, {256, 256}, {56, 56}};
  for (const auto& [dim, block] : kBlocks) {
    Random random(static_cast<uint64_t>(dim));
    std::vector<float> x(static_cast<size_t>(dim) * 3);
    for (float& v : x) v = random.normal();
    std::vector<float> expected = x;
    for (int i = 0; i < 3 * dim; i += block) plain_hadamard(expected.data() + i, block);
    for (const EncodeKernels* kernels : encode_tables()) {
      std::vector<float> y = x;
      kernels->hadamard(y.data(), dim, block, 3);
      ASSERT_EQ(y, expected) << dim;
    }
  }
}

TEST(EncodeKernels, TransposeMovesEveryValue) {
  for (int channels : {8, 24, 40, 64, 256}) {
    const size_t stride = static_cast<size_t>(channels) + 16;
    std::vector<float> rows(kPageTokens * stride);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
    for (const EncodeKernels* kernels : encode_tables()) {
      std::vector<float> columns(static_cast<size_t>(channels) * kPageTokens, -1.0f);
      kernels->transpose(rows.data(), stride, channels, columns.data());
      for (int c = 0; c < channels; ++c) {
        for (int t = 0; t < kPageTokens; ++t) ASSERT_EQ(columns[c * kPageTokens + t], rows[t * stride + c]);
      }
    }
  }
}

TEST(EncodeKernels, HalfConversionsAreThoseOfHalfH) {
  std::vector<uint16_t> words(0x10000 + 3);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>(i);
  Random random(31);
  std::vector<float> x;
  for (int i = 0; i < 100003; ++i) x.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.next())));
  for (uint32_t h = 0; h < 0x7c00; ++h) {  // exact, ties and their neighbours
    const float middle =
        0.5f * half_to_float(static_cast<uint16_t>(h)) + 0.5f * half_to_float(static_cast<uint16_t>(h + 1));
    if (std::isinf(middle)) continue;
    for (float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) x.push_back(-v);
  }
  for (const EncodeKernels* kernels : encode_tables()) {
    std::vector<float> y(words.size());
    kernels->from_half(words.data(), y.data(), words.size());
    for (size_t i = 0; i < words.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(half_to_float(words[i]))) << i;
    }
    std::vector<uint16_t> h(x.size());
    kernels->to_half(x.data(), h.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(h[i], float_to_half(x[i])) << std::bit_cast<uint32_t>(x[i]);
  }
}

// The search finds the best of its trials, judged by an error in double precision.
TEST(EncodeKernels, SearchFindsTheLeastError) {
  constexpr int kSteps = 24;
  Random random(41);
  std::vector<float> x(kSteps * 64), weight(kSteps), centre(64), anchor(64), inverse(64);
  for (float& v : x) v = random.normal();
  for (float& v : weight) v = 1.0f + random.uniform();
  for (int t = 0; t < 64; ++t) {
    centre[t] = 0.2f * random.uniform();
    anchor[t] = t % 8 == 0 ? 100.0f : 0.6f + 0.3f * random.uniform();
    inverse[t] = 1.0f / anchor[t];
  }
  for (const bool weighted : {false, true}) {
    for (int bits = 2; bits <= 8; ++bits) {
      simd::ScaleSearch search = {.x = x.data(),
                                  .stride = 64,
                                  .steps = kSteps,
                                  .lanes = 64,
                                  .bits = bits,
                                  .weight = weighted ? weight.data() : nullptr,
                                  .centre = centre.data(),
                                  .anchor = anchor.data(),
                                  .inverse_anchor = inverse.data(),
                                  .trials = 16};
      for (int j = 0; j < 16; ++j) {
        search.ratio[j] = std::exp2(-0.25f * static_cast<float>(j));
        search.inverse_ratio[j] = 1.0f / search.ratio[j];
      }
      std::vector<std::vector<uint8_t>> best;
      for (const EncodeKernels* kernels : encode_tables()) {
        best.emplace_back(64, 0xee);
        kernels->search_scale(search, best.back().data());
        ASSERT_EQ(best.back(), best.front());
      }
      for (int t = 0; t < 64; ++t) {
        double errors[17], least = 1e300;
        for (int j = 0; j <= 16; ++j) {
          const double scale = j == 16 ? 0.0 : static_cast<double>(anchor[t]) * search.ratio[j];
          const double half = 1 << (bits - 1);
          errors[j] = 0;
          for (int i = 0; i < kSteps; ++i) {
            const double v = static_cast<double>(x[i * 64 + t]) - centre[t];
            const double level = scale > 0 ? std::clamp(std::floor(v / scale), -half, half - 1) + 0.5 : 0.0;
            errors[j] += (level * scale - v) * (level * scale - v) * (weighted ? weight[i] : 1.0);
          }
          least = std::min(least, errors[j]);
        }
        ASSERT_LE(errors[best[0][t]], least * 1.0001) << "bits " << bits << " lane " << t;
      }
    }
  }
}

TEST(EncodeKernels, FirstOfEqualTrialsWins) {
  const std::vector<float> x(16 * 8, 0.0f), zero(16, 0.0f);
  simd::ScaleSearch search = {.x = x.data(),
                              .stride = 16,
                              .steps = 8,
                              .lanes = 16,
                              .bits = 4,
                              .centre = zero.data(),
                              .anchor = zero.data(),
                              .inverse_anchor = zero.data(),
                              .trials = 16};
  for (int j = 0; j < 16; ++j) search.ratio[j] = search.inverse_ratio[j] = 1.0f;
  for (const EncodeKernels* kernels : encode_tables()) {
    std::vector<uint8_t> best(16, 0xee);
    kernels->search_scale(search, best.data());
    EXPECT_EQ(best, std::vector<uint8_t>(16, 0));
  }
}

// Squared error of one lane in double precision, by the formula of simd::LineFit.
double line_error(const simd::LineFit& fit, int lane, float scale, float low) {
  double error = 0;
  for (int i = 0; i < fit.steps; ++i) {
    const double value = static_cast<double>(fit.x[i * fit.stride + lane]) - low;
    const double top = (1 << fit.bits) - 1;
    const double code = scale > 0 ? std::floor(std::clamp(value / scale + 0.5, 0.0, top)) : 0.0;
    error += (code * scale - value) * (code * scale - value);
  }
  return error;
}

TEST(EncodeKernels, FittedLinesAreBetterAndTheSame) {
  constexpr int kSteps = 61, kLanes = 64;
  Random random(51);
  std::vector<float> x(kSteps * kLanes), scale(kLanes), low(kLanes);
  for (int bits = 2; bits <= 8; ++bits) {
    for (int i = 0; i < kSteps * kLanes; ++i) x[i] = random.normal() + (i % kLanes == 7 ? 1000.0f : 0.0f);
    for (int t = 0; t < kLanes; ++t) {
      scale[t] = t == 3 ? 0.0f : 6.0f / static_cast<float>((1 << bits) - 1);
      low[t] = t == 7 ? 997.0f : -3.0f;
    }
    std::vector<std::vector<float>> scales, lows;
    double before = 0, after = 0;
    for (const EncodeKernels* kernels : encode_tables()) {
      scales.push_back(scale);
      lows.push_back(low);
      const simd::LineFit fit = {.x = x.data(),
                                 .stride = kLanes,
                                 .steps = kSteps,
                                 .lanes = kLanes,
                                 .bits = bits,
                                 .scale = scales.back().data(),
                                 .low = lows.back().data()};
      kernels->fit_line(fit);
      ASSERT_EQ(scales.back(), scales.front());
      ASSERT_EQ(lows.back(), lows.front());
      for (int t = 0; t < kLanes; ++t) {
        const double start = line_error(fit, t, scale[t], low[t]);
        const double end = line_error(fit, t, fit.scale[t], fit.low[t]);
        ASSERT_LE(end, start * 1.0001) << "bits " << bits << " lane " << t;
        before += start;
        after += end;
      }
    }
    EXPECT_LT(after, 0.98 * before) << bits;
    EXPECT_EQ(scales.front()[3], 0.0f);
  }
}

}  // namespace
}  // namespace kvant

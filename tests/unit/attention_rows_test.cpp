// Softmax and the kernels of exact rows, on every ISA that this CPU runs, against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvant/half.h"
#include "kvant/types.h"
#include "simd/kernels.h"

namespace kvant {
namespace {

using simd::AttentionKernels;
using simd::KernelTable;
using simd::RowState;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint16_t kNaNWord = 0x7fff;  // NaN as binary16 and as bfloat16
constexpr int kRows = 64;

class RowKernelTest : public testing::TestWithParam<const KernelTable*> {
 protected:
  const AttentionKernels& kernels() const { return *GetParam()->attention; }
};
INSTANTIATE_TEST_SUITE_P(Isa, RowKernelTest, testing::ValuesIn(simd::available_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  return x;
}

// A page of words in rows `stride` apart; slots from `count` on and the gaps are NaN.
struct Page {
  Page(int dim_, int count, size_t stride_, bool bf16_, uint32_t seed)
      : dim(dim_), stride(stride_), bf16(bf16_), words(kPageTokens * stride_, kNaNWord) {
    const std::vector<float> x = random_floats(static_cast<size_t>(count) * dim, seed);
    for (int t = 0; t < count; ++t) {
      for (int c = 0; c < dim; ++c) {
        const float v = x[static_cast<size_t>(t) * dim + c];
        words[t * stride + c] = bf16 ? float_to_bf16(v) : float_to_half(v);
      }
    }
  }
  double at(int t, int c) const {
    const uint16_t w = words[t * stride + c];
    return bf16 ? bf16_to_float(w) : half_to_float(w);
  }
  // All slots as floats [64][dim].
  std::vector<float> floats() const {
    std::vector<float> x(static_cast<size_t>(kPageTokens) * dim);
    for (int t = 0; t < kPageTokens; ++t) {
      for (int c = 0; c < dim; ++c) x[static_cast<size_t>(t) * dim + c] = static_cast<float>(at(t, c));
    }
    return x;
  }
  int dim;
  size_t stride;
  bool bf16;
  std::vector<uint16_t> words;
};

TEST_P(RowKernelTest, ScoresOfExactRows) {
  for (int dim : {32, 40, 64, 72, 80, 96, 112, 128, 192, 256}) {
    for (int count : {1, 2, 5, 17, 63, 64}) {
      for (bool bf16 : {false, true}) {
        const Page page(dim, count, static_cast<size_t>(dim) + 24, bf16, dim + count);
        const auto q = random_floats(static_cast<size_t>(kRows) * dim, 3);
        std::vector<uint64_t> live(kRows, ~uint64_t{0});
        live[2] = 0;
        std::vector<float> all(kRows * kPageTokens, 0.0f);
        kernels().qk_rows(page.words.data(), page.words.data(), page.stride, count, bf16, dim, q.data(),
                          kRows, live.data(), all.data());
        for (int r = 0; r < kRows; ++r) {
          for (int t = 0; t < count && live[r] != 0; ++t) {
            double expected = 0, size = 0;
            for (int c = 0; c < dim; ++c) {
              expected += q[static_cast<size_t>(r) * dim + c] * page.at(t, c);
              size += std::abs(q[static_cast<size_t>(r) * dim + c] * page.at(t, c));
            }
            ASSERT_NEAR(all[r * kPageTokens + t], expected, 1e-6 * size)
                << dim << " " << count << " row " << r;
          }
        }
        for (int rows : {1, 2, 3, 4, 5, 15, 16}) {
          std::vector<float> some(rows * kPageTokens, 0.0f);
          kernels().qk_rows(page.words.data(), page.words.data(), page.stride, count, bf16, dim, q.data(),
                            rows, live.data(), some.data());
          for (int r = 0; r < rows; ++r) {
            ASSERT_EQ(std::memcmp(&some[r * kPageTokens], &all[r * kPageTokens], count * sizeof(float)), 0)
                << "row " << r << " of " << rows << ", dim " << dim;
          }
        }
        std::vector<float> from_floats(kRows * kPageTokens, 0.0f);
        kernels().qk_floats(page.floats().data(), count, dim, q.data(), kRows, live.data(),
                            from_floats.data());
        for (int r = 0; r < kRows; ++r) {
          ASSERT_EQ(std::memcmp(&from_floats[r * kPageTokens], &all[r * kPageTokens], count * sizeof(float)),
                    0);
        }
      }
    }
  }
}

TEST_P(RowKernelTest, SumsOfExactRows) {
  for (int dim : {32, 40, 64, 72, 80, 96, 112, 128, 192, 256}) {
    for (int count : {1, 2, 5, 17, 63, 64}) {
      for (bool bf16 : {false, true}) {
        Page page(dim, count, static_cast<size_t>(dim) + 8, bf16, dim + count);
        const uint64_t written = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
        std::mt19937 rng(count);
        std::vector<float> weights(kRows * kPageTokens, 0.0f);
        std::vector<uint64_t> live(kRows);
        for (int r = 0; r < kRows; ++r) {
          // Slot 0 is hidden from everyone and may hold anything, slot 1 from most.
          live[r] = written & ~uint64_t{1} & (r == 0 ? ~uint64_t{0} : ~uint64_t{2});
          for (int t = 0; t < count; ++t) {
            if ((live[r] >> t & 1) != 0)
              weights[r * kPageTokens + t] = static_cast<float>(rng() % 1000) / 1000.0f;
          }
        }
        for (int c = 0; c < dim; ++c) page.words[c] = kNaNWord;
        std::vector<float> all(static_cast<size_t>(kRows) * dim, 0.5f);
        kernels().pv_rows(page.words.data(), page.words.data(), page.stride, count, bf16, dim, weights.data(),
                          kRows, live.data(), all.data());
        for (int r = 0; r < kRows; ++r) {
          for (int c = 0; c < dim; ++c) {
            double expected = 0.5, size = 0.5;
            for (int t = 0; t < count; ++t) {
              if ((live[r] >> t & 1) == 0) continue;
              expected += weights[r * kPageTokens + t] * page.at(t, c);
              size += std::abs(weights[r * kPageTokens + t] * page.at(t, c));
            }
            ASSERT_NEAR(all[static_cast<size_t>(r) * dim + c], expected, 2e-6 * size)
                << dim << " " << count << " row " << r;
          }
        }
        for (int rows : {1, 2, 3, 4, 5, 15, 16}) {
          std::vector<float> some(static_cast<size_t>(rows) * dim, 0.5f);
          kernels().pv_rows(page.words.data(), page.words.data(), page.stride, count, bf16, dim,
                            weights.data(), rows, live.data(), some.data());
          ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)), 0)
              << rows << " rows, dim " << dim;
        }
        std::vector<float> from_floats(static_cast<size_t>(kRows) * dim, 0.5f);
        kernels().pv_floats(page.floats().data(), count, dim, weights.data(), kRows, live.data(),
                            from_floats.data());
        ASSERT_EQ(std::memcmp(from_floats.data(), all.data(), all.size() * sizeof(float)), 0);
      }
    }
  }
}

// Softmax over pages of one row that follow each other in `logits`.
simd::LogitStrip strip_of(std::vector<float>* logits, const std::vector<uint64_t>& live,
                          std::vector<float>* sums) {
  sums->assign(live.size(), kNaN);
  return {.logits = logits->data(),
          .page_stride = kPageTokens,
          .live = live.data(),
          .live_stride = 1,
          .pages = static_cast<int>(live.size()),
          .rows = 1,
          .sums = sums->data(),
          .sum_stride = 1};
}

TEST_P(RowKernelTest, SoftmaxMatchesDoublePrecision) {
  std::mt19937 rng(5);
  for (float spread : {0.01f, 1.0f, 30.0f, 300.0f}) {
    for (uint64_t live_bits : {~uint64_t{0}, uint64_t{1}, uint64_t{1} << 63, uint64_t{0x8000f00dcafe1234}}) {
      const float old_max = std::ceil(0.5f * spread);
      std::vector<float> logits = random_floats(kPageTokens, rng());
      for (float& x : logits) x *= spread;
      std::vector<float> weights = logits;
      for (int t = 0; t < kPageTokens; ++t) {
        if ((live_bits >> t & 1) == 0) weights[t] = t % 2 == 0 ? kNaN : kInfinity;  // hidden: whatever
      }
      RowState state{.max = old_max, .sum = 3.0f};
      float rescale = kNaN;
      std::vector<float> sums;
      kernels().softmax(strip_of(&weights, {live_bits}, &sums), &state, &rescale);
      double max = old_max, added = 0;
      for (int t = 0; t < kPageTokens; ++t) {
        if ((live_bits >> t & 1) != 0) max = std::max(max, std::ceil(static_cast<double>(logits[t])));
      }
      for (int t = 0; t < kPageTokens; ++t) {
        const bool visible = (live_bits >> t & 1) != 0;
        const double w = visible ? std::exp2(static_cast<double>(logits[t]) - max) : 0.0;
        ASSERT_NEAR(weights[t], w, 3e-7 * w + 2.4e-38) << "token " << t;
        added += w;
      }
      EXPECT_EQ(state.max, static_cast<float>(max));
      EXPECT_EQ(rescale, old_max - max < -125 ? 0.0 : std::exp2(old_max - max));
      EXPECT_NEAR(sums[0], added, 1e-6 * added + 1e-36);
      EXPECT_NEAR(state.sum, 3.0 * rescale + added, 1e-6 * (3 + added));
    }
  }
}

TEST_P(RowKernelTest, WeightsAreAccurateOverTheWholeRange) {
  for (float low = 0.0f; low > -127.0f; low -= 0.5f) {
    std::vector<float> x(kPageTokens);
    for (int t = 0; t < kPageTokens; ++t) x[t] = t == 0 ? 0.0f : low - static_cast<float>(t) / 128.0f;
    const std::vector<float> logits = x;
    RowState state;
    float rescale = kNaN;
    std::vector<float> sums;
    kernels().softmax(strip_of(&x, {~uint64_t{0}}, &sums), &state, &rescale);
    EXPECT_EQ(x[0], 1.0f);
    for (int t = 0; t < kPageTokens; ++t) {
      const double w = std::nearbyint(logits[t]) < -125.0f ? 0.0 : std::exp2(static_cast<double>(logits[t]));
      ASSERT_NEAR(x[t], w, 3e-7 * w) << logits[t];
    }
  }
}

// A row's state and weights, all relative to the last maximum.
struct Weighed {
  RowState state;
  std::vector<float> weights;
};

TEST_P(RowKernelTest, StripsMayBeCutAnywhere) {
  constexpr int kPages = simd::kMaxStripPages;
  std::mt19937 rng(9);
  std::vector<float> logits = random_floats(kPages * kPageTokens, 3);
  std::vector<uint64_t> live(kPages);
  for (int i = 0; i < kPages; ++i) {
    live[i] = i % 3 == 0 ? ~uint64_t{0} : (uint64_t{rng()} << 32 | rng());
    for (int t = 0; t < kPageTokens; ++t)
      logits[i * kPageTokens + t] = logits[i * kPageTokens + t] * 9 + 4 * i;
  }
  live[4] = 0;
  const auto weigh = [&](int strip_pages, float skip_below) {
    Weighed out{.state = {}, .weights = logits};
    for (int first = 0; first < kPages; first += strip_pages) {
      const int pages = std::min(strip_pages, kPages - first);
      std::vector<float> sums(pages), rescale(1);
      const simd::LogitStrip strip = {.logits = out.weights.data() + first * kPageTokens,
                                      .page_stride = kPageTokens,
                                      .live = live.data() + first,
                                      .live_stride = 1,
                                      .pages = pages,
                                      .rows = 1,
                                      .sums = sums.data(),
                                      .sum_stride = 1,
                                      .skip_below = skip_below};
      kernels().softmax(strip, &out.state, rescale.data());
      kernels().rescale(out.weights.data(), first * kPageTokens, 1, rescale.data());
    }
    return out;
  };
  for (const float skip_below : {kInfinity, 12.0f}) {
    const Weighed whole = weigh(kPages, skip_below);
    for (int strip_pages : {1, 2, 3, 5}) {
      const Weighed cut = weigh(strip_pages, skip_below);
      EXPECT_EQ(cut.state.max, whole.state.max);
      EXPECT_EQ(cut.state.sum, whole.state.sum) << strip_pages << " pages per strip";
      for (int i = 0; i < kPages; ++i) {
        if (live[i] == 0) continue;
        const size_t at = static_cast<size_t>(i) * kPageTokens;
        EXPECT_EQ(std::memcmp(&cut.weights[at], &whole.weights[at], kPageTokens * sizeof(float)), 0);
      }
    }
  }
}

TEST_P(RowKernelTest, PagesFarBelowTheLargestAreZero) {
  std::vector<float> logits(4 * kPageTokens, 0.0f), sums;
  const float tops[] = {-30.0f, 10.0f, -14.0f, -14.5f};
  for (int i = 0; i < 4; ++i) {
    for (int t = 0; t < kPageTokens; ++t)
      logits[i * kPageTokens + t] = tops[i] - static_cast<float>(t % 2) * 0.75f;
  }
  const std::vector<uint64_t> live(4, ~uint64_t{0});
  simd::LogitStrip strip = strip_of(&logits, live, &sums);
  strip.skip_below = 24.0f;
  RowState state;
  float rescale = kNaN;
  kernels().softmax(strip, &state, &rescale);
  EXPECT_EQ(state.max, 10.0f);
  EXPECT_GT(sums[0], 0.0f);  // nothing larger came before it
  EXPECT_GT(sums[1], 32.0f);
  EXPECT_GT(sums[2], 0.0f);  // exactly at the distance
  EXPECT_GT(sums[3], 0.0f);  // rounded up: -14
  strip.skip_below = 23.0f;
  for (int t = 0; t < 4 * kPageTokens; ++t) logits[t] = tops[t / kPageTokens];
  state = {};
  kernels().softmax(strip, &state, &rescale);
  EXPECT_EQ(sums[2], 0.0f);
  EXPECT_EQ(sums[3], 0.0f);
  for (int t = 2 * kPageTokens; t < 4 * kPageTokens; ++t) EXPECT_EQ(logits[t], 0.0f);
}

TEST_P(RowKernelTest, FirstTileAndHiddenRows) {
  std::vector<float> logits(4 * kPageTokens, -3.0f);
  for (int t = 0; t < kPageTokens; ++t) logits[2 * kPageTokens + t] = -kInfinity;
  const std::vector<uint64_t> live = {~uint64_t{0}, 0, ~uint64_t{0}, ~uint64_t{0}};
  std::vector<RowState> state(4);
  state[1] = {.max = 7.0f, .sum = 2.0f, .tile_sum = 1.0f};
  std::vector<float> rescale(4, 9.0f), sums(4, 9.0f);
  const simd::LogitStrip strip = {.logits = logits.data(),
                                  .page_stride = 4 * kPageTokens,
                                  .live = live.data(),
                                  .live_stride = 4,
                                  .pages = 1,
                                  .rows = 4,
                                  .sums = sums.data(),
                                  .sum_stride = 4};
  kernels().softmax(strip, state.data(), rescale.data());
  EXPECT_EQ(rescale[0], 0.0f);  // from -inf: what was there has no weight
  EXPECT_EQ(state[0].max, -3.0f);
  EXPECT_EQ(state[0].sum, 64.0f);
  EXPECT_EQ(rescale[1], 1.0f);  // sees nothing: untouched
  EXPECT_EQ(state[1].max, 7.0f);
  EXPECT_EQ(state[1].sum, 2.0f);
  EXPECT_EQ(sums[1], 0.0f);
  EXPECT_EQ(state[2].max, -kInfinity);  // all biased to -inf
  EXPECT_EQ(state[2].sum, 0.0f);
  EXPECT_EQ(rescale[2], 1.0f);
  for (int t = 0; t < kPageTokens; ++t) EXPECT_EQ(logits[2 * kPageTokens + t], 0.0f);
  EXPECT_EQ(state[3].sum, 64.0f);
}

TEST_P(RowKernelTest, RescaleTouchesOnlyRowsThatNeedIt) {
  for (int dim : {40, 64, 72}) {
    std::vector<float> acc(static_cast<size_t>(3) * dim, 2.0f);
    const std::vector<float> factors = {0.5f, 1.0f, 0.0f};
    kernels().rescale(acc.data(), dim, 3, factors.data());
    for (int c = 0; c < dim; ++c) {
      EXPECT_EQ(acc[c], 1.0f);
      EXPECT_EQ(acc[dim + c], 2.0f);
      EXPECT_EQ(acc[2 * dim + c], 0.0f);
    }
  }
}

TEST_P(RowKernelTest, CombineAddsMultiplesAndTouchesNothingElse) {
  for (int dim : {8, 40, 64, 72}) {
    std::vector<float> acc(static_cast<size_t>(dim) + 1, 3.0f), from(acc.size());
    for (int c = 0; c < dim; ++c) from[c] = static_cast<float>(c);
    kernels().combine(acc.data(), from.data(), dim, 0.5f, 0.25f);
    for (int c = 0; c < dim; ++c) EXPECT_EQ(acc[c], 1.5f + 0.25f * static_cast<float>(c));
    EXPECT_EQ(acc[dim], 3.0f);
    kernels().combine(acc.data(), from.data(), dim, 0.0f, 1.0f);
    for (int c = 0; c < dim; ++c) EXPECT_EQ(acc[c], from[c]);
  }
}

}  // namespace
}  // namespace kvant

// Metrics against values computed by hand or in double precision.
#include "kvant/eval_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvant::eval {
namespace {

double reference_kl(const std::vector<float>& base, const std::vector<float>& candidate) {
  auto log_softmax = [](const std::vector<float>& x) {
    long double sum = 0;
    for (float v : x) sum += std::exp(static_cast<long double>(v));
    std::vector<long double> out;
    for (float v : x) out.push_back(v - std::log(sum));
    return out;
  };
  const auto p = log_softmax(base), q = log_softmax(candidate);
  long double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) kl += std::exp(p[i]) * (p[i] - q[i]);
  return static_cast<double>(kl);
}

TokenScore compare(const std::vector<float>& base, const std::vector<float>& candidate, int target) {
  Distribution d;
  d.reset(base.data(), static_cast<int>(base.size()));
  return d.compare(candidate.data(), target);
}

TEST(Distribution, TwoTokensByHand) {
  // p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2).
  const TokenScore s = compare({std::log(3.0f), 0.0f}, {0.0f, 0.0f}, 0);
  EXPECT_NEAR(s.kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-6);
  EXPECT_NEAR(s.base_nll, -std::log(0.75), 1e-6);
  EXPECT_NEAR(s.delta_nll, std::log(0.75) - std::log(0.5), 1e-6);
  EXPECT_TRUE(s.same_top);  // a tie goes to the first, which is the baseline's
  EXPECT_FALSE(compare({std::log(3.0f), 0.0f}, {0.0f, 0.5f}, 0).same_top);
}

TEST(Distribution, EqualLogitsAndEqualUpToAConstantAreZero) {
  const std::vector<float> base = {1.0f, -2.0f, 3.5f, 0.25f};
  EXPECT_EQ(compare(base, base, 2).kl, 0.0);
  std::vector<float> shifted = base;
  for (float& x : shifted) x += 4.0f;
  EXPECT_LT(compare(base, shifted, 2).kl, 1e-12);
  EXPECT_NEAR(compare(base, shifted, 2).delta_nll, 0.0, 1e-6);
}

TEST(Distribution, FollowsDoublePrecisionFromTinyToHugeDifferences) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const float noise : {1e-4f, 1e-3f, 0.05f, 0.3f, 1.0f, 5.0f, 40.0f}) {
    for (const int n : {7, 16, 1024, 5000}) {
      std::vector<float> base(n), candidate(n);
      for (int i = 0; i < n; ++i) {
        base[i] = 4.0f * normal(random);
        candidate[i] = base[i] + noise * normal(random);
      }
      const double want = reference_kl(base, candidate);
      const TokenScore s = compare(base, candidate, n / 2);
      EXPECT_NEAR(s.kl, want, 2e-3 * want + 1e-11) << "noise " << noise << " n " << n;
      EXPECT_GE(s.kl, 0.0);
    }
  }
}

TEST(Distribution, LogitsThatAreNotFiniteAreAnInfiniteKl) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isinf(compare({1, 2, 3}, {1, nan, 3}, 0).kl));
  EXPECT_TRUE(std::isinf(compare({1, 2, 3}, {1, std::numeric_limits<float>::infinity(), 3}, 0).kl));
}

TEST(Quantile, InterpolatesBetweenOrderStatistics) {
  const std::vector<double> x = {0, 10, 20, 30};
  EXPECT_DOUBLE_EQ(quantile(x, 0), 0);
  EXPECT_DOUBLE_EQ(quantile(x, 1), 30);
  EXPECT_DOUBLE_EQ(quantile(x, 0.5), 15);
  EXPECT_DOUBLE_EQ(quantile(std::vector<double>{7}, 0.99), 7);
}

TEST(Summary, ByHand) {
  std::vector<TokenScore> scores(4);
  const double kl[] = {0.0, 0.1, 0.2, 1.5};
  for (int i = 0; i < 4; ++i) {
    scores[i] = {.kl = kl[i], .delta_nll = 0.1 * i, .base_nll = 2.0, .same_top = i != 3, .position = 200 * i};
  }
  const Summary s = summarize(scores);
  EXPECT_EQ(s.n, 4);
  EXPECT_NEAR(s.kl_mean, 0.45, 1e-12);
  EXPECT_NEAR(s.kl_median, 0.15, 1e-12);
  EXPECT_DOUBLE_EQ(s.kl_max, 1.5);
  EXPECT_DOUBLE_EQ(s.top1, 0.75);
  EXPECT_NEAR(s.delta_nll, 0.15, 1e-12);
  EXPECT_NEAR(s.ppl_ratio, std::exp(0.15), 1e-12);
  EXPECT_DOUBLE_EQ(s.base_nll, 2.0);
  EXPECT_DOUBLE_EQ(s.share_above_one_nat, 0.25);
  ASSERT_EQ(s.buckets.size(), 3U);  // positions 0 and 200; 400; 600
  EXPECT_EQ(s.buckets[0].n, 2);
  EXPECT_NEAR(s.buckets[0].kl_mean, 0.05, 1e-12);
  EXPECT_EQ(s.buckets[1].first, 256);
  EXPECT_EQ(s.buckets[2].last, 767);
}

TEST(Bootstrap, SameSeedSameIntervalAndItCoversTheMean) {
  std::mt19937 random(3);
  std::exponential_distribution<double> kl(100.0);
  std::vector<TokenScore> scores;
  for (int window = 0; window < 4; ++window) {
    for (int position = 512; position < 2048; ++position) {
      scores.push_back({.kl = kl(random), .window = window, .position = position});
    }
  }
  const Interval a = bootstrap_mean(scores, {.seed = 7}), b = bootstrap_mean(scores, {.seed = 7});
  EXPECT_EQ(a.lo, b.lo);
  EXPECT_EQ(a.hi, b.hi);
  const Interval other = bootstrap_mean(scores, {.seed = 8});
  EXPECT_NE(a.lo, other.lo);
  const double mean = summarize(scores).kl_mean;
  EXPECT_LT(a.lo, mean);
  EXPECT_GT(a.hi, mean);
  // 24 blocks of 256 independent values with standard deviation .01: the interval is about +-.00025 wide.
  EXPECT_NEAR(a.hi - a.lo, 2 * 1.96 * 0.01 / std::sqrt(scores.size()), 2e-4);
}

TEST(Bootstrap, BlocksAreDrawnWhole) {
  // One block: every resample is that block, so the interval is a point, however much its tokens differ.
  std::vector<TokenScore> scores;
  for (int i = 0; i < 256; ++i) scores.push_back({.kl = static_cast<double>(i % 2), .position = i});
  const Interval one = bootstrap_mean(scores, {});
  EXPECT_DOUBLE_EQ(one.lo, 0.5);
  EXPECT_DOUBLE_EQ(one.hi, 0.5);
}

}  // namespace
}  // namespace kvant::eval

// C01: outlier channels. Four channels of otherwise normal keys are shifted by c; a softmax over them must
// survive.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "kvant/transform.h"

namespace kvant {
namespace {

constexpr int kDim = 128;
constexpr int kQueries = 32;

std::vector<float> keys_with_outliers(float c) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  std::vector<float> k(static_cast<size_t>(kPageTokens) * kDim);
  for (float& x : k) x = normal(rng);
  for (int t = 0; t < kPageTokens; ++t) {
    for (const int channel : {5, 37, 70, 101}) k[static_cast<size_t>(t) * kDim + channel] += c;
  }
  return k;
}

std::vector<float> stored(const std::string& name, const Transform& transform, const std::vector<float>& k) {
  const Result<Format> format = Format::parse(name, Side::kKey, kDim);
  EXPECT_TRUE(format.ok()) << format.status().message();
  std::vector<float> y(k.size());
  transform.apply(k.data(), y.data(), kPageTokens);
  std::vector<std::byte> memory(format.value().tile_bytes() + kTileAlign);
  void* at = memory.data();
  size_t space = memory.size();
  auto* tile = static_cast<std::byte*>(std::align(kTileAlign, format.value().tile_bytes(), at, space));
  format.value().encode({.x = y.data()}, tile);
  format.value().decode(tile, y.data());
  std::vector<float> out(k.size());
  transform.invert(y.data(), out.data(), kPageTokens);
  return out;
}

std::vector<double> log_weights(const float* q, const std::vector<float>& k) {
  std::vector<double> logits(kPageTokens);
  double top = -HUGE_VAL;
  for (int t = 0; t < kPageTokens; ++t) {
    for (int c = 0; c < kDim; ++c)
      logits[t] += static_cast<double>(q[c]) * k[static_cast<size_t>(t) * kDim + c];
    logits[t] /= std::sqrt(static_cast<double>(kDim));
    top = std::max(top, logits[t]);
  }
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - top);
  for (double& x : logits) x -= top + std::log(sum);
  return logits;
}

// Mean over queries of KL(softmax over the keys || softmax over the stored keys).
double mean_kl(const std::vector<float>& k, const std::vector<float>& decoded) {
  std::mt19937 rng(12);
  std::normal_distribution<float> normal;
  double sum = 0;
  for (int i = 0; i < kQueries; ++i) {
    std::vector<float> q(kDim);
    for (float& x : q) x = normal(rng);
    const std::vector<double> p = log_weights(q.data(), k);
    const std::vector<double> r = log_weights(q.data(), decoded);
    for (int t = 0; t < kPageTokens; ++t) sum += std::exp(p[t]) * (p[t] - r[t]);
  }
  return sum / kQueries;
}

// The keys of kv4 without a calibration hold for every c, where a scale per token does not.
TEST(CaseC01, AnOfferedSchemeSurvivesOutlierChannels) {
  const Transform identity = Transform::identity(kDim);
  for (const float c : {0.0f, 20.0f, 60.0f, 600.0f}) {
    const std::vector<float> k = keys_with_outliers(c);
    EXPECT_LT(mean_kl(k, stored("c4a", identity, k)), 0.01) << "c = " << c;
    EXPECT_LT(mean_kl(k, stored("c8a", identity, k)), 1e-4) << "c = " << c;
  }
}

TEST(CaseC01, ScalesPerTokenDoNot) {
  const std::vector<float> k = keys_with_outliers(60.0f);
  const Result<Transform> hadamard = Transform::hadamard(kDim);
  ASSERT_TRUE(hadamard.ok());
  EXPECT_GT(mean_kl(k, stored("t4:s16", Transform::identity(kDim), k)), 0.1);
  EXPECT_GT(mean_kl(k, stored("t4", hadamard.value(), k)), 0.05);
}

}  // namespace
}  // namespace kvant

// Distribution: sums over the vocabulary in 16 lanes, flushed to doubles every kBlock elements.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kvant/eval_metrics.h"

namespace kvant::eval {
namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 1024;  // a lane adds at most 64 floats before it is flushed: relative error below 4e-6

// exp(x) for x in [-87, 87] within 2 ulp: 2^n * exp(r), |r| <= ln(2)/2, ln(2) in two parts (Cody and Waite
// 1980).
inline float fast_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float y = 1.98412698e-4f;
  y = y * r + 1.38888889e-3f;
  y = y * r + 8.33333333e-3f;
  y = y * r + 4.16666667e-2f;
  y = y * r + 1.66666667e-1f;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - 0x4B400000U) + 127) << 23;
  return y * std::bit_cast<float>(exponent);
}

inline float clamp_exponent(float x) {
  x = x < -87.0f ? -87.0f : x;
  return x > 80.0f ? 80.0f : x;
}

// exp(-e) - 1 + e, never negative.
inline float excess(float e) {
  const float s = e * e;
  const float series =
      s * (0.5f + e * (-1.66666667e-1f + e * (4.16666667e-2f + e * (-8.33333333e-3f + e * 1.38888889e-3f))));
  const float direct = fast_exp(clamp_exponent(-e)) - 1.0f + e;
  return s < 0.0625f ? series : direct;
}

struct Lanes {
  float lane[kLanes] = {};
  double flush() {
    double sum = 0;
    for (float& x : lane) {
      sum += x;
      x = 0;
    }
    return sum;
  }
};

// sum over i of term(i), n of any size.
template <typename Term>
double lane_sum(int n, Term term) {
  double sum = 0;
  Lanes lanes;
  int i = 0;
  while (i + kLanes <= n) {
    const int end = std::min(n - n % kLanes, i + kBlock);
    for (; i < end; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes.lane[j] += term(i + j);
    }
    sum += lanes.flush();
  }
  for (; i < n; ++i) sum += term(i);
  return sum;
}

float largest(const float* x, int n) {
  float lane[kLanes];
  std::fill(lane, lane + kLanes, -std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  }
  float best = *std::max_element(lane, lane + kLanes);
  for (; i < n; ++i) best = std::max(best, x[i]);
  return best;
}

// First of the largest.
int top_of(const float* x, int n) { return static_cast<int>(std::find(x, x + n, largest(x, n)) - x); }

double log_sum_exp(const float* x, int n) {
  const double top = largest(x, n);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return top + std::log(sum);
}

// For candidates far off the baseline, where terms leave the range of floats.
double kl_in_doubles(const float* base, const float* candidate, int n) {
  const double base_sum = log_sum_exp(base, n), candidate_sum = log_sum_exp(candidate, n);
  double kl = 0;
  for (int i = 0; i < n; ++i) {
    const double log_p = base[i] - base_sum;
    kl += std::exp(log_p) * (log_p - (candidate[i] - candidate_sum));
  }
  return std::max(kl, 0.0);
}

}  // namespace

void Distribution::reset(const float* logits, int n_vocab) {
  logits_ = logits;
  n_vocab_ = n_vocab;
  p_.resize(n_vocab);
  top_ = top_of(logits, n_vocab);
  const float top = logits[top_ < n_vocab ? top_ : 0];
  float* p = p_.data();
  for (int i = 0; i < n_vocab; ++i) p[i] = fast_exp(clamp_exponent(logits[i] - top));
  const double sum = lane_sum(n_vocab, [p](int i) { return p[i]; });
  const float inverse = static_cast<float>(1.0 / sum);
  for (int i = 0; i < n_vocab; ++i) p[i] *= inverse;
  log_sum_ = top + std::log(sum);
}

TokenScore Distribution::compare(const float* candidate, int target) const {
  const float* p = p_.data();
  const float* base = logits_;
  TokenScore score;
  score.base_nll = log_sum_ - base[target];
  const float mean = static_cast<float>(
      lane_sum(n_vocab_, [p, base, candidate](int i) { return p[i] * (base[i] - candidate[i]); }));
  const double total = lane_sum(n_vocab_, [candidate](int i) { return candidate[i]; });
  if (!std::isfinite(mean) || !std::isfinite(total)) {
    score.kl = score.delta_nll = std::numeric_limits<double>::infinity();
    score.same_top = false;
    return score;
  }
  score.same_top = top_of(candidate, n_vocab_) == top_;
  // Largest |e|: beyond 30 a probability of e^-30 times exp(|e|) matters and may have left the float's range.
  float lane[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n_vocab_; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float e = std::fabs(base[i + j] - candidate[i + j] - mean);
      lane[j] = e > lane[j] ? e : lane[j];
    }
  }
  float furthest = *std::max_element(lane, lane + kLanes);
  for (; i < n_vocab_; ++i) furthest = std::max(furthest, std::fabs(base[i] - candidate[i] - mean));
  if (furthest > 30.0f) {
    score.kl = kl_in_doubles(base, candidate, n_vocab_);
    score.delta_nll = log_sum_exp(candidate, n_vocab_) - candidate[target] - score.base_nll;
    return score;
  }
  score.kl = std::log1p(lane_sum(
      n_vocab_, [p, base, candidate, mean](int k) { return p[k] * excess(base[k] - candidate[k] - mean); }));
  // ln p_base(t) - ln p_candidate(t) = d(t) + ln(Z_candidate / Z_base) = (d(t) - mean) + KL
  score.delta_nll = static_cast<double>(base[target]) - candidate[target] - mean + score.kl;
  return score;
}

}  // namespace kvant::eval

// Metrics of a comparison: per-token scores of a candidate against a baseline, and their summaries.
//
// All figures are paired: for every scored position both see the same tokens, and
//   KL = sum over the vocabulary of p_base * ln(p_base / p_candidate), in nats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvant::eval {

// One scored position of one candidate.
struct TokenScore {
  double kl = 0;         // nats, >= 0
  double delta_nll = 0;  // NLL of the token that follows: candidate - baseline, nats
  double base_nll = 0;   // the baseline's NLL of that token
  bool same_top = true;  // both rank the same token first
  int32_t window = 0;    // text window (or pass) that the position belongs to
  int32_t position = 0;  // in its window
};

// The baseline's distribution at one position; compared with any number of candidates. Not thread safe.
class Distribution {
 public:
  // logits: [n_vocab], finite; kept by pointer until the next reset.
  void reset(const float* logits, int n_vocab);
  // Fills kl, delta_nll, base_nll and same_top. `target`: the token that follows. KL is computed as
  // log1p(sum p * (exp(-e) - 1 + e)) with e = logit difference minus its mean under p: every term is >= 0, so
  // that differences far below float's rounding of the logits themselves are still measured.
  // A candidate whose logits are not finite gets an infinite KL.
  TokenScore compare(const float* candidate, int target) const;

 private:
  const float* logits_ = nullptr;
  int n_vocab_ = 0;
  int top_ = 0;
  double log_sum_ = 0;    // ln of the sum of exp(logit)
  std::vector<float> p_;  // probabilities
};

struct BootstrapOptions {
  int resamples = 1000;
  uint64_t seed = 1;
  int block_tokens = 256;  // blocks are window x position / block_tokens
};

struct Interval {
  double lo = 0, hi = 0;
};

struct Bucket {
  int first = 0, last = 0;  // positions, inclusive
  double kl_mean = 0;
  int n = 0;
};

struct Summary {
  int n = 0;
  double kl_mean = 0, kl_lo = 0, kl_hi = 0;  // 95 % block bootstrap
  double kl_median = 0, kl_p99 = 0, kl_p999 = 0, kl_max = 0;
  double top1 = 1;                 // share of positions with the same first token
  double delta_nll = 0;            // mean
  double ppl_ratio = 1;            // exp(delta_nll)
  double base_nll = 0;             // mean
  double share_above_one_nat = 0;  // share of positions with KL > 1
  std::vector<Bucket> buckets;     // by position, block_tokens each
};

// Quantile q in [0, 1] with linear interpolation between order statistics; `sorted` ascending, not empty.
double quantile(std::span<const double> sorted, double q);

// 95 % interval of the mean of KL: blocks are drawn with replacement, as many as there are, and the mean is
// over the tokens of the drawn blocks. The same seed gives the same interval everywhere.
Interval bootstrap_mean(std::span<const TokenScore> scores, const BootstrapOptions& options);

Summary summarize(std::span<const TokenScore> scores, const BootstrapOptions& options = {});

}  // namespace kvant::eval

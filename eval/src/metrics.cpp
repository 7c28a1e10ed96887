#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "kvant/eval_metrics.h"

namespace kvant::eval {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  size_t below(size_t n) { return static_cast<size_t>((static_cast<unsigned __int128>(next()) * n) >> 64); }

 private:
  uint64_t state_;
};

struct Block {
  double sum = 0;
  int n = 0;
};

std::vector<Block> make_blocks(std::span<const TokenScore> scores, int block_tokens) {
  std::map<std::pair<int, int>, Block> blocks;
  for (const TokenScore& s : scores) {
    Block& block = blocks[{s.window, s.position / block_tokens}];
    block.sum += s.kl;
    ++block.n;
  }
  std::vector<Block> out;
  out.reserve(blocks.size());
  for (const auto& [key, block] : blocks) out.push_back(block);
  return out;
}

std::vector<Bucket> make_buckets(std::span<const TokenScore> scores, int block_tokens) {
  std::map<int, Block> by_position;
  for (const TokenScore& s : scores) {
    Block& block = by_position[s.position / block_tokens];
    block.sum += s.kl;
    ++block.n;
  }
  std::vector<Bucket> out;
  out.reserve(by_position.size());
  for (const auto& [index, block] : by_position) {
    out.push_back({.first = index * block_tokens,
                   .last = (index + 1) * block_tokens - 1,
                   .kl_mean = block.sum / block.n,
                   .n = block.n});
  }
  return out;
}

}  // namespace

double quantile(std::span<const double> sorted, double q) {
  const double rank = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = rank - static_cast<double>(below);
  if (share == 0) return sorted[below];
  return sorted[below] * (1 - share) + sorted[above] * share;
}

Interval bootstrap_mean(std::span<const TokenScore> scores, const BootstrapOptions& options) {
  const std::vector<Block> blocks = make_blocks(scores, options.block_tokens);
  if (blocks.empty()) return {};
  Random random(options.seed);
  std::vector<double> means;
  for (int r = 0; r < options.resamples; ++r) {
    Block drawn;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Block& block = blocks[random.below(blocks.size())];
      drawn.sum += block.sum;
      drawn.n += block.n;
    }
    means.push_back(drawn.sum / drawn.n);
  }
  std::sort(means.begin(), means.end());
  return {.lo = quantile(means, 0.025), .hi = quantile(means, 0.975)};
}

Summary summarize(std::span<const TokenScore> scores, const BootstrapOptions& options) {
  Summary s;
  s.n = static_cast<int>(scores.size());
  if (scores.empty()) return s;
  std::vector<double> kl;
  int same = 0, above = 0;
  for (const TokenScore& score : scores) {
    kl.push_back(score.kl);
    s.kl_mean += score.kl;
    s.delta_nll += score.delta_nll;
    s.base_nll += score.base_nll;
    same += score.same_top ? 1 : 0;
    above += score.kl > 1.0 ? 1 : 0;
  }
  s.kl_mean /= s.n;
  s.delta_nll /= s.n;
  s.base_nll /= s.n;
  s.top1 = static_cast<double>(same) / s.n;
  s.share_above_one_nat = static_cast<double>(above) / s.n;
  s.ppl_ratio = std::exp(s.delta_nll);
  std::sort(kl.begin(), kl.end());
  s.kl_median = quantile(kl, 0.5);
  s.kl_p99 = quantile(kl, 0.99);
  s.kl_p999 = quantile(kl, 0.999);
  s.kl_max = kl.back();
  const Interval interval = bootstrap_mean(scores, options);
  s.kl_lo = interval.lo;
  s.kl_hi = interval.hi;
  s.buckets = make_buckets(scores, options.block_tokens);
  return s;
}

}  // namespace kvant::eval

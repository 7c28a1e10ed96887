// Caches that hold many tokens at little cost, for timing.
#pragma once

#include <span>
#include <vector>

#include "kvant/llama_session.h"

namespace kvant::eval {

inline constexpr int kSeedTokens = 512;

// A sequence state of llama.cpp (one stream, one cache, no position extensions) with its cells repeated until
// there are `tokens` of them, at positions 0 .. tokens - 1. kCorrupt: not such a state.
Result<std::vector<uint8_t>> repeat_state(const std::vector<uint8_t>& state, int tokens);

// An empty context that is filled and then timed, with `tokens` over and over. Both must outlive it.
class FilledCache {
 public:
  FilledCache(Context* context, std::span<const llama_token> tokens) : context_(context), tokens_(tokens) {}

  // The first kSeedTokens tokens are prefilled and their cache rows repeated until there are `depth`, through
  // llama.cpp's own sequence state, since speed does not depend on what the rows say. Models whose state
  // cannot be repeated (layers with a sliding window have a cache of their own) prefill all. Then one token
  // is decoded: the first step over a filled cache encodes all of it.
  Status fill(int depth);
  // One token, its logits included.
  Status step(double* seconds);
  // n tokens in one batch.
  Status prefill(int n, double* seconds);

 private:
  Status fill_rows(int depth);
  // Positions position_ .. end - 1 in batches of the context's size.
  Status append(int end);
  std::vector<llama_token> next_tokens(int n) const;

  Context* context_;
  std::span<const llama_token> tokens_;
  int position_ = 0;
};

}  // namespace kvant::eval

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

// Fills an empty context with `depth` tokens: the first kSeedTokens of `tokens` (cyclic) are prefilled and
// their cache rows repeated through llama.cpp's own sequence state, since speed does not depend on what the
// rows say. Models whose state cannot be repeated (layers with a sliding window have a cache of their own)
// prefill all.
Status fill_cache(Context* context, std::span<const llama_token> tokens, int depth);

}  // namespace kvant::eval

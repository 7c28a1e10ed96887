// Speed of a cache with the model's own weights.
#pragma once

#include "kvant/evaluate.h"
#include "kvant/llama_session.h"
#include "lockstep.h"

namespace kvant::eval {

// Fills the cache with EvaluateOptions::speed_tokens tokens (filled_cache.h), decodes decode_tokens one by
// one, of which the median counts, and then prefills 256 in one step. llama.cpp's own caches are run with
// flash attention on and, where their types allow it, off; the faster counts, separately for both figures.
Status measure_speed(const Model& model, const Candidate& candidate, const EvaluateOptions& options,
                     std::span<const llama_token> tokens, Progress* progress, Speed* out);
// Slots that it needs.
int speed_context_tokens(const EvaluateOptions& options);
// Units of progress that it takes.
double speed_units(const Candidate& candidate, const EvaluateOptions& options);

}  // namespace kvant::eval

// Speed of a cache with the model's own weights.
#pragma once

#include "kvant/evaluate.h"
#include "kvant/llama_session.h"
#include "lockstep.h"

namespace kvant::eval {

// Prefills `tokens` in steps of 512 and decodes EvaluateOptions::decode_tokens more, one by one. llama.cpp's
// own caches are run with flash attention on and, where their types allow it, off; the faster counts,
// separately for both figures. Decoding is the median over tokens.
Status measure_speed(const Model& model, const Candidate& candidate, const EvaluateOptions& options,
                     std::span<const llama_token> tokens, Progress* progress, Speed* out);
// Units of progress that it takes.
double speed_units(const Candidate& candidate, const EvaluateOptions& options);

}  // namespace kvant::eval

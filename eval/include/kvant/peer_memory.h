// Bytes of llama.cpp's own caches: whole rows of its types, allocated when the context is made.
#pragma once

#include "kvant/candidate.h"
#include "kvant/model_shape.h"

namespace kvant::eval {

// Of one sequence; slots are padded as llama.cpp does. n_batch: of a step, which window layers hold, too.
size_t peer_cache_bytes(const ModelShape& shape, const Candidate& candidate, int n_ctx, int n_batch);

// As plan_model(): quantized sides count as packed, others as exact rows. kUnsupported where a block of the
// type does not divide a head, which llama.cpp refuses.
Result<Plan> plan_peer(const ModelShape& shape, const Candidate& candidate, const PlanOptions& options);

}  // namespace kvant::eval

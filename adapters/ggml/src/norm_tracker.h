// Which model a cache belongs to: its attention norms, noticed while the scheduler asks about the operations
// of a graph (the graph that runs first may be a piece of a model, so it cannot tell).
#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

namespace kvant::ggml {

// Per thread: a new cache starts anew; the graphs that are then reserved are of its model.
void forget_norms();
void notice_norm(const ggml_tensor* operation);
const std::vector<const ggml_tensor*>& noticed_norms();

// As graph_fingerprint() of the whole graph; 0 for no norms. The weights must still be there.
uint64_t norms_fingerprint(const std::vector<const ggml_tensor*>& norms);

}  // namespace kvant::ggml

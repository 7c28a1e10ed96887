// Which attention path live caches take, whatever they were created with. For comparing paths over the same
// tiles.
#pragma once

#include <optional>

#include "kvant/attention.h"

namespace kvant::ggml {

// Process-wide; takes effect with the next graph. nullopt: each cache's own. While it is set, exact rows that
// a batch would let go stay until the next one, so that the batch can be taken back and computed again over
// the same rows.
void override_attention(std::optional<AttentionPath> path);
std::optional<AttentionPath> attention_override();

}  // namespace kvant::ggml

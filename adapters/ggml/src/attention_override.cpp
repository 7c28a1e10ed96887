#include "kvant/attention_override.h"

#include <atomic>

namespace kvant::ggml {
namespace {

constexpr int kNone = -1;
std::atomic<int> override_path{kNone};

}  // namespace

void override_attention(std::optional<AttentionPath> path) {
  override_path.store(path ? static_cast<int>(*path) : kNone, std::memory_order_relaxed);
}

std::optional<AttentionPath> attention_override() {
  const int path = override_path.load(std::memory_order_relaxed);
  if (path == kNone) return std::nullopt;
  return static_cast<AttentionPath>(path);
}

}  // namespace kvant::ggml

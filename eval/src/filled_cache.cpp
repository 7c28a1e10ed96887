#include "filled_cache.h"

#include <algorithm>

#include "timing.h"

namespace kvant::eval {

std::vector<llama_token> FilledCache::next_tokens(int n) const {
  std::vector<llama_token> next(n);
  for (int i = 0; i < n; ++i) next[i] = tokens_[static_cast<size_t>(position_ + i) % tokens_.size()];
  return next;
}

Status FilledCache::append(int end) {
  while (position_ < end) {
    const std::vector<llama_token> batch =
        next_tokens(std::min(context_->options().n_batch, end - position_));
    KVANT_RETURN_IF_ERROR(context_->decode(batch, position_, static_cast<int>(batch.size())));
    position_ += static_cast<int>(batch.size());
  }
  llama_synchronize(context_->get());
  return {};
}

Status FilledCache::fill_rows(int depth) {
  KVANT_RETURN_IF_ERROR(append(std::min(kSeedTokens, depth)));
  if (position_ == depth) return {};
  std::vector<uint8_t> state(llama_state_seq_get_size(context_->get(), 0));
  if (llama_state_seq_get_data(context_->get(), state.data(), state.size(), 0) != state.size())
    return {Code::kInternal, "llama.cpp gave no sequence state"};
  const Result<std::vector<uint8_t>> filled = repeat_state(state, depth);
  if (!filled.ok()) return append(depth);
  context_->clear();
  if (llama_state_seq_set_data(context_->get(), filled.value().data(), filled.value().size(), 0) == 0)
    return {Code::kInternal, "llama.cpp refused the repeated sequence state"};
  position_ = depth;
  return {};
}

Status FilledCache::fill(int depth) {
  KVANT_RETURN_IF_ERROR(fill_rows(depth));
  double seconds = 0;
  return step(&seconds);
}

Status FilledCache::step(double* seconds) {
  const std::vector<llama_token> token = next_tokens(1);
  const double start = now_seconds();
  KVANT_RETURN_IF_ERROR(context_->decode(token, position_, 0));
  if (context_->logits(0) == nullptr) return {Code::kInternal, "llama.cpp gave no logits"};
  *seconds = now_seconds() - start;
  ++position_;
  return {};
}

Status FilledCache::prefill(int n, double* seconds) {
  const std::vector<llama_token> batch = next_tokens(n);
  const double start = now_seconds();
  KVANT_RETURN_IF_ERROR(context_->decode(batch, position_, n - 1));
  llama_synchronize(context_->get());
  *seconds = now_seconds() - start;
  position_ += n;
  return {};
}

}  // namespace kvant::eval

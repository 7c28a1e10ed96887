#include "filled_cache.h"

#include <algorithm>

namespace kvant::eval {
namespace {

Status prefill(Context* context, std::span<const llama_token> tokens, int begin, int end) {
  std::vector<llama_token> batch;
  for (int at = begin; at < end; at += static_cast<int>(batch.size())) {
    batch.resize(std::min(context->options().n_batch, end - at));
    for (size_t i = 0; i < batch.size(); ++i) batch[i] = tokens[(at + i) % tokens.size()];
    KVANT_RETURN_IF_ERROR(context->decode(batch, at, static_cast<int>(batch.size())));
  }
  llama_synchronize(context->get());
  return {};
}

}  // namespace

Status fill_cache(Context* context, std::span<const llama_token> tokens, int depth) {
  const int seed = std::min(kSeedTokens, depth);
  KVANT_RETURN_IF_ERROR(prefill(context, tokens, 0, seed));
  if (depth == seed) return {};
  std::vector<uint8_t> state(llama_state_seq_get_size(context->get(), 0));
  if (llama_state_seq_get_data(context->get(), state.data(), state.size(), 0) != state.size())
    return {Code::kInternal, "llama.cpp gave no sequence state"};
  const Result<std::vector<uint8_t>> filled = repeat_state(state, depth);
  if (!filled.ok()) return prefill(context, tokens, seed, depth);
  context->clear();
  if (llama_state_seq_set_data(context->get(), filled.value().data(), filled.value().size(), 0) == 0)
    return {Code::kInternal, "llama.cpp refused the repeated sequence state"};
  return {};
}

}  // namespace kvant::eval

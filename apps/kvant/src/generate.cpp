#include "generate.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cli.h"

namespace kvant::cli {

Session::Session(const eval::Model& model, std::unique_ptr<eval::Context> context,
                 const GenerateOptions& options)
    : model_(model), context_(std::move(context)), options_(options) {
  sampler_ = llama_sampler_chain_init(llama_sampler_chain_default_params());
  if (options.temperature <= 0) {
    llama_sampler_chain_add(sampler_, llama_sampler_init_greedy());
    return;
  }
  if (options.top_k > 0) llama_sampler_chain_add(sampler_, llama_sampler_init_top_k(options.top_k));
  llama_sampler_chain_add(sampler_, llama_sampler_init_top_p(options.top_p, 1));
  llama_sampler_chain_add(sampler_, llama_sampler_init_temp(options.temperature));
  llama_sampler_chain_add(sampler_, llama_sampler_init_dist(options.seed));
}

Session::~Session() { llama_sampler_free(sampler_); }

Status Session::prefill(const std::vector<llama_token>& tokens) {
  const int n = static_cast<int>(tokens.size()), step = context_->options().n_batch;
  if (position_ + n >= context_->options().n_ctx) {
    return {Code::kPoolExhausted, "the prompt does not fit: " + std::to_string(position_ + n) +
                                      " tokens, --ctx-size " + std::to_string(context_->options().n_ctx)};
  }
  const double start = now_seconds();
  for (int begin = 0; begin < n; begin += step) {
    if (interrupted()) return {Code::kCancelled, "interrupted"};
    const int count = std::min(step, n - begin);
    const int logits_from = begin + count == n ? count - 1 : count;
    KVANT_RETURN_IF_ERROR(context_->decode(std::span(tokens).subspan(begin, count), position_, logits_from));
    position_ += count;
    timing_.prompt_tokens += count;
  }
  timing_.prompt_seconds += now_seconds() - start;
  return {};
}

Status Session::turn(const std::string& text, bool special,
                     const std::function<void(const std::string&)>& emit) {
  std::vector<llama_token> tokens =
      model_.tokenize(text, /*add_special=*/position_ == 0, /*parse_special=*/special);
  if (pending_ != LLAMA_TOKEN_NULL) tokens.insert(tokens.begin(), pending_);
  pending_ = LLAMA_TOKEN_NULL;
  if (tokens.empty()) return {Code::kInvalidArgument, "the prompt has no tokens"};
  KVANT_RETURN_IF_ERROR(prefill(tokens));
  (void)ggml::take_profile();  // the prompt's
  const double start = now_seconds();
  int index = -1;
  Status status;
  for (int i = 0; i < options_.n_predict && !interrupted(); ++i) {
    const double sampling = now_seconds();
    llama_token token = llama_sampler_sample(sampler_, context_->get(), index);
    timing_.sampling_seconds += now_seconds() - sampling;
    const bool end = llama_vocab_is_eog(model_.vocab(), token);
    if (end && !options_.ignore_eos) {
      pending_ = token;
      break;
    }
    if (!end) emit(model_.piece(token));
    if (position_ + 1 >= context_->options().n_ctx) {
      std::fprintf(stderr, "\nkvant: the context of %d tokens is full; -c sets a larger one\n",
                   context_->options().n_ctx);
      break;
    }
    status = context_->decode(std::span(&token, 1), position_, 0);
    if (!status.ok()) break;
    ++position_;
    ++timing_.decoded_tokens;
    index = 0;
  }
  timing_.decode_seconds += now_seconds() - start;
  timing_.decode_profile += ggml::take_profile();
  return status;
}

CacheUse Session::cache_use() const {
  CacheUse use;
  use.tokens = position_;
  uint64_t pairs = 0, quantized = 0, skipped = 0;
  for (const ggml::CacheReport& c : context_->reports()) {
    use.memory.tile_bytes += c.memory.tile_bytes;
    use.memory.exact_row_bytes += c.memory.exact_row_bytes;
    use.memory.table_bytes += c.memory.table_bytes;
    use.memory.workspace_bytes += c.memory.workspace_bytes;
    use.engine_bytes += c.engine_bytes;
    use.peak_bytes += c.peak_bytes + c.engine_bytes;
    pairs += c.pairs_total;
    quantized += std::max(c.pairs_quantized, c.pairs_quantized_v);
    skipped += c.pairs_skipped;
    for (const LayerScheme& layer : c.layers) {
      use.f16_bytes += sizeof(uint16_t) * static_cast<size_t>(layer.shape.n_kv_heads) *
                       static_cast<size_t>(layer.shape.key_dim + layer.shape.value_dim) *
                       static_cast<size_t>(c.used_slots);
    }
  }
  if (pairs > 0) {
    use.quantized_share = static_cast<double>(quantized) / static_cast<double>(pairs);
    use.skipped_share = static_cast<double>(skipped) / static_cast<double>(pairs);
  }
  return use;
}

size_t peak_resident_bytes() {
  FILE* file = std::fopen("/proc/self/status", "r");
  if (file == nullptr) return 0;
  char line[256];
  size_t kib = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "VmHWM: %zu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return kib * 1024;
}

}  // namespace kvant::cli

// Generation with one context, over any number of turns.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kvant/llama_session.h"
#include "kvant/profile.h"
#include "kvant/slot_cache.h"

namespace kvant::cli {

struct GenerateOptions {
  int n_predict = 512;
  float temperature = 0.8f;
  int top_k = 40;
  float top_p = 0.95f;
  uint32_t seed = 1;
  bool ignore_eos = false;
};

struct Timing {
  int prompt_tokens = 0, decoded_tokens = 0;
  double prompt_seconds = 0, decode_seconds = 0;
  double sampling_seconds = 0;   // of decoding
  ggml::Profile decode_profile;  // of decoding, when profiling is on; `graphs` are its steps
};

struct CacheUse {
  int tokens = 0;
  MemoryReport memory;
  size_t engine_bytes = 0, peak_bytes = 0;
  size_t f16_bytes = 0;  // the same tokens in binary16 rows
  double quantized_share = 0;
  double skipped_share = 0;  // of all pairs: values not read, because their weights could not matter
  size_t total() const { return memory.total() + engine_bytes; }
};

class Session {
 public:
  Session(const eval::Model& model, std::unique_ptr<eval::Context> context, const GenerateOptions& options);
  ~Session();

  // Adds `text`, then generates until the model ends its text, n_predict tokens, the end of the context or
  // Ctrl-C. `special`: text holds special tokens (a chat template). Pieces are handed to `emit` as they come.
  Status turn(const std::string& text, bool special, const std::function<void(const std::string&)>& emit);

  const eval::Context& context() const { return *context_; }
  const Timing& timing() const { return timing_; }
  CacheUse cache_use() const;
  // The last turn ended with the model's own end mark.
  bool ended() const { return pending_ != LLAMA_TOKEN_NULL; }

 private:
  Status prefill(const std::vector<llama_token>& tokens);
  const eval::Model& model_;
  std::unique_ptr<eval::Context> context_;
  GenerateOptions options_;
  llama_sampler* sampler_ = nullptr;
  Timing timing_;
  int position_ = 0;
  llama_token pending_ = LLAMA_TOKEN_NULL;  // sampled, but not yet in the context: goes before the next turn
};

size_t peak_resident_bytes();

}  // namespace kvant::cli

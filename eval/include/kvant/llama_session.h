// llama.cpp as owned objects: backends, models, contexts. One process holds llama.cpp's own cache (device
// CPU) and kvant's (device KVANT) side by side, over the same mapped weights.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvant/ggml_backend.h"
#include "kvant/status.h"
#include "llama.h"

namespace kvant::eval {

// Loads ggml's CPU backend from llama.cpp's library folder and registers KVANT; later calls do nothing.
Status init_backends();

// llama.cpp's messages: nothing below errors is shown, unless verbose. The last error is kept either way and
// becomes a part of the Status of the call that failed.
void show_llama_messages(bool verbose);

enum class Device : uint8_t { kCpu, kKvant };

class Model {
 public:
  // Weights are mapped: a second model of the same file costs no memory for them, where the CPU backend does
  // not repack them.
  static Result<std::unique_ptr<Model>> load(const std::string& path, Device device);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  llama_model* get() const { return model_; }
  const llama_vocab* vocab() const { return llama_model_get_vocab(model_); }
  Device device() const { return device_; }
  int n_vocab() const { return llama_vocab_n_tokens(vocab()); }
  int train_context() const { return llama_model_n_ctx_train(model_); }
  std::string description() const;
  // `special`: adds what the model wants at the start (BOS) and reads special tokens in the text.
  std::vector<llama_token> tokenize(const std::string& text, bool add_special, bool parse_special) const;
  std::string piece(llama_token token) const;

 private:
  Model() = default;
  llama_model* model_ = nullptr;
  Device device_ = Device::kCpu;
};

struct ContextOptions {
  int n_ctx = 4096;
  int n_batch = 512;  // tokens in one decode call, and the most that may ask for logits
  int n_threads = 1;
  int n_outputs = 1;  // most logits of one call
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool flash_attention = true;
};

// One llama.cpp context with one sequence. On device KVANT the caches that belong to it are known: reports()
// gives theirs only. Create and destroy contexts of that device from one thread.
class Context {
 public:
  // On device KVANT `kvant` is configured first and the context is run once, so that its caches exist.
  static Result<std::unique_ptr<Context>> create(const Model& model, const ContextOptions& options,
                                                 const ggml::Options& kvant = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Positions first_position ...; logits are kept of tokens from index `logits_from` on (tokens.size():
  // none).
  Status decode(std::span<const llama_token> tokens, int first_position, int logits_from);
  // Of token `index` of the last decode; it must have asked for them.
  const float* logits(int index) const;
  // Forgets all tokens and gives their memory back.
  void clear();
  llama_context* get() const { return context_; }
  const ContextOptions& options() const { return options_; }
  std::vector<ggml::CacheReport> reports() const;

 private:
  Context() = default;
  Status warm_up(const Model& model);
  llama_context* context_ = nullptr;
  llama_batch batch_{};
  ContextOptions options_;
  size_t first_cache_ = 0, n_caches_ = 0;
};

}  // namespace kvant::eval

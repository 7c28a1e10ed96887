// Two llama.cpp sessions for backend_test.cpp: one with llama.cpp's own f16 cache on the CPU, one on the
// KVANT device. Everything else is the same model file, the same library, the same process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "kvant/ggml_backend.h"
#include "llama.h"

namespace kvant::e2e {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::printf("FAILED %s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) ::kvant::e2e::fail(__FILE__, __LINE__, #condition); \
  } while (false)

enum class Where { kLlama, kKvant };

struct ModelDeleter {
  void operator()(llama_model* p) const { llama_model_free(p); }
};
struct ContextDeleter {
  void operator()(llama_context* p) const { llama_free(p); }
};
using Model = std::unique_ptr<llama_model, ModelDeleter>;
using Context = std::unique_ptr<llama_context, ContextDeleter>;

inline Model load_model(const std::string& path, Where where, int gpu_layers = 999) {
  ggml_backend_dev_t devices[] = {where == Where::kKvant ? ggml_backend_dev_by_name("KVANT") : nullptr,
                                  nullptr};
  llama_model_params params = llama_model_default_params();
  params.devices = devices;
  params.n_gpu_layers = gpu_layers;
  Model model(llama_model_load_from_file(path.c_str(), params));
  REQUIRE(model != nullptr);
  return model;
}

struct Setup {
  int n_ctx = 1024;
  int n_ubatch = 512;
  int n_seq = 1;
  bool unified = true;
  int threads = 2;
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  ggml_type type_k = GGML_TYPE_F16;
  bool node_by_node = false;  // an evaluation callback that asks for every node
};

inline Context make_context(llama_model* model, const Setup& s) {
  llama_context_params p = llama_context_default_params();
  p.n_ctx = static_cast<uint32_t>(s.n_ctx);
  p.n_batch = 2048;
  p.n_ubatch = static_cast<uint32_t>(s.n_ubatch);
  p.n_seq_max = static_cast<uint32_t>(s.n_seq);
  p.kv_unified = s.unified;
  p.n_threads = p.n_threads_batch = s.threads;
  p.flash_attn_type = s.flash;
  p.type_k = s.type_k;
  p.no_perf = true;
  if (s.node_by_node) p.cb_eval = [](ggml_tensor*, bool, void*) { return true; };
  return Context(llama_init_from_model(model, p));
}

inline int n_vocab(const llama_context* ctx) {
  return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

struct Piece {
  llama_seq_id seq = 0;
  llama_pos first = 0;
  std::vector<llama_token> tokens;
};

// Decodes the pieces as one batch; logits of the last token of each piece, or none when decoding failed.
inline std::vector<std::vector<float>> decode(llama_context* ctx, const std::vector<Piece>& pieces) {
  size_t n = 0;
  for (const Piece& piece : pieces) n += piece.tokens.size();
  llama_batch batch = llama_batch_init(static_cast<int32_t>(n), 0, 1);
  std::vector<int> last;
  for (const Piece& piece : pieces) {
    for (size_t i = 0; i < piece.tokens.size(); ++i) {
      const int at = batch.n_tokens++;
      batch.token[at] = piece.tokens[i];
      batch.pos[at] = piece.first + static_cast<llama_pos>(i);
      batch.n_seq_id[at] = 1;
      batch.seq_id[at][0] = piece.seq;
      batch.logits[at] = i + 1 == piece.tokens.size();
    }
    last.push_back(batch.n_tokens - 1);
  }
  std::vector<std::vector<float>> out;
  if (llama_decode(ctx, batch) == 0) {
    for (const int i : last) {
      const float* logits = llama_get_logits_ith(ctx, i);
      out.emplace_back(logits, logits + n_vocab(ctx));
    }
  }
  llama_batch_free(batch);
  return out;
}

inline std::vector<float> decode_one(llama_context* ctx, const Piece& piece) {
  std::vector<std::vector<float>> out = decode(ctx, {piece});
  REQUIRE(out.size() == 1);
  return out[0];
}

inline std::vector<llama_token> tokenize(const llama_model* model, const std::string& text, size_t n) {
  std::vector<llama_token> tokens(text.size() + 8);
  const int count =
      llama_tokenize(llama_model_get_vocab(model), text.c_str(), static_cast<int32_t>(text.size()),
                     tokens.data(), static_cast<int32_t>(tokens.size()), true, false);
  REQUIRE(count >= static_cast<int>(n));
  tokens.resize(n);
  return tokens;
}

// What is written to stderr while it lives.
class CaptureStderr {
 public:
  CaptureStderr();
  ~CaptureStderr();
  std::string text();

 private:
  FILE* file_ = nullptr;
  int saved_ = -1;
};

}  // namespace kvant::e2e

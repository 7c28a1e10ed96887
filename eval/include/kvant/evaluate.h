// The comparison: one model, one text, many caches, the same process, tokens, weights, chunks and threads.
//
// Method. llama.cpp's f16 cache (flash attention on) is the baseline. Its context and those of all candidates
// live at the same time; every chunk of the text is decoded in each of them and compared at once, so that
// memory for logits is bounded by one chunk. A second f16 context with flash attention off gives the floor:
// what equivalent arithmetic differs by. Which keys kvant reads quantized depends on token order only, so a
// teacher-forced pass accumulates the error of decoding token by token.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvant/candidate.h"
#include "kvant/eval_metrics.h"
#include "kvant/ggml_backend.h"
#include "kvant/status.h"

namespace kvant::eval {

struct EvaluateOptions {
  std::string model_path;
  std::string text;    // running text that is evaluated; also the passage of the copy test
  std::string filler;  // other text of the copy test; empty: the end of `text`
  std::vector<Candidate> candidates;
  bool text_test = true;
  bool copy_test = true;
  int window_tokens = 2048;  // of the text test
  int windows = 1;           // consecutive windows of the text
  bool second_half = false;  // score the second half of each window, as llama-perplexity does, instead of the
                             // positions beyond the largest exact window + 512
  int passage_tokens = 1024;  // copy test: passage, filler, passage
  int filler_tokens = 2048;
  bool f32_weights = true;  // false: the model's own weights for quality, too
  bool speed = true;        // prefill and decode tok/s with the model's own weights
  int speed_tokens = 2048;  // depth at which both are timed
  int decode_tokens = 64;
  bool both_paths = false;  // quantized kvant candidates also run dequantize-first, for Row::fused_kl
  int chunk_tokens = 256;
  int threads = 2;
  BootstrapOptions bootstrap;
  ggml::Options kvant;  // scheme is replaced by each candidate's
};

inline constexpr int kSpeedPrefillTokens = 256;

struct Speed {
  double prefill_tok_s = 0, decode_tok_s = 0;
  bool flash_prefill = true, flash_decode = true;  // which setting was faster
  size_t peak_bytes = 0;      // of the cache, by kvant's counter or llama.cpp's type sizes
  size_t resident_bytes = 0;  // growth of the process, for information
};

struct Row {
  Candidate candidate;
  std::string test;  // "text" or "copy"
  Summary quality;
  double bits_k = 16, bits_v = 16, bits = 16;  // per value, asymptotic, metadata counted
  double bytes_per_token = 0;                  // at this length, everything counted
  double bytes_per_token_asymptotic = 0;
  double quantized_read_share = 0;  // of all attended (query, key) pairs of the test
  bool measures_quantization() const { return quantized_read_share > 0; }
  Speed speed;
  // Mean KL of attention on packed codes against decoding the same tiles first: what integer arithmetic
  // costs.
  std::optional<double> fused_kl;
  std::vector<ggml::CacheReport> caches;  // kvant only
  bool complete = true;                   // false: interrupted, fewer positions than the other rows
};

struct Floor {
  std::string test;
  Summary quality;
};

struct Evaluation {
  std::string model;    // description by llama.cpp
  std::string weights;  // "f32" or "native"
  std::vector<Floor> floors;
  std::vector<Row> rows;
  double text_base_nll = 0, copy_base_nll = 0;
  int text_scored = 0, copy_scored = 0, first_scored = 0;
  double seconds = 0;
  bool interrupted = false;
};

struct EvaluateHooks {
  // share in 0..1, what is being done.
  std::function<void(double share, const std::string& what)> progress;
  std::function<bool()> cancelled;
};

// Refuses what cannot run before any work. When cancelled, what was measured so far is in `out`, interrupted
// is set and the status is kCancelled.
Status evaluate(const EvaluateOptions& options, const EvaluateHooks& hooks, Evaluation* out);

}  // namespace kvant::eval

// End-to-end speed on a model whose cache is filled: kvant's schemes and llama.cpp's cache types side by
// side.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvant/candidate.h"
#include "kvant/ggml_backend.h"
#include "kvant/profile.h"
#include "kvant/status.h"

namespace kvant::eval {

struct BenchDecodeOptions {
  std::string model_path;
  std::vector<Candidate> caches;  // of parse_bench_candidates
  std::vector<int> depths = {0, 4096};
  int threads = 2;
  int rounds = 5;            // interleaved over caches; the median of all steps counts
  int round_tokens = 8;      // decode steps of one cache in one round
  int prefill_tokens = 512;  // one batch at each depth; 0: not measured
  int prefill_rounds = 1;    // interleaved, too; a cache that took kLongPrefillSeconds is not asked again
  ggml::Options kvant;       // the scheme is replaced by each candidate's
  std::function<void(double share, const std::string& what)> progress;
  std::function<bool()> cancelled;
};

inline constexpr double kLongPrefillSeconds = 5;

struct DecodeRow {
  std::string cache;
  int depth = 0;
  double decode_tok_s = 0;
  double prefill_tok_s = 0;
  double prefill_encode_tok_s = 0;  // kvant: tokens of a prefill per second of writing and sealing them
  bool flash_attention = true;      // llama.cpp's f16: the faster of the two settings, for decoding
  size_t cache_bytes = 0;           // everything counted
  ggml::Profile profile;            // kvant: of its decode steps; per graph, so per step
};

// Contexts are filled to a depth by prefilling 512 tokens and repeating their cache rows, through llama.cpp's
// own sequence state: filling 32k tokens by prefill would take most of an hour with a quantized llama.cpp
// cache, and speed does not depend on what the rows say.
Status bench_decode(const BenchDecodeOptions& options, std::vector<DecodeRow>* out);

}  // namespace kvant::eval

// Candidates of a comparison: kvant schemes and llama.cpp's own cache types.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ggml.h"
#include "kvant/scheme.h"
#include "kvant/status.h"

namespace kvant::eval {

struct Candidate {
  std::string name;    // as shown: "kv4", "llama:q8_0", "kv4 (keys only)"
  bool peer = false;   // llama.cpp's own cache
  std::string scheme;  // kvant only
  Scheme parsed;       // kvant only
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;  // peers only
  std::string ik_type;  // "q4_0": ik_llama.cpp's cache, in a process of its own; only benchmarks have those

  int window() const { return peer || parsed.exact() ? 0 : parsed.window; }
  bool quantized() const;
  // llama.cpp's f16 cache, which everything is compared with.
  bool baseline() const {
    return peer && ik_type.empty() && type_k == GGML_TYPE_F16 && type_v == GGML_TYPE_F16;
  }
};

// "llama:TYPE" or "llama:KEY_TYPE/VALUE_TYPE". Errors name the nearest type.
Result<Candidate> parse_peer(std::string_view text);
Result<Candidate> parse_candidate(std::string_view text);

// One list as users write it: "llama:f16,kv4,kv4,w=256,exact". A part with '=' continues the scheme before it
// ("kv4,w=256"), except after a peer or when it is "k=..." and the scheme before it has its keys already:
// then it starts a new one. A ';' always separates.
std::vector<std::string> split_candidates(std::string_view list);
Result<std::vector<Candidate>> parse_candidates(std::string_view list);
// The same; "ik:TYPE" is one, too.
Result<std::vector<Candidate>> parse_bench_candidates(std::string_view list);

// Adds, after each quantized candidate, the same with only its keys and with only its values quantized.
std::vector<Candidate> with_legs(const std::vector<Candidate>& candidates);

// The type names that llama.cpp takes for its cache.
const std::vector<std::string_view>& cache_type_names();

}  // namespace kvant::eval

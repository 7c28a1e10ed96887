// Contexts of all caches of a comparison, decoded in step.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvant/evaluate.h"
#include "kvant/llama_session.h"
#include "kvant/model_shape.h"

namespace kvant::eval {

// One pass over tokens: positions first_scored .. last_scored are compared.
struct Pass {
  std::vector<llama_token> tokens;
  int first_scored = 0;
  int last_scored = 0;  // inclusive; its following token must exist
};

// Tokens that are decoded, by everyone together, for progress.
class Progress {
 public:
  Progress(const EvaluateHooks& hooks, double total) : hooks_(hooks), total_(total) {}
  void step(double units, const std::string& what) {
    done_ += units;
    if (hooks_.progress) hooks_.progress(total_ > 0 ? std::min(1.0, done_ / total_) : 0, what);
  }
  bool cancelled() const { return hooks_.cancelled && hooks_.cancelled(); }

 private:
  const EvaluateHooks& hooks_;
  double total_;
  double done_ = 0;
};

class Lockstep {
 public:
  // `cpu` runs llama.cpp's caches, `kvant` the others; both must outlive this. Candidates that are the
  // baseline itself get no context. n_ctx: tokens of the longest pass.
  static Result<std::unique_ptr<Lockstep>> create(const Model& cpu, const Model* kvant,
                                                  const EvaluateOptions& options, int n_ctx);

  // Adds one row per candidate and, `with_floor`, one floor to `out`. kCancelled leaves what was scored in
  // the rows.
  Status run(const std::string& test, const std::vector<Pass>& passes, bool with_floor, Progress* progress,
             Evaluation* out);

 private:
  struct Entry {
    Candidate candidate;
    bool floor = false;
    bool active = true;
    std::unique_ptr<Context> context;  // null: the baseline itself
    std::vector<TokenScore> scores;
    // Comparison of both paths: logits of the chunk with tiles decoded first, and the other's scores against
    // them.
    bool both_paths = false;
    std::vector<float> decoded;
    std::vector<TokenScore> fused;
  };
  explicit Lockstep(const EvaluateOptions& options) : options_(options) {}
  Status add(const Model& model, Entry entry, int n_ctx);
  Status decode_first(Entry* entry, std::span<const llama_token> chunk, int begin, int from);
  // Clears every context, or, where all hold the first tokens of the pass already, continues from there.
  // Returns the position to go on from.
  int begin_pass(const Pass& pass);
  Status run_pass(int index, const Pass& pass, const std::string& what, Progress* progress);
  void compare_chunk(int window, const Pass& pass, int begin, int from, int end);
  void finish(const std::string& test, int tokens, bool complete, Evaluation* out);

  const EvaluateOptions& options_;
  std::unique_ptr<Context> baseline_;
  std::vector<Entry> entries_;
  std::vector<llama_token> held_;  // what every active context holds; empty: unknown
};

// Bits and bytes of a row. kvant: from the counters of its caches, which hold `tokens` tokens. Peers: from
// the row sizes of their types.
void fill_sizes(const std::vector<ggml::CacheReport>& caches, int tokens, Row* row);
void fill_peer_sizes(const ModelShape& shape, int tokens, Row* row);

}  // namespace kvant::eval

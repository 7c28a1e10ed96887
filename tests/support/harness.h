// Drives a SlotCache as an engine does: appends tokens of sequences in batches, builds the masks, runs
// attention with threads, and keeps the original rows, so that every output can be judged twice: against
// reference_attention (DQREF, what the cache stores) and against double-precision attention over the original
// rows (REF).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvant/attention.h"
#include "kvant/half.h"
#include "kvant/scheme.h"
#include "kvant/slot_cache.h"

namespace kvant::test {

struct EngineOptions {
  std::string scheme = "k=t4,v=t4";
  // Schemes per layer; empty: `scheme` for all. Window and sinks come from `scheme`.
  std::vector<std::string> layer_schemes = {};
  std::vector<LayerShape> shapes = {{.n_query_heads = 2, .n_kv_heads = 1, .key_dim = 64, .value_dim = 64}};
  int n_slots = 512;
  int n_streams = 1;
  int threads = 1;
  int poison = 0xAA;
  size_t limit_bytes = SIZE_MAX;
  std::function<void(int layer, LayerScheme*)> adjust = {};  // changes a resolved layer
};

// As `adjust`: the widths of key bands differ from head to head and layer to layer, as fit=1 leaves them;
// none is narrower than the scheme's narrowest. Keys must be symmetric and of family t.
void vary_key_widths(int layer, LayerScheme* scheme);

// How queries look at keys; applies to every query of a step.
struct Look {
  int sliding_window = 0;  // 0: none; else only the newest n positions of the sequence
  float scale = 0.0f;      // 0: 1 / sqrt(key_dim)
  float soft_cap = 0.0f;
  std::vector<float> alibi_slopes = {};  // [n_query_heads]; the mask then holds -(distance)
  std::vector<float> sink_logits = {};   // [n_query_heads]
  bool bias = false;                     // mask holds -(distance) / 8, rounded to binary16
  AttentionPath path = AttentionPath::kFused;
  float skip_below = kSkipBelow;
  int threads = 0;         // 0: as the engine
  bool seal_only = false;  // writes and seals, no attention and no outputs
  bool dqref = false;      // also run reference_attention
  bool ref = false;        // also run attention over the original rows
};

// Rows of one token in one layer, all heads.
struct TokenRows {
  std::vector<float> q, k, v;
};

// Content of a token: a function of (layer, sequence, position) only.
using Content = std::function<TokenRows(int layer, const LayerShape& shape, int seq, int pos)>;

// q, k, v ~ N(0, 1), the same on every machine; `outlier` is added to key channels 5 and dim / 2.
Content random_content(uint64_t seed, float outlier = 0.0f);
// Remembers what `content` gave: for many engines that hold the same tokens.
Content remembered(Content content);
// K = 0, q = 1, V = 1000 * seq + pos: uniform attention names the tokens that it read.
Content tag_content();

struct Entry {
  int stream = 0;
  int seq = 0;
  int pos = 0;
  int slot = 0;  // in the stream
};

struct Outputs {
  // [entry][n_query_heads * value_dim]; dqref and ref only when asked for.
  std::vector<std::vector<float>> engine, dqref, ref;
};

class Engine {
 public:
  // Fails the current test and leaves an unusable engine when the options are refused.
  explicit Engine(EngineOptions options, Content content = random_content(1));
  ~Engine();

  SlotCache& cache() { return *cache_; }
  AttentionWorkspace& workspace() { return *workspace_; }
  const EngineOptions& options() const { return options_; }
  const LayerShape& shape(int layer = 0) const { return options_.shapes[layer]; }
  void set_content(Content content) { content_ = std::move(content); }

  // One batch. The outputs, per layer. A failed status leaves the outputs empty.
  Status step(const std::vector<Entry>& entries, const Look& look, std::vector<Outputs>* out);
  // Appends positions of a sequence at slot = position of `stream`, `chunk` tokens a batch; outputs of layer
  // 0 of all positions in order. Fails the test on an error.
  Outputs append(int stream, int seq, int first_pos, int count, int chunk, const Look& look = {});
  // Attention again for entries that are in the cache already (nothing is written); layer 0.
  Outputs attend(const std::vector<Entry>& entries, const Look& look);

  // What the harness knows of a stream's slots.
  struct Owner {
    int seq = -1, pos = -1;
  };
  std::vector<Owner>& owners(int stream) { return owners_[stream]; }
  void forget(int stream, int slot) { owners_[stream][slot] = Owner(); }
  // Original rows rounded to binary16, [n_kv_heads * dim].
  std::vector<float> original(int layer, Side side, int stream, int slot) const;
  void copy_stream(int from, int to);
  void clear();

  // Sum over all side pages of what their pointers own, by the layout of the formats and shapes.
  MemoryReport walk() const;
  // Sides of pages that plans leave out though they are not in their tiles alone.
  int wrongly_settled_pages() const;

 private:
  Status run(const std::vector<Entry>& entries, const Look& look, bool write, std::vector<Outputs>* out);
  void run_layer(int layer, const std::vector<std::vector<int>>& by_stream, const std::vector<Entry>& entries,
                 const Look& look, const BatchPlan& plan, Outputs* out);
  std::vector<float> attend_original(int layer, const Entry& entry, const Look& look) const;
  std::optional<float> mask_value(const Entry& query, int slot, const Look& look) const;

  EngineOptions options_;
  Content content_;
  std::unique_ptr<SlotCache> cache_;
  std::unique_ptr<AttentionWorkspace> workspace_;
  AttentionJob job_;
  std::vector<std::vector<Owner>> owners_;                                  // [stream][slot]
  std::map<std::tuple<int, int, int, int>, std::vector<float>> originals_;  // layer, side, stream, slot
};

// Runs `body(share)` in `threads` threads.
void in_threads(int threads, const std::function<void(WorkShare)>& body);

// ||a - b|| / ||b|| over all rows; and the largest of the single rows.
double relative_error(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b);
double worst_row_error(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b);

// Bits, not values: -0 differs from 0.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b);
bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b);

// Everything a stream holds, tiles as bytes, in slot order: equal for equal content.
uint64_t stream_hash(const SlotCache& cache, int stream);

// Tolerance of the engine against DQREF, as relative_error over outputs of Gaussian data: float rounding
// where nothing is rounded to integers, else what the rounding of queries and weights allows (see
// harness.cpp).
double engine_tolerance(const SlotCache& cache, int layer, AttentionPath path);

}  // namespace kvant::test

// Attention over one layer of a SlotCache: fused on packed codes, or dequantize first.
//
// Method: online softmax (Milakov and Gimelshein 2018), split over fixed runs of pages whose states
// (maximum, sum, weighted output) are merged in order, as in FlashDecoding. Runs depend on positions only, so
// the result does not depend on the number of threads or on how queries are batched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvant/slot_cache.h"
#include "kvant/status.h"

namespace kvant {

enum class AttentionPath : uint8_t {
  kFused = 0,   // integer products on the packed codes
  kDequantize,  // tiles are decoded to floats, then float products
};

// Distance in base-2 logits below which a page cannot matter: each of its weights is less than 2^-24 of the
// largest, so all that a row leaves out is less than keys * 2^-24 of the sum of its weights.
inline constexpr float kSkipBelow = 24.0f;

// Pages per run of the split: 512 tokens.
inline constexpr int kRunPages = 8;

struct AttentionArgs {
  LayerId layer;
  const BatchPlan* plan = nullptr;
  // q: float, value of (stream s, query n, head h, channel c) at q + s * q_stream + n * q_token + h * q_head
  // + c; strides in floats.
  const float* q = nullptr;
  size_t q_head = 0, q_token = 0, q_stream = 0;
  float* out = nullptr;  // same addressing, value_dim channels
  size_t out_head = 0, out_token = 0, out_stream = 0;
  float scale = 1.0f;                   // multiplies q . k
  float soft_cap = 0.0f;                // 0: none; else cap * tanh(logit / cap)
  const float* alibi_slopes = nullptr;  // [n_query_heads], multiplies the mask; null: 1
  const float* sink_logits = nullptr;   // [n_query_heads], learned sinks; null: none
  AttentionPath path = AttentionPath::kFused;
  // A row leaves out pages whose logits are all further than this below the largest that it met before in the
  // run of pages (never across runs, so that the split does not show); infinity: none.
  float skip_below = kSkipBelow;
  // Null, or where thread 0 adds the time that sealing pages took it.
  std::atomic<uint64_t>* seal_nanoseconds = nullptr;
};

// Workspace of one cache: allocated once, counted, reused by every layer and call.
struct WorkspaceLayout;

class AttentionWorkspace {
 public:
  static Result<std::unique_ptr<AttentionWorkspace>> create(SlotCache* cache);
  static size_t bytes(const SlotCache::Options& options);
  ~AttentionWorkspace();
  std::byte* thread_memory(int ith) const;
  std::byte* shared_memory() const;
  const WorkspaceLayout& layout() const { return *layout_; }
  int max_threads() const { return max_threads_; }

 private:
  AttentionWorkspace();
  PoolBuffer buffer_;
  std::unique_ptr<WorkspaceLayout> layout_;
  int max_threads_ = 1;
};

// One attention call, run by any number of threads: every thread calls run() with its share. Also seals the
// layer's pages of the plan first. prepare() may be called again for the next call.
class AttentionJob {
 public:
  // Refuses (kUnsupported, kInvalidArgument) before any work.
  Status prepare(SlotCache* cache, AttentionWorkspace* workspace, const AttentionArgs& args);
  void run(WorkShare share);

 private:
  friend class AttentionRunner;
  void seal(bool timed);
  int count_blocks() const;
  void choose_items(size_t rows);

  SlotCache* cache_ = nullptr;
  AttentionWorkspace* workspace_ = nullptr;
  AttentionArgs args_;
  std::vector<SealItem> seal_;
  int query_block_ = 1;  // queries per item
  int n_blocks_ = 0;     // (stream, query block) pairs
  int n_kv_heads_ = 0;
  int item_heads_ = 1;  // KV heads per item
  int n_chunks_ = 0;    // of item_heads_ KV heads
  int max_runs_ = 0;
  int n_items_ = 0;
  bool split_ = false;  // an item is one run of a group (block, chunk); runs are merged in order
  // Of each group, when split: preparation of its queries, merged runs, whether each run is finished. Room
  // for the runs of a full cache, so that a growing one allocates nothing.
  std::vector<std::atomic<int>> progress_;
  size_t group_progress_ = 0;
  std::atomic<int> next_seal_{0}, sealed_{0}, next_{0};
};

// Double-precision attention over what the cache stores (tiles decoded, transforms undone, the same choice of
// exact and quantized keys): DQREF, what every other path is judged against.
Status reference_attention(const SlotCache& cache, const AttentionArgs& args);

}  // namespace kvant

// One thread's part of an AttentionJob. Internal to attention/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvant/attention.h"
#include "simd/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvant {

// Query rows (queries x heads of one KV head) that meet a page together; more when one KV head has more
// query heads.
inline constexpr int kBlockRows = 64;

// Up to this many (block, KV head) pairs the runs of each are shared among threads, as when decoding; above,
// there are enough pairs to keep every thread busy.
inline constexpr int kMaxSplitPairs = 64;

// Byte sizes that the workspace is made of; maxima over layers and heads.
struct WorkspaceLayout {
  int rows = 0;
  int key_dim = 0, value_dim = 0;
  int max_runs = 0;
  size_t prepared = 0, pv = 0;
  size_t shared_query = 0;  // one block's queries: scaled, transformed, centre products
  size_t state = 0;         // one block's states and accumulators
  size_t row_state = 0;     // one row's state and accumulators in the shared memory
  size_t split_rows = 0;
  size_t thread_bytes = 0, shared_bytes = 0;
};
WorkspaceLayout workspace_layout(const SlotCache::Options& options);

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class AttentionRunner {
 public:
  AttentionRunner(AttentionJob* job, int ith);
  void run_item(int item);

 private:
  // Queries of one (block, KV head): base-2 logits, so they carry scale * log2(e).
  struct Queries {
    float* plain = nullptr;        // [rows][key_dim]
    float* transformed = nullptr;  // [rows][key_dim]
    float* centre = nullptr;       // [rows] q . centre
  };
  struct State {
    simd::RowState* row = nullptr;  // [rows]
    float* acc_tile = nullptr;      // [rows][value_dim], in the values' transformed space
    float* acc_rows = nullptr;      // [rows][value_dim]
  };
  // Which slots of a page each row reads, and from where.
  struct Live {
    uint64_t *all, *key_tile, *key_rows, *key_kept, *value_tile, *value_rows;
  };
  struct Block {
    const StreamPlan* stream = nullptr;
    int stream_index = 0;
    int first_query = 0, n_queries = 0;
    int head = 0;  // KV head
    int rows = 0;
  };

  Block find_block(int pair) const;
  Queries place_queries(std::byte* memory) const;
  State place_state(std::byte* memory) const;
  void transform_queries(const Block& block, const Queries& queries) const;
  void prepare_queries(const Block& block, const Queries& queries);
  void reset(State* state, int rows) const;
  void attend_run(const Block& block, const Queries& queries, int run, State* state);
  void attend_page(const Block& block, const Queries& queries, int page, State* state);
  const std::byte* next_tile(const Block& block, int page, Side side, const std::byte* tile) const;
  const std::byte* head_tile(const SidePage& page, int head, Side side) const;
  const Format& tile_format(int head, Side side) const;
  bool find_live(const Block& block, int page, const SidePage& kp, const SidePage& vp);
  void key_logits(const Block& block, const Queries& queries, int number, const SidePage& page);
  void merge_lanes(const Block& block, const uint64_t* lanes, const uint64_t* layout, const float* from);
  void bias_logits(const Block& block, int page);
  void add_values(const Block& block, int number, const SidePage& page, State* state);
  const float* masked_weights(const Block& block, const uint64_t* lanes);
  void merge(const Block& block, const State& from, State* into) const;
  void finish(const Block& block, State* state);
  void run_split(const Block& block, int pair, int run);

  AttentionJob* job_;
  const SlotCache& cache_;
  const LayerScheme& layer_;
  const AttentionArgs& args_;
  const simd::AttentionKernels& kernels_;
  const WorkspaceLayout& layout_;
  int group_;  // query heads per KV head
  Queries queries_;
  simd::PreparedQueries prepared_;  // of the pair last met; in this thread's memory
  std::byte* prepared_memory_;
  int prepared_pair_ = -1;
  State run_state_, total_state_;
  float *logits_, *scratch_, *weights_, *rescale_, *floats_;
  std::byte* pv_workspace_;
  Live live_;
  uint64_t pairs_ = 0, pairs_tile_ = 0, pairs_tile_v_ = 0;
};

}  // namespace kvant

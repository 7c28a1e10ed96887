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

// Rows (queries x query heads) that meet a page together; more when one KV head has more query heads.
inline constexpr int kBlockRows = 64;

// KV heads of one item. Tiles of a page's heads lie back to back: visiting them in this order keeps the
// hardware prefetchers going.
inline constexpr int kMaxItemHeads = 16;

// Rows below which a block of queries is not cut to make items for idle threads.
inline constexpr int kSmallBlockRows = 16;

// Items per thread below which KV heads are items of their own.
inline constexpr int kItemsPerThread = 4;

// Tiles between the one in use and the one whose lines are asked for: those of kernels that open four tiles
// at a time.
inline constexpr int kPrefetchTiles = 4;

// Rows times pages whose logits are kept at once.
inline constexpr int kStripRows = 128;

// Up to this many groups (blocks x chunks of KV heads) the runs of each are shared among threads, as when
// decoding; above, there are enough groups to keep every thread busy.
inline constexpr int kMaxSplitGroups = 64;

// Byte sizes that the workspace is made of; maxima over layers and heads.
struct WorkspaceLayout {
  int rows = 0;
  int key_dim = 0, value_dim = 0;
  int max_runs = 0;
  size_t prepared = 0, pv = 0;
  int logit_rows = 0;       // rows x pages of a strip
  size_t shared_query = 0;  // one block's queries: scaled, transformed, centre products
  size_t state = 0;         // one block's states and accumulators
  size_t row_state = 0;     // one row's state and accumulators in the shared memory
  size_t split_rows = 0;
  size_t thread_bytes = 0, shared_bytes = 0;
};
WorkspaceLayout workspace_layout(const SlotCache::Options& options);

inline constexpr float kLog2e = 1.4426950408889634f;

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class AttentionRunner {
 public:
  AttentionRunner(AttentionJob* job, int ith);
  // following: the item that this thread runs next, or n_items where that is not known.
  void run_item(int item, int following);

 private:
  // Queries of a block: base-2 logits, so they carry scale * log2(e).
  struct Queries {
    float* plain = nullptr;        // [heads][rows][key_dim]
    float* transformed = nullptr;  // [heads][rows][key_dim]
    float* centre = nullptr;       // [heads][rows] q . centre
  };
  struct State {
    simd::RowState* row = nullptr;  // [heads][rows]
    float* acc_tile = nullptr;      // [heads][rows][value_dim], in the values' transformed space
    float* acc_rows = nullptr;      // [heads][rows][value_dim]
  };
  // Which slots of a page each row of any head reads, and from where.
  struct Live {
    uint64_t *all, *key_tile, *key_rows, *key_kept, *value_tile, *value_rows;
  };
  struct TileAddress {
    const std::byte* at;
    uint32_t bytes;
  };
  // Some queries of a stream and some KV heads.
  struct Block {
    const StreamPlan* stream = nullptr;
    int stream_index = 0;
    int first_query = 0, n_queries = 0;
    int first_head = 0, n_heads = 0;  // KV heads
    int rows = 0;                     // per KV head
    int all_rows() const { return rows * n_heads; }
  };
  // A page that some row sees. Pages of a strip share one softmax.
  struct StripPage {
    int number = 0;
    const SidePage* keys = nullptr;
    const SidePage* values = nullptr;
    Live live;
  };

  Block find_block(int group) const;
  Queries place_queries(std::byte* memory) const;
  State place_state(std::byte* memory) const;
  const HeadScheme& head_of(const Block& block, int h) const { return layer_.heads[block.first_head + h]; }
  void transform_queries(const Block& block, const Queries& queries) const;
  void prepare_queries(const Block& block, const Queries& queries);
  void reset(State* state, int rows) const;
  void attend_run(const Block& block, const Queries& queries, int run, State* state);
  void attend_strip(const Block& block, const Queries& queries, int pages, int after, State* state);
  int first_page_of_next_run(const Block& block, int run) const;
  void ask_for_run(const Block& block, int first_page) const;
  void ask_for_first_tiles(const Block& block, int run);
  void list_first_key_tiles(const Block& block, int first);
  void list_tiles(const Block& block, int pages, int after);
  void list_page_tiles(const Block& block, const SidePage& page, Side side);
  TileAddress next_tile(const std::byte* tile);
  const uint16_t* next_rows(const Block& block, const StripPage& page, int h, Side side) const;
  const std::byte* head_tile(const SidePage& page, int head, Side side) const;
  bool find_live(const Block& block, StripPage* page);
  bool find_live_in_tiles(const Block& block, StripPage* page);
  float* logits_of(const Block& block, int page, int h) const;
  void tile_logits(const Block& block, const Queries& queries, int pages);
  void row_logits(const Block& block, const Queries& queries, const StripPage& page, int h, float* logits);
  void merge_lanes(const Block& block, const uint64_t* lanes, const uint64_t* layout, const float* from,
                   float* logits) const;
  void bias_logits(const Block& block, const StripPage& page, int h, float* logits) const;
  void weigh(const Block& block, int pages, State* state);
  const uint64_t* unskipped_lanes(const Block& block, int page, int h);
  void add_tile_values(const Block& block, int pages, State* state);
  void add_tile_sums(const Block& block, int page, int h, const float* weights, simd::RowState* row) const;
  void open_exact_rows(const Block& block, const StripPage& page, float* acc, simd::RowState* row) const;
  void add_exact_values(const Block& block, const StripPage& page, int h, const float* weights, float* acc);
  bool reads_all(const Block& block, const Live& live, const uint64_t* lanes) const;
  const float* masked_weights(const Block& block, const Live& live, const uint64_t* lanes,
                              const float* weights);
  void merge(const Block& block, const State& from, State* into) const;
  void finish(const Block& block, State* state);
  // `states`: of the runs of the block's group, in the shared memory.
  State state_of_run(const Block& block, std::byte* states, int run) const;
  void merge_finished(const Block& block, std::byte* states, std::atomic<int>* merged,
                      const std::atomic<int>* finished);
  void run_split(const Block& block, int group, int run);

  AttentionJob* job_;
  const SlotCache& cache_;
  const LayerScheme& layer_;
  const AttentionArgs& args_;
  const simd::AttentionKernels& kernels_;
  const WorkspaceLayout& layout_;
  int group_;  // query heads per KV head
  Queries queries_;
  simd::PreparedQueries prepared_[kMaxItemHeads];  // of the group last met; in this thread's memory
  std::byte* prepared_memory_;
  int prepared_group_ = -1;
  int following_ = 0;  // item that this thread runs next
  State run_state_, total_state_;
  float *logits_, *scratch_, *weights_, *rescale_, *sums_, *floats_;
  std::byte* pv_workspace_;
  uint64_t* masks_;      // of the strip's pages, six per row
  uint64_t* unskipped_;  // [pages][heads][rows] tokens of the tile whose weights matter
  StripPage strip_[kRunPages];
  // Tiles of the strip in the order of their use.
  TileAddress tiles_[2 * kRunPages * kMaxItemHeads + kPrefetchTiles + kMaxItemHeads];
  int n_tiles_ = 0, at_tile_ = 0;
  // Room for tasks, which are not set to their defaults for every job.
  alignas(simd::KeyTask) std::byte key_tasks_[kRunPages * kMaxItemHeads * sizeof(simd::KeyTask)];
  alignas(simd::ValueTask) std::byte value_tasks_[kRunPages * kMaxItemHeads * sizeof(simd::ValueTask)];
  uint64_t pairs_ = 0, pairs_tile_ = 0, pairs_tile_v_ = 0, pairs_skipped_ = 0;
};

}  // namespace kvant

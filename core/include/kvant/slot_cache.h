// SlotCache: pages of token slots that are written by index. What an engine with its own cell bookkeeping
// (llama.cpp) needs; the sequence level (fork, prefix, shift, evict, save) builds on the same pages.
//
// Life of a batch (all calls from one thread unless a WorkShare is passed):
//
//   begin_batch(slots, layers)      slots get new stamps; their old content is gone; rows are reserved
//   plan(queries, &plan)            masks are read once; pages to seal are chosen, their tiles reserved
//   write(layer, side, ...)         per layer; may be shared by threads
//   seal_page(item)                 per layer, page and side; may be shared by threads
//   attention over the layer        (kvant/attention.h)
//   end_batch(plan)                 exact rows that nobody needs any more are released
//
// Which keys a query sees quantized depends on token order only: a key is exact for a query when it is a
// sink, or lies in a page that holds one of the newest W slots visible to that query, or lies in a page
// that is not full, or was written again after its page was sealed (patch); else it is read from its tile.
//
// Invariants, per layer, page and side:
//   row_mask & tile_mask may overlap (a page that is a window page for one query and sealed for another)
//   a slot with neither bit set holds nothing and is hidden from every query
//   tiles are immutable; a slot written again leaves tile_mask, and the tile is freed when it becomes empty
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvant/layer_scheme.h"
#include "kvant/memory.h"
#include "kvant/status.h"
#include "kvant/types.h"

namespace kvant {

// Thread `ith` of `nth` that run the same call; the caller's threads are used.
struct WorkShare {
  int ith = 0;
  int nth = 1;
};

// One layer, one page, one side.
struct SidePage {
  std::byte* tiles = nullptr;  // heads back to back, Format::tile_bytes each
  uint16_t* rows = nullptr;    // [n_kv_heads][64][dim] binary16
  uint16_t* kept = nullptr;    // [n_kv_heads][popcount(kept_layout)][dim]: exact rows of a sealed page
  uint64_t tile_mask = 0;      // slots whose content is in the tiles
  uint64_t row_mask = 0;       // slots whose content is in `rows`
  uint64_t kept_mask = 0;      // slots whose content is in `kept`; a subset of kept_layout
  uint64_t kept_layout = 0;    // slots that `kept` was laid out for: row of slot t is its rank here
};
// Row of slot t in rows that were laid out for the slots of `layout`.
inline int kept_row(uint64_t layout, int t) { return std::popcount(layout & ((uint64_t{1} << t) - 1)); }

// Queries of one stream, in the order in which their tokens were written.
struct StreamQueries {
  StreamId stream;
  int n_queries = 0;
  int n_slots = 0;                 // slots 0 .. n_slots-1 of the stream are looked at
  const uint16_t* mask = nullptr;  // [n_queries][mask_stride] binary16: 0, -inf or a bias; null: causal
                                   // over what is written is not assumed: everything written is visible
  size_t mask_stride = 0;
  // Slot that query i's own token was written to in this batch, or -1.
  std::span<const int32_t> own_slot;
};

struct StreamPlan {
  StreamId stream;
  int n_queries = 0;
  int n_pages = 0;
  const uint16_t* mask = nullptr;
  size_t mask_stride = 0;
  bool has_bias = false;          // some mask value is neither 0 nor -inf
  std::vector<uint64_t> visible;  // [n_queries][n_pages] bit t: slot 64 * page + t is visible
  std::vector<uint64_t> window;   // [n_queries][(n_pages + 63) / 64] bit: page is exact for the query
  std::vector<int32_t> seal;      // pages that some query reads quantized and that may be sealed
  std::vector<int32_t> release;   // pages whose rows no later query counts into its window
  std::vector<int32_t> sinks;     // slots that these queries show to be sinks; may repeat
  bool in_window(int query, int page) const {
    return (window[static_cast<size_t>(query) * ((n_pages + 63) / 64) + page / 64] >> (page % 64)) & 1;
  }
};

// One page of one layer and side to encode.
struct SealItem {
  int32_t layer = 0, stream = 0, page = 0;
  Side side = Side::kKey;
};

struct BatchPlan {
  std::vector<StreamPlan> streams;
  std::vector<int32_t> layers;  // layers the plan reserved tiles for
};

struct MemoryReport {
  size_t tile_bytes = 0;
  size_t exact_row_bytes = 0;
  size_t table_bytes = 0;
  size_t workspace_bytes = 0;
  size_t total() const { return tile_bytes + exact_row_bytes + table_bytes + workspace_bytes; }
};

// Attended (query row, key) pairs of visible keys, for the share that was read from quantized tiles.
struct ReadCounters {
  std::atomic<uint64_t> pairs_total{0};
  std::atomic<uint64_t> pairs_quantized{0};  // keys read from quantized tiles
  std::atomic<uint64_t> pairs_quantized_v{0};
  std::atomic<uint64_t> pairs_skipped{0};  // whose page's weights could not matter: values not read
};

class SlotCache {
 public:
  struct Options {
    std::vector<LayerScheme> layers;
    int n_slots = 0;  // per stream; rounded up to whole pages
    int n_streams = 1;
    int window = 128;     // newest visible tokens that stay exact; 0 acts as 1: the newest page is exact
    int sinks = 16;       // first tokens of a sequence that stay exact
    int max_threads = 1;  // for the workspace
    MemoryPool::Options memory;
  };
  static Result<std::unique_ptr<SlotCache>> create(Options options);
  ~SlotCache();

  // `slots`: global indices stream * n_slots + slot, in token order. `layers`: whose content will be
  // written. Refused as a whole (kOutOfRange, kPoolExhausted; kInvalidArgument: more slots than a stream has)
  // before anything changes.
  Status begin_batch(std::span<const int64_t> slots, std::span<const int32_t> layers);
  // Reads the masks. Refused (kOutOfRange, kPoolExhausted) as a whole; then the batch is taken back, too.
  Status plan(std::span<const StreamQueries> queries, std::span<const int32_t> layers, BatchPlan* plan);
  // Takes the batch back, as long as no plan of it succeeded: the cache is as it was before begin_batch,
  // except that exact rows which write() has overwritten since are lost.
  void cancel_batch();
  // rows: n x (n_kv_heads * dim) floats, `row_stride` floats apart, for the slots of begin_batch (same
  // order). NaN or Inf (also after rounding to binary16): that token is not stored, the first error is kept
  // (take_error) and names layer, head and slot.
  void write(LayerId layer, Side side, std::span<const int64_t> slots, const float* rows, size_t row_stride,
             WorkShare share);
  // Pages of the plan that this layer has reserved tiles for but not encoded yet.
  void seal_items(LayerId layer, const BatchPlan& plan, std::vector<SealItem>* items) const;
  // Encodes one of them. Attention over the layer must wait until every item is sealed.
  void seal_page(const SealItem& item);
  void end_batch(const BatchPlan& plan);
  // The first error of write() since the last call; ok when none.
  Status take_error();

  // Exact content by index, for state save and load and for tests: [count][n_kv_heads * dim] binary16.
  // read_rows decodes tiles (transform undone); slots that hold nothing read as zeros.
  Status read_rows(LayerId layer, Side side, StreamId stream, int first_slot, int count, uint16_t* out) const;
  // What attention reads for a slot, in floats: [n_kv_heads * dim]; `quantized` picks the tile or the row.
  Status read_slot(LayerId layer, Side side, StreamId stream, int slot, bool quantized, float* out) const;
  Status write_rows(LayerId layer, Side side, StreamId stream, int first_slot, int count, const uint16_t* in);
  // Makes `to` a copy of `from` (every layer, both sides); tiles are copied as bytes. A copy that does not
  // fit beside what the other streams hold is refused (kPoolExhausted) and changes nothing.
  Status copy_stream(StreamId from, StreamId to);
  Status copy_stream_side(LayerId layer, Side side, StreamId from, StreamId to);
  void clear();

  const Options& options() const { return options_; }
  int n_layers() const { return static_cast<int>(options_.layers.size()); }
  int n_pages() const { return n_pages_; }
  const LayerScheme& layer(LayerId id) const { return options_.layers[id.value]; }
  const SidePage& side_page(LayerId layer, StreamId stream, int page, Side side) const;
  MemoryReport memory() const;
  const MemoryPool& pool() const { return pool_; }
  MemoryPool& pool() { return pool_; }
  ReadCounters& counters() { return counters_; }
  // Sink slots of a page as a bit mask.
  uint64_t sink_mask(StreamId stream, int page) const;
  int used_slots(StreamId stream) const;
  uint64_t sealed_tiles() const { return sealed_tiles_.load(std::memory_order_relaxed); }

 private:
  friend struct SlotCacheTestAccess;
  explicit SlotCache(Options options);
  struct BatchPage {
    int32_t stream = 0, page = 0;
    uint64_t slots = 0;
  };
  struct PageBefore {
    int32_t layer = 0, stream = 0, page = 0;
    Side side = Side::kKey;
    bool had_rows = false;
    uint64_t slots = 0, tile_mask = 0, row_mask = 0, kept_mask = 0;
  };
  // Whoever takes a page to change it unsettles it.
  SidePage& page_ref(int layer, int stream, int page, Side side);
  std::atomic<bool>& settled(int layer, int stream, int page) const;
  void settle(const BatchPlan& plan);
  Status reserve_rows(int layer, int stream, int page, Side side);
  Status reserve_tiles(int layer, int stream, int page, Side side);
  void free_tiles(int layer, SidePage* page, Side side);
  void free_rows(int layer, SidePage* page, Side side);
  void free_kept(int layer, SidePage* page, Side side);
  void forget_slot(int layer, int stream, int slot, Side side);
  void drop_rows(int layer, int stream, int page, Side side);
  void free_everything();
  size_t side_bytes(int layer, StreamId stream, Side side) const;
  Status check_copy(int first_layer, int end_layer, std::span<const Side> sides, StreamId from,
                    StreamId to) const;
  Status check_slots(std::span<const int64_t> slots) const;
  Status begin_page(int layer, const BatchPage& page, Side side);
  void keep_batch(const BatchPlan* plan);
  Status make_plan(std::span<const StreamQueries> queries, std::span<const int32_t> layers,
                   BatchPlan* plan) const;
  Status reserve_planned_tiles(const BatchPlan& plan);
  void free_unsealed_tiles(const BatchPlan& plan);
  void record_error(Status status);

  Options options_;
  int n_pages_ = 0;
  MemoryPool pool_;
  std::unique_ptr<class SlotTable> table_;
  PoolBuffer pages_;  // SidePage[n_layers][n_streams][n_pages][2], settled_
  // [n_layers][n_streams][n_pages] Pages in their tiles alone: a plan that seals or releases them has nothing
  // to do, so they are left out of plans. A long cache has thousands of them for each that changes.
  std::atomic<bool>* settled_ = nullptr;
  // Pages of the open batch as they were, until a plan succeeds. Tiles and kept rows that it emptied stay
  // allocated that long.
  std::vector<PageBefore> batch_before_;
  std::atomic<bool> batch_written_{false};
  ReadCounters counters_;
  std::atomic<uint64_t> sealed_tiles_{0};
  std::mutex error_mutex_;
  Status first_error_;
};

// Bytes of a cache of this shape, workspace included, when every stream holds `tokens` tokens of one
// sequence, appended in order in batches of any size: equals SlotCache::memory() to the byte once an
// AttentionWorkspace was created. Used by `kvant plan`.
MemoryReport plan_memory(const SlotCache::Options& options, int tokens);

}  // namespace kvant

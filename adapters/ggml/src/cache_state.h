// CacheState: what stands behind the cache tensors of one ggml buffer (one llama.cpp cache object on our
// device).
//
// llama.cpp's tensors are [n_kv_heads * head_dim, slots, streams] in address space that nothing touches:
// content lives in a SlotCache, made at the first graph that computes attention, because only its nodes tell
// the head sizes. Until then content that is set (a restored state) waits in the tensors' own memory.
//
// Layers that kvant cannot hold stay what they are for llama.cpp: plain f16 tensors, read by ggml's own
// operation.
//
// Thread rules: one caller at a time, like the llama.cpp context that owns the cache; report() from any
// thread.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ggml.h"
#include "kvant/calibration_file.h"
#include "kvant/ggml_backend.h"

namespace kvant::ggml {

enum class LayerKind : uint8_t {
  kUnseen,   // no attention over it has been seen: its head sizes are not known
  kManaged,  // content is in the SlotCache
  kPlain,    // stays llama.cpp's; `reason` says why
};

// `effective` of layers that are not in the SlotCache.
inline constexpr char kEngineLayer[] = "llama.cpp f16";

struct CacheLayer {
  int model_layer = -1;
  std::array<ggml_tensor*, 2> tensors{};  // by Side
  std::vector<bool> staged[2];            // rows set before the SlotCache exists, stream * slots + slot
  LayerKind kind = LayerKind::kUnseen;
  LayerShape shape;
  LayerId id;  // in the SlotCache, kManaged only
  std::string reason;
};

class CacheState;

// Behind `extra` of a base tensor.
struct CacheTensor {
  CacheState* state = nullptr;
  int layer = -1;  // index into layers()
  Side side = Side::kKey;
};

struct LayerSide {
  LayerId layer;
  Side side = Side::kKey;
};

// "cache_k_l12" gives side key and layer 12. Views carry other names and are not asked about.
bool parse_cache_name(const char* name, Side* side, int* model_layer);

class CacheState {
 public:
  explicit CacheState(Options options);
  ~CacheState();

  // Base tensors, when their memory is assigned. Refused: types other than f16.
  Status add_tensor(ggml_tensor* tensor, Side side, int model_layer);
  // Takes the head sizes from a flash-attention node over these tensors.
  void learn(const ggml_tensor* attention);
  // Makes the SlotCache for all layers learned so far, when there is none and there are any. `fingerprint`
  // tells which model it is for when no
  // norms were set; 0: not known.
  Status create_cache(int n_threads, uint64_t fingerprint);

  // The attention norms of the model, by which its calibration is found.
  void set_norms(const std::vector<const ggml_tensor*>& norms);

  bool created() const { return cache_ != nullptr; }
  SlotCache& cache() { return *cache_; }
  AttentionWorkspace& workspace() { return *workspace_; }
  const CacheLayer& layer(int index) const { return layers_[index]; }
  const Options& options() const { return options_; }

  // Slots of the batch that is being computed, in token order. The batch stays open over several graphs
  // (splits, evaluation callbacks) until other slots, or a layer and side for the second time, are written.
  Status open_batch(std::span<const int64_t> slots, std::span<const LayerSide> writes);
  std::span<const int64_t> batch_slots() const { return batch_slots_; }
  // The graph was refused: as if the batch had not been opened, unless a plan of it has succeeded.
  void cancel_batch();

  // Bytes of a base tensor by offset; any range.
  Status read(const CacheTensor& tensor, size_t offset, size_t bytes, void* out);
  Status write(const CacheTensor& tensor, size_t offset, size_t bytes, const void* in);
  // True when it was done: both are whole streams of the same base tensor.
  bool copy_stream(const CacheTensor& tensor, size_t from_offset, size_t to_offset, size_t bytes,
                   Status* status);
  void clear();

  // After a position shift or a restore that was refused, positions and keys differ: nothing runs until
  // clear().
  void set_broken(Status why) { broken_ = std::move(why); }
  const Status& broken() const { return broken_; }

  CacheReport report() const;
  void reset_counters();
  // The buffer goes away: keeps the report, gives the memory back.
  void close();

 private:
  bool in_cache(const CacheTensor& tensor) const;
  Status check_strict() const;
  Status make_layers(const Scheme& scheme, const std::optional<Calibration>& calibration,
                     std::vector<LayerScheme>* out);
  Status load_staged();
  template <typename Bytes, typename Whole, typename Part>
  Status for_rows(const ggml_tensor* base, size_t offset, size_t bytes, Bytes* data, Whole whole, Part part);

  Options options_;
  std::vector<CacheLayer> layers_;
  std::vector<std::unique_ptr<CacheTensor>> tensors_;
  std::vector<const ggml_tensor*> norms_;
  std::vector<int32_t> layer_ids_;  // of the managed layers: 0 .. n-1
  std::unique_ptr<SlotCache> cache_;
  std::unique_ptr<AttentionWorkspace> workspace_;
  std::vector<int64_t> batch_slots_;
  std::vector<bool> batch_written_;  // [layer][side]
  std::vector<uint16_t> row_;        // one row, for ranges that cut rows
  Status broken_;
  mutable std::mutex mutex_;  // creation and closing against report()
  bool closed_ = false;
  CacheReport last_report_;  // once closed
};

// All live caches, for report().
std::vector<CacheState*> live_caches_locked();
std::mutex& live_caches_mutex();

}  // namespace kvant::ggml

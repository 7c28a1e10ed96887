// SlotTable: in which order the slots of each stream were written, which are sinks, and, per batch, which
// pages are exact for which query. Bookkeeping only; shared by all layers of a cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvant/memory.h"
#include "kvant/slot_cache.h"

namespace kvant {

class SlotTable {
 public:
  SlotTable(int n_pages, int n_streams, MemoryPool* pool);
  static size_t bytes(int n_pages, int n_streams);
  bool ok() const { return static_cast<bool>(memory_); }

  // The slot now holds the newest token of its stream.
  void write(int stream, int slot);
  // As write for every slot (stream * n_slots + slot, at most n_slots of one stream); undo_batch() takes the
  // writes since the last keep_batch() back, newest first.
  void write_batch(std::span<const int64_t> slots);
  void undo_batch();
  void keep_batch() { undo_.clear(); }
  // As write, for content that comes without a query (a restored state): whether it is a sink is decided by
  // the next queries that see it.
  void adopt(int stream, int slot);
  // Slots first .. first + count - 1 are the newest `count` tokens, in this order.
  bool is_newest_run(int stream, int first, int count) const;
  void clear();
  void copy_stream(int from, int to);

  uint64_t filled(int stream, int page) const { return streams_[stream].filled[page]; }
  uint64_t sinks(int stream, int page) const { return streams_[stream].sinks[page]; }
  int used_slots(int stream) const;

  // Fills all of `out`, changes nothing. `window`, `sinks`: the scheme's W and S.
  void plan(const StreamQueries& queries, int window, int sinks, StreamPlan* out) const;
  // Marks the sinks that the plan found.
  void mark_sinks(const StreamPlan& plan);

 private:
  // Stamps are consecutive: order[stamp - 1] is the slot that got that stamp, valid while the slot still
  // has it. Never written: stamp 0.
  struct Stream {
    uint32_t* stamp = nullptr;    // [n_slots]
    int32_t* order = nullptr;     // [2 * n_slots]
    uint64_t* filled = nullptr;   // [n_pages]
    uint64_t* sinks = nullptr;    // [n_pages]
    uint64_t* adopted = nullptr;  // [n_pages] slots of adopt() that no query has seen yet
    uint32_t newest = 0;
    int32_t last_slot = -1;
    bool ascending = true;  // slots were written in ascending order, each once
  };
  // A stream before one write.
  struct Undo {
    int32_t stream = 0, slot = 0, last_slot = 0;
    uint32_t stamp = 0;
    bool ascending = false, filled = false, sink = false, adopted = false;
  };
  void compact(Stream* s);
  void read_masks(const Stream& s, const StreamQueries& queries, StreamPlan* out) const;
  void find_sinks(const Stream& s, const StreamQueries& queries, int sinks, StreamPlan* out) const;
  void find_adopted_sinks(const Stream& s, int query, int sinks, StreamPlan* out) const;
  void find_windows(const Stream& s, int window, StreamPlan* out) const;
  void choose_pages(const Stream& s, const StreamQueries& queries, StreamPlan* out) const;

  int n_pages_;
  int n_slots_;
  PoolBuffer memory_;
  std::vector<Stream> streams_;
  std::vector<Undo> undo_;
};

}  // namespace kvant

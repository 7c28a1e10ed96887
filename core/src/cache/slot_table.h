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
  // As write, for content that comes without a query (a restored state): whether it is a sink is decided by
  // the next query that sees it.
  void adopt(int stream, int slot);
  // Slots first .. first + count - 1 are the newest `count` tokens, in this order.
  bool is_newest_run(int stream, int first, int count) const;
  void clear();
  void copy_stream(int from, int to);

  uint64_t filled(int stream, int page) const { return streams_[stream].filled[page]; }
  uint64_t sinks(int stream, int page) const { return streams_[stream].sinks[page]; }
  int used_slots(int stream) const;

  // Fills visible, window, seal and release of `out`; marks sinks. `window`, `sinks`: the scheme's W and S.
  void plan(const StreamQueries& queries, int window, int sinks, StreamPlan* out);

 private:
  // Stamps are consecutive: order[stamp - 1] is the slot that got that stamp, valid while the slot still
  // has it. Never written: stamp 0.
  struct Stream {
    uint32_t* stamp = nullptr;   // [n_slots]
    int32_t* order = nullptr;    // [2 * n_slots]
    uint64_t* filled = nullptr;  // [n_pages]
    uint64_t* sinks = nullptr;   // [n_pages]
    uint32_t newest = 0;
    int32_t last_slot = -1;
    bool ascending = true;       // slots were written in ascending order, each once
    bool adopted = false;        // adopt() was called since the last plan
  };
  void compact(Stream* s);
  void read_masks(const Stream& s, const StreamQueries& queries, StreamPlan* out) const;
  void mark_sinks(Stream* s, const StreamQueries& queries, int sinks, const StreamPlan& plan) const;
  void mark_adopted_sinks(Stream* s, int sinks, const StreamPlan& plan) const;
  void find_windows(const Stream& s, int window, StreamPlan* out) const;
  void choose_pages(const Stream& s, const StreamQueries& queries, StreamPlan* out) const;

  int n_pages_;
  int n_slots_;
  PoolBuffer memory_;
  std::vector<Stream> streams_;
};

}  // namespace kvant

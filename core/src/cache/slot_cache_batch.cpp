// The batch of a SlotCache: stamps, plan, rows, sealing, release.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cache/side_page.h"
#include "cache/slot_table.h"
#include "kvant/half.h"
#include "kvant/slot_cache.h"

namespace kvant {

Status SlotCache::check_slots(std::span<const int64_t> slots) const {
  const int64_t per_stream = static_cast<int64_t>(n_pages_) * kPageTokens;
  std::vector<int64_t> counts(options_.n_streams, 0);
  for (const int64_t slot : slots) {
    if (slot < 0 || slot >= per_stream * options_.n_streams) {
      return {Code::kOutOfRange, "slot " + std::to_string(slot) + ": the cache has " +
                                     std::to_string(per_stream * options_.n_streams) + " slots"};
    }
    const int64_t stream = slot / per_stream;
    if (++counts[stream] > per_stream) {
      return {Code::kInvalidArgument, "a batch with more than " + std::to_string(per_stream) +
                                          " slots of stream " + std::to_string(stream) + ": it has no more"};
    }
  }
  return {};
}

Status SlotCache::begin_batch(std::span<const int64_t> slots, std::span<const int32_t> layers) {
  keep_batch(nullptr);
  KVANT_RETURN_IF_ERROR(check_slots(slots));
  std::vector<BatchPage> pages;
  for (const int64_t slot : slots) {
    const SlotPlace place = place_of(slot, n_pages_);
    const BatchPage one = {.stream = place.stream, .page = place.page, .slots = uint64_t{1} << place.t};
    const auto same = [&](const BatchPage& p) { return p.stream == one.stream && p.page == one.page; };
    // Most batches are runs of slots.
    auto at = !pages.empty() && same(pages.back()) ? pages.end() - 1
                                                   : std::find_if(pages.begin(), pages.end(), same);
    if (at == pages.end()) {
      pages.push_back(one);
    } else {
      at->slots |= one.slots;
    }
  }
  for (const int32_t layer : layers) {
    for (const BatchPage& page : pages) {
      for (const Side side : kSides) {
        Status status = begin_page(layer, page, side);
        if (status.ok()) continue;
        cancel_batch();
        return status;
      }
    }
  }
  table_->write_batch(slots);
  return {};
}

// The batch's slots of one page hold nothing from now on.
Status SlotCache::begin_page(int layer, const BatchPage& page, Side side) {
  SidePage& sp = page_ref(layer, page.stream, page.page, side);
  const bool had_rows = sp.rows != nullptr;
  KVANT_RETURN_IF_ERROR(reserve_rows(layer, page.stream, page.page, side));
  batch_before_.push_back({.layer = layer,
                           .stream = page.stream,
                           .page = page.page,
                           .side = side,
                           .had_rows = had_rows,
                           .slots = page.slots,
                           .tile_mask = sp.tile_mask,
                           .row_mask = sp.row_mask,
                           .kept_mask = sp.kept_mask});
  sp.row_mask &= ~page.slots;
  sp.tile_mask &= ~page.slots;
  sp.kept_mask &= ~page.slots;
  return {};
}

// The batch's stamps and pages stay; what they emptied is freed, except tiles that `plan` seals again.
void SlotCache::keep_batch(const BatchPlan* plan) {
  const auto sealed_again = [&](const PageBefore& b) {
    if (plan == nullptr ||
        std::find(plan->layers.begin(), plan->layers.end(), b.layer) == plan->layers.end() ||
        !side_quantized(options_.layers[b.layer], b.side))
      return false;
    return std::any_of(plan->streams.begin(), plan->streams.end(), [&](const StreamPlan& s) {
      return s.stream.value == b.stream && std::binary_search(s.seal.begin(), s.seal.end(), b.page);
    });
  };
  for (const PageBefore& b : batch_before_) {
    SidePage& sp = page_ref(b.layer, b.stream, b.page, b.side);
    if (sp.tiles != nullptr && sp.tile_mask == 0 && !sealed_again(b)) free_tiles(b.layer, &sp, b.side);
    if (sp.kept != nullptr && sp.kept_mask == 0) free_kept(b.layer, &sp, b.side);
  }
  batch_before_.clear();
  batch_written_.store(false, std::memory_order_relaxed);
  table_->keep_batch();
}

void SlotCache::cancel_batch() {
  const bool written = batch_written_.load(std::memory_order_relaxed);
  for (auto at = batch_before_.rbegin(); at != batch_before_.rend(); ++at) {
    const PageBefore& b = *at;
    SidePage& sp = page_ref(b.layer, b.stream, b.page, b.side);
    sp.tile_mask = b.tile_mask;
    sp.kept_mask = b.kept_mask;
    sp.row_mask = written ? b.row_mask & ~b.slots : b.row_mask;
    if (!b.had_rows) free_rows(b.layer, &sp, b.side);
  }
  batch_before_.clear();
  batch_written_.store(false, std::memory_order_relaxed);
  table_->undo_batch();
}

Status SlotCache::plan(std::span<const StreamQueries> queries, std::span<const int32_t> layers,
                       BatchPlan* plan) {
  Status status = make_plan(queries, layers, plan);
  if (status.ok()) status = reserve_planned_tiles(*plan);
  if (!status.ok()) {
    cancel_batch();
    free_unsealed_tiles(*plan);
    plan->streams.clear();
    return status;
  }
  keep_batch(plan);
  for (const StreamPlan& stream : plan->streams) table_->mark_sinks(stream);
  return {};
}

Status SlotCache::make_plan(std::span<const StreamQueries> queries, std::span<const int32_t> layers,
                            BatchPlan* plan) const {
  plan->layers.assign(layers.begin(), layers.end());
  plan->streams.resize(queries.size());
  for (StreamPlan& stream : plan->streams) stream.seal.clear();
  for (size_t i = 0; i < queries.size(); ++i) {
    const StreamQueries& q = queries[i];
    if (q.stream.value < 0 || q.stream.value >= options_.n_streams || q.n_slots < 0 ||
        q.n_slots > n_pages_ * kPageTokens) {
      return {Code::kOutOfRange, "stream " + std::to_string(q.stream.value) + " with " +
                                     std::to_string(q.n_slots) + " slots: the cache has " +
                                     std::to_string(options_.n_streams) + " streams of " +
                                     std::to_string(n_pages_ * kPageTokens) + " slots"};
    }
    StreamPlan& stream = plan->streams[i];
    table_->plan(q, options_.window, options_.sinks, &stream);
    const auto all_settled = [&](int32_t page) {
      return std::all_of(layers.begin(), layers.end(), [&](int32_t layer) {
        return settled(layer, q.stream.value, page).load(std::memory_order_relaxed);
      });
    };
    std::erase_if(stream.seal, all_settled);
    std::erase_if(stream.release, all_settled);
  }
  return {};
}

Status SlotCache::reserve_planned_tiles(const BatchPlan& plan) {
  for (const StreamPlan& stream : plan.streams) {
    for (const int32_t layer : plan.layers) {
      for (const Side side : kSides) {
        if (!side_quantized(options_.layers[layer], side)) continue;
        for (const int32_t page : stream.seal) {
          KVANT_RETURN_IF_ERROR(reserve_tiles(layer, stream.stream.value, page, side));
        }
      }
    }
  }
  return {};
}

void SlotCache::free_unsealed_tiles(const BatchPlan& plan) {
  for (const StreamPlan& stream : plan.streams) {
    for (const int32_t layer : plan.layers) {
      for (const int32_t page : stream.seal) {
        for (const Side side : kSides) {
          SidePage& sp = page_ref(layer, stream.stream.value, page, side);
          if (sp.tiles != nullptr && sp.tile_mask == 0) free_tiles(layer, &sp, side);
        }
      }
    }
  }
}

void SlotCache::record_error(Status status) {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  if (first_error_.ok()) first_error_ = std::move(status);
}

Status SlotCache::take_error() {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return std::exchange(first_error_, Status());
}

void SlotCache::write(LayerId layer, Side side, std::span<const int64_t> slots, const float* rows,
                      size_t row_stride, WorkShare share) {
  batch_written_.store(true, std::memory_order_relaxed);
  const LayerShape& shape = options_.layers[layer.value].shape;
  const int dim = dim_of(shape, side);
  // Whole pages per thread: two threads never touch the masks of one page.
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] / kPageTokens % share.nth != share.ith) continue;
    const SlotPlace place = place_of(slots[i], n_pages_);
    const int t = place.t;
    SidePage& sp = page_ref(layer.value, place.stream, place.page, side);
    if (sp.rows == nullptr) {
      record_error({Code::kInternal, "write without begin_batch"});
      continue;
    }
    uint16_t bad = 0;
    int bad_head = -1;
    for (int head = 0; head < shape.n_kv_heads; ++head) {
      const float* x = rows + i * row_stride + static_cast<size_t>(head) * dim;
      uint16_t* to = sp.rows + row_index(head, t, kPageTokens, dim);
      uint16_t any = 0;
      for (int c = 0; c < dim; ++c) {
        to[c] = float_to_half(x[c]);
        any |= static_cast<uint16_t>((to[c] & kHalfExponent) == kHalfExponent);
      }
      if (any != 0 && bad_head < 0) bad_head = head;
      bad |= any;
    }
    if (bad != 0) {
      for (int head = 0; head < shape.n_kv_heads; ++head) {
        std::memset(sp.rows + row_index(head, t, kPageTokens, dim), 0, dim * sizeof(uint16_t));
      }
      record_error({Code::kBadValue, std::string("NaN or Inf in the ") + side_name(side) + " of layer " +
                                         std::to_string(layer.value) + ", KV head " +
                                         std::to_string(bad_head) + ", slot " + std::to_string(slots[i])});
      continue;
    }
    sp.row_mask |= uint64_t{1} << t;
  }
}

void SlotCache::seal_items(LayerId layer, const BatchPlan& plan, std::vector<SealItem>* items) const {
  items->clear();
  if (options_.layers[layer.value].exact) return;
  for (const StreamPlan& stream : plan.streams) {
    for (const int32_t page : stream.seal) {
      for (const Side side : kSides) {
        const SidePage& sp = side_page(layer, stream.stream, page, side);
        // No rows: another side or layer was restored without this one.
        if (sp.tiles != nullptr && sp.rows != nullptr && sp.tile_mask == 0) {
          items->push_back({layer.value, stream.stream.value, page, side});
        }
      }
    }
  }
}

void SlotCache::seal_page(const SealItem& item) {
  const LayerScheme& layer = options_.layers[item.layer];
  SidePage& sp = page_ref(item.layer, item.stream, item.page, item.side);
  const int dim = dim_of(layer.shape, item.side);
  // Patches that were written while older slots stayed in `kept` are not in the rows: they stay out.
  const uint64_t live = sp.row_mask;
  const uint64_t sinks = table_->sinks(item.stream, item.page);
  alignas(64) float x[kPageTokens * kMaxHeadDim];
  alignas(64) float y[kPageTokens * kMaxHeadDim];
  std::byte* tile = sp.tiles;
  for (int head = 0; head < layer.shape.n_kv_heads; ++head) {
    const HeadScheme& scheme = layer.heads[head];
    const Format& format = format_of(scheme, item.side);
    const uint16_t* rows = sp.rows + row_index(head, 0, kPageTokens, dim);
    for (int i = 0; i < kPageTokens * dim; ++i) x[i] = half_to_float(rows[i]);
    transform_of(scheme, item.side).apply(x, y, kPageTokens);
    // A page of nothing but sinks still needs a tile: their statistics are all there is.
    const uint64_t counted = (live & ~sinks) != 0 ? live & ~sinks : live;
    const float step = item.side == Side::kKey ? scheme.key_static_scale : scheme.value_static_scale;
    format.encode({.x = y, .live = counted, .static_scale = step}, tile);
    tile += format.tile_bytes();
  }
  sp.tile_mask = live;
  sealed_tiles_.fetch_add(static_cast<uint64_t>(layer.shape.n_kv_heads), std::memory_order_relaxed);
}

void SlotCache::end_batch(const BatchPlan& plan) {
  free_unsealed_tiles(plan);
  for (const StreamPlan& stream : plan.streams) {
    for (const int32_t layer : plan.layers) {
      for (const Side side : kSides) {
        for (const int32_t page : stream.release) {
          const SidePage& sp = side_page(LayerId{layer}, stream.stream, page, side);
          if (sp.tile_mask != 0) drop_rows(layer, stream.stream.value, page, side);
        }
      }
    }
  }
  settle(plan);
}

void SlotCache::settle(const BatchPlan& plan) {
  for (const StreamPlan& stream : plan.streams) {
    for (const int32_t layer : plan.layers) {
      const auto done = [&](int32_t page, Side side) {
        const SidePage& sp = side_page(LayerId{layer}, stream.stream, page, side);
        return !side_quantized(options_.layers[layer], side) || (sp.tile_mask != 0 && sp.rows == nullptr);
      };
      for (const int32_t page : stream.seal) {
        settled(layer, stream.stream.value, page)
            .store(done(page, Side::kKey) && done(page, Side::kValue), std::memory_order_relaxed);
      }
    }
  }
}

}  // namespace kvant

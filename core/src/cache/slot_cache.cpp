#include "kvant/slot_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "cache/side_page.h"
#include "cache/slot_table.h"
#include "kvant/attention.h"
#include "kvant/half.h"

namespace kvant {
namespace {

// Of SidePage[n_layers][n_streams][n_pages][2] and settled[n_layers][n_streams][n_pages].
size_t page_count(const SlotCache::Options& options, int n_pages) {
  return options.layers.size() * static_cast<size_t>(options.n_streams) * static_cast<size_t>(n_pages);
}

size_t page_table_bytes(const SlotCache::Options& options, int n_pages) {
  return align_up(page_count(options, n_pages) * (2 * sizeof(SidePage) + sizeof(std::atomic<bool>)), 64);
}

Status check_run(int first_slot, int count, int n_pages) {
  const int slots = n_pages * kPageTokens;
  if (first_slot >= 0 && count >= 0 && first_slot <= slots && count <= slots - first_slot) return {};
  return {Code::kOutOfRange, std::to_string(count) + " slots from " + std::to_string(first_slot) +
                                 ": a stream has " + std::to_string(slots)};
}

// nullptr when there is no memory for it.
void* copy_of(MemoryPool* pool, const void* from, size_t bytes, Use use) {
  void* to = pool->allocate(bytes, use);
  if (to != nullptr) std::memcpy(to, from, bytes);
  return to;
}

}  // namespace

SlotCache::SlotCache(Options options) : options_(std::move(options)), pool_(options_.memory) {}

Result<std::unique_ptr<SlotCache>> SlotCache::create(Options options) {
  if (options.layers.empty()) return Status(Code::kInvalidArgument, "layers: at least one layer is needed");
  if (options.n_slots < 1) return Status(Code::kInvalidArgument, "n_slots: at least 1 is needed");
  if (options.n_slots > kMaxSlots) {
    return Status(Code::kUnsupported, "n_slots: " + std::to_string(options.n_slots) + " is more than " +
                                          std::to_string(kMaxSlots) + ", the most that a stream can have");
  }
  if (options.n_streams < 1) return Status(Code::kInvalidArgument, "n_streams: at least 1 is needed");
  if (options.window < 0 || options.sinks < 0) {
    return Status(Code::kInvalidArgument, "window and sinks: 0 is the least");
  }
  std::unique_ptr<SlotCache> cache(new SlotCache(std::move(options)));
  SlotCache& c = *cache;
  c.n_pages_ = pages_for(c.options_.n_slots);
  c.table_ = std::make_unique<SlotTable>(c.n_pages_, c.options_.n_streams, &c.pool_);
  c.pages_ = PoolBuffer(&c.pool_, page_table_bytes(c.options_, c.n_pages_), Use::kTables);
  // Before any return: the destructor looks at every page.
  const size_t count = c.pages_ ? page_count(c.options_, c.n_pages_) : 0;
  auto* side_pages = reinterpret_cast<SidePage*>(c.pages_.data());
  for (size_t i = 0; i < 2 * count; ++i) new (side_pages + i) SidePage();
  c.settled_ = reinterpret_cast<std::atomic<bool>*>(side_pages + 2 * count);
  for (size_t i = 0; i < count; ++i) new (c.settled_ + i) std::atomic<bool>(false);
  if (!c.table_->ok() || !c.pages_) {
    return Status(Code::kPoolExhausted, "the tables of the cache do not fit in the memory limit of " +
                                            std::to_string(c.pool_.limit_bytes()) + " bytes");
  }
  return cache;
}

SlotCache::~SlotCache() { free_everything(); }

SidePage& SlotCache::page_ref(int layer, int stream, int page, Side side) {
  settled(layer, stream, page).store(false, std::memory_order_relaxed);
  return const_cast<SidePage&>(side_page(LayerId{layer}, StreamId{stream}, page, side));
}

const SidePage& SlotCache::side_page(LayerId layer, StreamId stream, int page, Side side) const {
  return reinterpret_cast<const SidePage*>(
      pages_.data())[side_page_index(layer.value, stream.value, page, side, options_.n_streams, n_pages_)];
}

std::atomic<bool>& SlotCache::settled(int layer, int stream, int page) const {
  return settled_[side_page_index(layer, stream, page, Side::kKey, options_.n_streams, n_pages_) / 2];
}

uint64_t SlotCache::sink_mask(StreamId stream, int page) const { return table_->sinks(stream.value, page); }

int SlotCache::used_slots(StreamId stream) const { return table_->used_slots(stream.value); }

// ---- memory of one page

Status SlotCache::reserve_rows(int layer, int stream, int page, Side side) {
  SidePage& sp = page_ref(layer, stream, page, side);
  if (sp.rows != nullptr) return {};
  const size_t bytes = row_page_bytes(options_.layers[layer].shape, side);
  sp.rows = static_cast<uint16_t*>(pool_.allocate(bytes, Use::kExactRows));
  if (sp.rows == nullptr) {
    return {Code::kPoolExhausted, "layer " + std::to_string(layer) + ": " + std::to_string(bytes) +
                                      " bytes of exact rows do not fit in the memory limit of " +
                                      std::to_string(pool_.limit_bytes()) + " bytes"};
  }
  // Rows that hold nothing are hidden, but products with them must stay finite.
  std::memset(sp.rows, 0, bytes);
  sp.row_mask = 0;
  return {};
}

Status SlotCache::reserve_tiles(int layer, int stream, int page, Side side) {
  SidePage& sp = page_ref(layer, stream, page, side);
  if (sp.tiles != nullptr) return {};
  const size_t bytes = tiles_bytes(options_.layers[layer], side);
  sp.tiles = static_cast<std::byte*>(pool_.allocate(bytes, Use::kTiles));
  if (sp.tiles == nullptr) {
    return {Code::kPoolExhausted, "layer " + std::to_string(layer) + ": " + std::to_string(bytes) +
                                      " bytes of tiles do not fit in the memory limit of " +
                                      std::to_string(pool_.limit_bytes()) + " bytes"};
  }
  sp.tile_mask = 0;
  return {};
}

void SlotCache::free_tiles(int layer, SidePage* page, Side side) {
  if (page->tiles != nullptr)
    pool_.release(page->tiles, tiles_bytes(options_.layers[layer], side), Use::kTiles);
  page->tiles = nullptr;
  page->tile_mask = 0;
}

void SlotCache::free_rows(int layer, SidePage* page, Side side) {
  if (page->rows != nullptr) {
    pool_.release(page->rows, row_page_bytes(options_.layers[layer].shape, side), Use::kExactRows);
  }
  page->rows = nullptr;
  page->row_mask = 0;
}

void SlotCache::free_kept(int layer, SidePage* page, Side side) {
  if (page->kept != nullptr) {
    pool_.release(page->kept,
                  kept_bytes(options_.layers[layer].shape, side, std::popcount(page->kept_layout)),
                  Use::kExactRows);
  }
  page->kept = nullptr;
  page->kept_mask = page->kept_layout = 0;
}

void SlotCache::free_everything() {
  if (!pages_) return;
  for (int layer = 0; layer < n_layers(); ++layer) {
    for (int stream = 0; stream < options_.n_streams; ++stream) {
      for (int p = 0; p < n_pages_; ++p) {
        for (const Side side : kSides) {
          SidePage& sp = page_ref(layer, stream, p, side);
          free_tiles(layer, &sp, side);
          free_rows(layer, &sp, side);
          free_kept(layer, &sp, side);
        }
      }
    }
  }
}

void SlotCache::clear() {
  keep_batch(nullptr);
  free_everything();
  table_->clear();
  (void)take_error();
}

void SlotCache::forget_slot(int layer, int stream, int slot, Side side) {
  SidePage& sp = page_ref(layer, stream, slot / kPageTokens, side);
  const uint64_t keep = ~(uint64_t{1} << (slot % kPageTokens));
  sp.row_mask &= keep;
  sp.tile_mask &= keep;
  sp.kept_mask &= keep;
  if (sp.tiles != nullptr && sp.tile_mask == 0) free_tiles(layer, &sp, side);
  if (sp.kept != nullptr && sp.kept_mask == 0) free_kept(layer, &sp, side);
}

// Keeps the sinks of a sealed page and lets go of its other rows. Rows of slots that are not in the tiles
// (patches) hold the page's rows back.
void SlotCache::drop_rows(int layer, int stream, int page, Side side) {
  SidePage& sp = page_ref(layer, stream, page, side);
  if (sp.rows == nullptr || (sp.row_mask & ~sp.tile_mask) != 0) return;
  const uint64_t sinks = table_->sinks(stream, page) & sp.row_mask;
  if (sinks != 0) {
    const LayerShape& shape = options_.layers[layer].shape;
    const int dim = dim_of(shape, side);
    const int n = std::popcount(sinks);
    auto* kept = static_cast<uint16_t*>(pool_.allocate(kept_bytes(shape, side, n), Use::kExactRows));
    if (kept == nullptr) return;
    for (int head = 0; head < shape.n_kv_heads; ++head) {
      for (int t = 0; t < kPageTokens; ++t) {
        if (((sinks >> t) & 1) == 0) continue;
        std::memcpy(kept + row_index(head, kept_row(sinks, t), n, dim),
                    sp.rows + row_index(head, t, kPageTokens, dim), dim * sizeof(uint16_t));
      }
    }
    free_kept(layer, &sp, side);
    sp.kept = kept;
    sp.kept_mask = sp.kept_layout = sinks;
  }
  free_rows(layer, &sp, side);
}

// ---- exact content by index

Status SlotCache::read_slot(LayerId layer, Side side, StreamId stream, int slot, bool quantized,
                            float* out) const {
  const LayerScheme& scheme = options_.layers[layer.value];
  const int dim = dim_of(scheme.shape, side);
  const SidePage& sp = side_page(layer, stream, slot / kPageTokens, side);
  const int t = slot % kPageTokens;
  const bool in_tile = (sp.tile_mask >> t) & 1;
  const bool in_rows = (sp.row_mask >> t) & 1;
  const bool in_kept = (sp.kept_mask >> t) & 1;
  const size_t width = static_cast<size_t>(scheme.shape.n_kv_heads) * dim;
  if (quantized ? !in_tile : !(in_tile || in_rows || in_kept)) {
    std::fill_n(out, width, 0.0f);
    return {Code::kOutOfRange,
            "slot " + std::to_string(slot) + " of stream " + std::to_string(stream.value) + " holds nothing"};
  }
  const bool from_tile = quantized || !(in_rows || in_kept);
  alignas(64) float y[kPageTokens * kMaxHeadDim];
  const std::byte* tile = sp.tiles;
  const int kept_rows = std::popcount(sp.kept_layout);
  for (int head = 0; head < scheme.shape.n_kv_heads; ++head) {
    float* to = out + static_cast<size_t>(head) * dim;
    if (from_tile) {
      const Format& format = format_of(scheme.heads[head], side);
      format.decode(tile, y);
      transform_of(scheme.heads[head], side).invert(y + static_cast<size_t>(t) * dim, to, 1);
      tile += format.tile_bytes();
      continue;
    }
    const uint16_t* row = in_rows ? sp.rows + row_index(head, t, kPageTokens, dim)
                                  : sp.kept + row_index(head, kept_row(sp.kept_layout, t), kept_rows, dim);
    for (int c = 0; c < dim; ++c) to[c] = half_to_float(row[c]);
  }
  return {};
}

Status SlotCache::read_rows(LayerId layer, Side side, StreamId stream, int first_slot, int count,
                            uint16_t* out) const {
  KVANT_RETURN_IF_ERROR(check_run(first_slot, count, n_pages_));
  const LayerScheme& scheme = options_.layers[layer.value];
  const int dim = dim_of(scheme.shape, side);
  const int n_heads = scheme.shape.n_kv_heads;
  std::vector<float> tiles;
  int decoded_page = -1;
  for (int i = 0; i < count; ++i) {
    const int page = (first_slot + i) / kPageTokens;
    const int t = (first_slot + i) % kPageTokens;
    const SidePage& sp = side_page(layer, stream, page, side);
    uint16_t* to = out + static_cast<size_t>(i) * n_heads * dim;
    const int kept_rows = std::popcount(sp.kept_layout);
    if ((((sp.row_mask | sp.kept_mask) >> t) & 1) == 0 && ((sp.tile_mask >> t) & 1) != 0) {
      if (decoded_page != page) {
        tiles.resize(static_cast<size_t>(n_heads) * kPageTokens * dim * 2);
        const std::byte* tile = sp.tiles;
        for (int head = 0; head < n_heads; ++head) {
          float* x = tiles.data() + static_cast<size_t>(head) * kPageTokens * dim;
          float* y = x + static_cast<size_t>(n_heads) * kPageTokens * dim;
          const Format& format = format_of(scheme.heads[head], side);
          format.decode(tile, y);
          transform_of(scheme.heads[head], side).invert(y, x, kPageTokens);
          tile += format.tile_bytes();
        }
        decoded_page = page;
      }
      for (int head = 0; head < n_heads; ++head) {
        const float* x = tiles.data() + row_index(head, t, kPageTokens, dim);
        for (int c = 0; c < dim; ++c) to[head * dim + c] = float_to_half(x[c]);
      }
      continue;
    }
    for (int head = 0; head < n_heads; ++head) {
      const uint16_t* row = nullptr;
      if ((sp.row_mask >> t) & 1) {
        row = sp.rows + row_index(head, t, kPageTokens, dim);
      } else if ((sp.kept_mask >> t) & 1) {
        row = sp.kept + row_index(head, kept_row(sp.kept_layout, t), kept_rows, dim);
      }
      if (row != nullptr) {
        std::memcpy(to + head * dim, row, dim * sizeof(uint16_t));
      } else {
        std::memset(to + head * dim, 0, dim * sizeof(uint16_t));
      }
    }
  }
  return {};
}

Status SlotCache::write_rows(LayerId layer, Side side, StreamId stream, int first_slot, int count,
                             const uint16_t* in) {
  KVANT_RETURN_IF_ERROR(check_run(first_slot, count, n_pages_));
  const LayerShape& shape = options_.layers[layer.value].shape;
  const int dim = dim_of(shape, side);
  const int width = shape.n_kv_heads * dim;
  for (int64_t i = 0; i < static_cast<int64_t>(count) * width; ++i) {
    if ((in[i] & kHalfExponent) == kHalfExponent) {
      return {Code::kBadValue, std::string("NaN or Inf in the ") + side_name(side) + " of layer " +
                                   std::to_string(layer.value) + ", slot " +
                                   std::to_string(first_slot + i / width)};
    }
  }
  keep_batch(nullptr);
  std::vector<int> reserved;
  for (int page = first_slot / kPageTokens; page * kPageTokens < first_slot + count; ++page) {
    if (side_page(layer, stream, page, side).rows != nullptr) continue;
    Status status = reserve_rows(layer.value, stream.value, page, side);
    if (!status.ok()) {
      for (const int p : reserved)
        free_rows(layer.value, &page_ref(layer.value, stream.value, p, side), side);
      return status;
    }
    reserved.push_back(page);
  }
  const bool newest_run = table_->is_newest_run(stream.value, first_slot, count);
  for (int i = 0; i < count; ++i) {
    const int slot = first_slot + i;
    if (!newest_run) table_->adopt(stream.value, slot);
    forget_slot(layer.value, stream.value, slot, side);
    SidePage& sp = page_ref(layer.value, stream.value, slot / kPageTokens, side);
    for (int head = 0; head < shape.n_kv_heads; ++head) {
      std::memcpy(sp.rows + row_index(head, slot % kPageTokens, kPageTokens, dim),
                  in + static_cast<size_t>(i) * width + static_cast<size_t>(head) * dim,
                  dim * sizeof(uint16_t));
    }
    sp.row_mask |= uint64_t{1} << (slot % kPageTokens);
  }
  return {};
}

size_t SlotCache::side_bytes(int layer, StreamId stream, Side side) const {
  const LayerScheme& scheme = options_.layers[layer];
  size_t bytes = 0;
  for (int page = 0; page < n_pages_; ++page) {
    const SidePage& sp = side_page(LayerId{layer}, stream, page, side);
    if (sp.tiles != nullptr) bytes += tiles_bytes(scheme, side);
    if (sp.rows != nullptr) bytes += row_page_bytes(scheme.shape, side);
    if (sp.kept != nullptr) bytes += kept_bytes(scheme.shape, side, std::popcount(sp.kept_layout));
  }
  return bytes;
}

Status SlotCache::check_copy(int first_layer, int end_layer, std::span<const Side> sides, StreamId from,
                             StreamId to) const {
  if (from.value < 0 || to.value < 0 || from.value >= options_.n_streams || to.value >= options_.n_streams) {
    return {Code::kOutOfRange, "stream " + std::to_string(from.value) + " to " + std::to_string(to.value) +
                                   ": the cache has " + std::to_string(options_.n_streams)};
  }
  size_t total = pool_.total_bytes();
  for (int layer = first_layer; layer < end_layer; ++layer) {
    for (const Side side : sides) total += side_bytes(layer, from, side) - side_bytes(layer, to, side);
  }
  if (total <= pool_.limit_bytes()) return {};
  return {Code::kPoolExhausted, "copy of stream " + std::to_string(from.value) + " to " +
                                    std::to_string(to.value) + ": " + std::to_string(total) +
                                    " bytes do not fit in the memory limit of " +
                                    std::to_string(pool_.limit_bytes()) + " bytes"};
}

Status SlotCache::copy_stream_side(LayerId layer, Side side, StreamId from, StreamId to) {
  keep_batch(nullptr);
  KVANT_RETURN_IF_ERROR(check_copy(layer.value, layer.value + 1, {&side, 1}, from, to));
  if (from == to) return {};
  const LayerScheme& scheme = options_.layers[layer.value];
  Status no_memory = {Code::kPoolExhausted, "copy of a stream: the system has no memory"};
  table_->copy_stream(from.value, to.value);
  for (int page = 0; page < n_pages_; ++page) {
    const SidePage& source = side_page(layer, from, page, side);
    SidePage& target = page_ref(layer.value, to.value, page, side);
    free_tiles(layer.value, &target, side);
    free_rows(layer.value, &target, side);
    free_kept(layer.value, &target, side);
    if (source.tiles != nullptr) {
      const size_t bytes = tiles_bytes(scheme, side);
      target.tiles = static_cast<std::byte*>(copy_of(&pool_, source.tiles, bytes, Use::kTiles));
      if (target.tiles == nullptr) return no_memory;
      target.tile_mask = source.tile_mask;
    }
    if (source.rows != nullptr) {
      const size_t bytes = row_page_bytes(scheme.shape, side);
      target.rows = static_cast<uint16_t*>(copy_of(&pool_, source.rows, bytes, Use::kExactRows));
      if (target.rows == nullptr) return no_memory;
      target.row_mask = source.row_mask;
    }
    if (source.kept != nullptr) {
      const size_t bytes = kept_bytes(scheme.shape, side, std::popcount(source.kept_layout));
      target.kept = static_cast<uint16_t*>(copy_of(&pool_, source.kept, bytes, Use::kExactRows));
      if (target.kept == nullptr) return no_memory;
      target.kept_mask = source.kept_mask;
      target.kept_layout = source.kept_layout;
    }
  }
  return {};
}

Status SlotCache::copy_stream(StreamId from, StreamId to) {
  keep_batch(nullptr);
  KVANT_RETURN_IF_ERROR(check_copy(0, n_layers(), kSides, from, to));
  for (int layer = 0; layer < n_layers(); ++layer) {
    for (const Side side : kSides) KVANT_RETURN_IF_ERROR(copy_stream_side(LayerId{layer}, side, from, to));
  }
  return {};
}

// ---- size model

MemoryReport SlotCache::memory() const {
  return {.tile_bytes = pool_.bytes(Use::kTiles),
          .exact_row_bytes = pool_.bytes(Use::kExactRows),
          .table_bytes = pool_.bytes(Use::kTables),
          .workspace_bytes = pool_.bytes(Use::kWorkspace)};
}

MemoryReport plan_memory(const SlotCache::Options& options, int tokens) {
  const int n_pages = pages_for(options.n_slots);
  MemoryReport report;
  report.table_bytes =
      align_up(SlotTable::bytes(n_pages, options.n_streams), 64) + page_table_bytes(options, n_pages);
  report.workspace_bytes = AttentionWorkspace::bytes(options);
  const int used_pages = pages_for(tokens);
  // Pages below the one that holds the oldest token of the newest query's window are sealed.
  const int sealed_pages = std::max(0, tokens - std::max(options.window, 1)) / kPageTokens;
  for (const LayerScheme& layer : options.layers) {
    for (const Side side : kSides) {
      const size_t rows = row_page_bytes(layer.shape, side);
      const bool quantized = side_quantized(layer, side);
      const int sealed = quantized ? sealed_pages : 0;
      size_t row_bytes = rows * static_cast<size_t>(used_pages - sealed);
      for (int page = 0; page < sealed; ++page) {
        const int sinks = std::clamp(options.sinks - page * kPageTokens, 0, kPageTokens);
        if (sinks == 0) break;
        row_bytes += kept_bytes(layer.shape, side, sinks);
      }
      report.exact_row_bytes += row_bytes * options.n_streams;
      report.tile_bytes += static_cast<size_t>(sealed) * tiles_bytes(layer, side) * options.n_streams;
    }
  }
  return report;
}

}  // namespace kvant

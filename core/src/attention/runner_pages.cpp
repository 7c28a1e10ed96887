// What a strip of pages adds to the rows of a block.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention/runner.h"
#include "cache/side_page.h"
#include "kvant/half.h"

namespace kvant {
namespace {

// Mostly of whole pages; the count of other bits is a call where the compiler may not use an instruction.
uint64_t count_of(uint64_t bits) {
  if (bits == 0) return 0;
  return bits == ~uint64_t{0} ? 64 : static_cast<uint64_t>(std::popcount(bits));
}

bool any(const uint64_t* masks, int rows) {
  uint64_t all = 0;
  for (int r = 0; r < rows; ++r) all |= masks[r];
  return all != 0;
}

}  // namespace

// Live slots of a page that is held in tiles alone.
bool AttentionRunner::find_live_in_tiles(const Block& block, StripPage* page) {
  const StreamPlan& stream = *block.stream;
  const uint64_t held = page->keys->tile_mask & page->values->tile_mask;
  Live& live = page->live;
  uint64_t* none = live.key_rows;
  live.key_tile = live.value_tile = live.all;
  live.key_kept = live.value_rows = none;
  uint64_t seen = 0, pairs = 0;
  for (int n = 0, r = 0; n < block.n_queries; ++n) {
    const int query = block.first_query + n;
    const uint64_t visible =
        stream.visible[static_cast<size_t>(query) * stream.n_pages + page->number] & held;
    for (int i = 0; i < group_; ++i, ++r) {
      live.all[r] = visible;
      none[r] = 0;
    }
    seen |= visible;
    pairs += count_of(visible);
  }
  pairs *= static_cast<uint64_t>(group_) * static_cast<uint64_t>(block.n_heads);
  pairs_ += pairs;
  pairs_tile_ += pairs;
  pairs_tile_v_ += pairs;
  return seen != 0;
}

// Fills page->live; false when no row sees anything of the page.
bool AttentionRunner::find_live(const Block& block, StripPage* page) {
  const StreamPlan& stream = *block.stream;
  const SidePage& kp = *page->keys;
  const SidePage& vp = *page->values;
  if ((kp.row_mask | kp.kept_mask | vp.row_mask | vp.kept_mask) == 0) return find_live_in_tiles(block, page);
  const Live& live = page->live;
  const uint64_t sinks = cache_.sink_mask(stream.stream, page->number);
  const uint64_t held =
      (kp.tile_mask | kp.row_mask | kp.kept_mask) & (vp.tile_mask | vp.row_mask | vp.kept_mask);
  const uint64_t reads = static_cast<uint64_t>(group_) * static_cast<uint64_t>(block.n_heads);
  uint64_t seen = 0;
  for (int n = 0; n < block.n_queries; ++n) {
    const int query = block.first_query + n;
    const uint64_t visible =
        stream.visible[static_cast<size_t>(query) * stream.n_pages + page->number] & held;
    const uint64_t exact = stream.in_window(query, page->number) ? ~uint64_t{0} : sinks;
    auto tile_part = [&](const SidePage& sp) {
      return visible & sp.tile_mask & ~(exact & (sp.row_mask | sp.kept_mask));
    };
    const uint64_t key_tile = tile_part(kp);
    const uint64_t value_tile = tile_part(vp);
    const uint64_t key_rows = visible & ~key_tile & kp.row_mask;
    for (int r = n * group_; r < (n + 1) * group_; ++r) {
      live.all[r] = visible;
      live.key_tile[r] = key_tile;
      live.key_rows[r] = key_rows;
      live.key_kept[r] = visible & ~key_tile & ~key_rows;
      live.value_tile[r] = value_tile;
      live.value_rows[r] = visible & ~value_tile;
    }
    seen |= visible;
    pairs_ += reads * count_of(visible);
    pairs_tile_ += reads * count_of(key_tile);
    pairs_tile_v_ += reads * count_of(value_tile);
  }
  return seen != 0;
}

float* AttentionRunner::logits_of(const Block& block, int page, int h) const {
  return logits_ +
         (static_cast<size_t>(page) * block.all_rows() + static_cast<size_t>(h) * block.rows) * kPageTokens;
}

// Copies logits of the given lanes; `layout` non-null: `from` holds them densely in the order of its bits.
void AttentionRunner::merge_lanes(const Block& block, const uint64_t* lanes, const uint64_t* layout,
                                  const float* from, float* logits) const {
  for (int r = 0; r < block.rows; ++r) {
    uint64_t bits = lanes[r];
    if (bits == ~uint64_t{0} && layout == nullptr) {
      std::memcpy(logits + r * kPageTokens, from + r * kPageTokens, kPageTokens * 4);
      continue;
    }
    while (bits != 0) {
      const int t = std::countr_zero(bits);
      bits &= bits - 1;
      logits[r * kPageTokens + t] = from[r * kPageTokens + (layout != nullptr ? kept_row(*layout, t) : t)];
    }
  }
}

// Scores of the keys that are read from tiles.
void AttentionRunner::tile_logits(const Block& block, const Queries& queries, int pages) {
  const int dim = layer_.shape.key_dim;
  auto* tasks = reinterpret_cast<simd::KeyTask*>(key_tasks_);
  int n_tasks = 0;
  for (int i = 0; i < pages; ++i) {
    const StripPage& page = strip_[i];
    if (page.keys->tile_mask == 0 || !any(page.live.key_tile, block.rows)) continue;
    const std::byte* after = head_tile(*page.keys, block.first_head, Side::kKey);
    for (int h = 0; h < block.n_heads; ++h) {
      const Format& format = head_of(block, h).key_format;
      const std::byte* at = after;
      after += format.tile_bytes();
      const size_t first_row = static_cast<size_t>(h) * block.rows;
      const float* centre = queries.centre + first_row;
      float* logits = logits_of(block, i, h);
      if (args_.path == AttentionPath::kFused) {
        const TileAddress next = next_tile(at);
        std::construct_at(tasks + n_tasks++, simd::KeyTask{.layout = &format.layout(),
                                                           .tile = at,
                                                           .next = next.at,
                                                           .next_bytes = next.bytes,
                                                           .queries = &prepared_[h],
                                                           .base = centre,
                                                           .live = page.live.key_tile,
                                                           .logits = logits});
        continue;
      }
      format.decode(at, floats_);
      kernels_.qk_floats(floats_, kPageTokens, dim, queries.transformed + first_row * dim, block.rows,
                         page.live.key_tile, logits);
      for (int r = 0; r < block.rows; ++r) {
        for (int t = 0; t < kPageTokens; ++t) logits[r * kPageTokens + t] += centre[r];
      }
    }
  }
  if (n_tasks != 0) kernels_.qk_tiles(tasks, n_tasks);
}

// Scores of the keys that are read from exact rows; logits of the tile's keys are there already.
void AttentionRunner::row_logits(const Block& block, const Queries& queries, const StripPage& page, int h,
                                 float* logits) {
  const int dim = layer_.shape.key_dim;
  const SidePage& keys = *page.keys;
  const Live& live = page.live;
  const float* plain = queries.plain + static_cast<size_t>(h) * block.rows * dim;
  if (keys.row_mask != 0 && any(live.key_rows, block.rows)) {
    const bool merged = keys.tile_mask != 0 && any(live.key_tile, block.rows);
    const uint16_t* rows = keys.rows + row_index(block.first_head + h, 0, kPageTokens, dim);
    uint64_t used = 0;
    for (int r = 0; r < block.rows; ++r) used |= live.key_rows[r];
    const int count = 64 - std::countl_zero(used);
    kernels_.qk_rows(rows, next_rows(block, page, h, Side::kKey), dim, count, false, dim, plain, block.rows,
                     live.key_rows, merged ? scratch_ : logits);
    if (merged) merge_lanes(block, live.key_rows, nullptr, scratch_, logits);
  }
  if (keys.kept_mask != 0 && any(live.key_kept, block.rows)) {
    const int n = std::popcount(keys.kept_layout);
    const uint16_t* rows = keys.kept + row_index(block.first_head + h, 0, n, dim);
    kernels_.qk_rows(rows, rows, dim, n, false, dim, plain, block.rows, live.key_kept, scratch_);
    merge_lanes(block, live.key_kept, &keys.kept_layout, scratch_, logits);
  }
}

// Soft cap and mask bias, in base-2 logits.
void AttentionRunner::bias_logits(const Block& block, const StripPage& page, int h, float* logits) const {
  const uint64_t* live = page.live.all;
  if (args_.soft_cap != 0.0f) {
    const float cap = args_.soft_cap * kLog2e;
    for (int r = 0; r < block.rows; ++r) {
      for (int t = 0; t < kPageTokens; ++t) {
        float& x = logits[r * kPageTokens + t];
        if ((live[r] >> t) & 1) x = cap * std::tanh(x / cap);
      }
    }
  }
  if (!block.stream->has_bias) return;
  for (int r = 0; r < block.rows; ++r) {
    const int query = block.first_query + r / group_;
    const uint16_t* mask = block.stream->mask + static_cast<size_t>(query) * block.stream->mask_stride +
                           static_cast<size_t>(page.number) * kPageTokens;
    const int query_head = (block.first_head + h) * group_ + r % group_;
    const float slope = args_.alibi_slopes != nullptr ? args_.alibi_slopes[query_head] : 1.0f;
    for (int t = 0; t < kPageTokens; ++t) {
      if ((live[r] >> t) & 1) logits[r * kPageTokens + t] += slope * kLog2e * half_to_float(mask[t]);
    }
  }
}

// Turns the logits of a strip into weights and rescales what was accumulated before.
void AttentionRunner::weigh(const Block& block, int pages, State* state) {
  const int dim = layer_.shape.value_dim;
  const size_t all_rows = static_cast<size_t>(block.all_rows());
  for (int h = 0; h < block.n_heads; ++h) {
    const size_t first_row = static_cast<size_t>(h) * block.rows;
    const simd::LogitStrip strip = {.logits = logits_of(block, 0, h),
                                    .page_stride = all_rows * kPageTokens,
                                    .live = strip_[0].live.all,
                                    .live_stride = 6 * static_cast<size_t>(block.rows),
                                    .pages = pages,
                                    .rows = block.rows,
                                    .sums = sums_ + first_row,
                                    .sum_stride = all_rows,
                                    .skip_below = args_.skip_below};
    kernels_.softmax(strip, state->row + first_row, rescale_ + first_row);
  }
  const int rows = block.all_rows();
  if (!layer_.exact) kernels_.rescale(state->acc_tile, dim, rows, rescale_);
  for (int r = 0; r < rows; ++r) {
    state->row[r].tile_sum *= rescale_[r];
    if (state->row[r].exact) {
      kernels_.rescale(state->acc_rows + static_cast<size_t>(r) * dim, dim, 1, rescale_ + r);
    }
  }
}

bool AttentionRunner::reads_all(const Block& block, const Live& live, const uint64_t* lanes) const {
  if (lanes == live.all) return true;
  for (int r = 0; r < block.rows; ++r) {
    if (lanes[r] != 0 && lanes[r] != live.all[r]) return false;
  }
  return true;
}

// Weights with the lanes outside `lanes` set to zero; the weights themselves when nothing is outside.
const float* AttentionRunner::masked_weights(const Block& block, const Live& live, const uint64_t* lanes,
                                             const float* weights) {
  if (reads_all(block, live, lanes)) return weights;
  for (int r = 0; r < block.rows; ++r) {
    for (int t = 0; t < kPageTokens; ++t) {
      weights_[r * kPageTokens + t] = ((lanes[r] >> t) & 1) != 0 ? weights[r * kPageTokens + t] : 0.0f;
    }
  }
  return weights_;
}

// The tokens of a page that each row reads from the tile of head h: none where all weights are zero. Null
// when no row reads any.
const uint64_t* AttentionRunner::unskipped_lanes(const Block& block, int page, int h) {
  const uint64_t* lanes = strip_[page].live.value_tile;
  const size_t first = static_cast<size_t>(page) * block.all_rows() + static_cast<size_t>(h) * block.rows;
  const float* sums = sums_ + first;
  bool all = true;
  for (int r = 0; r < block.rows; ++r) all &= sums[r] != 0.0f;
  if (all) return lanes;
  uint64_t* out = unskipped_ + first;
  uint64_t some = 0;
  for (int r = 0; r < block.rows; ++r) {
    out[r] = sums[r] != 0.0f ? lanes[r] : 0;
    some |= out[r];
    pairs_skipped_ += count_of(lanes[r] & ~out[r]);
  }
  return some != 0 ? out : nullptr;
}

// Weighted sums of the values that are read from tiles.
void AttentionRunner::add_tile_values(const Block& block, int pages, State* state) {
  const int dim = layer_.shape.value_dim;
  auto* tasks = reinterpret_cast<simd::ValueTask*>(value_tasks_);
  int n_tasks = 0;
  const auto flush = [&] {
    if (n_tasks != 0) kernels_.pv_tiles(tasks, n_tasks, pv_workspace_);
    n_tasks = 0;
  };
  for (int i = 0; i < pages; ++i) {
    const StripPage& page = strip_[i];
    if (page.values->tile_mask == 0 || !any(page.live.value_tile, block.rows)) continue;
    const bool masked = !reads_all(block, page.live, page.live.value_tile);
    const std::byte* after = head_tile(*page.values, block.first_head, Side::kValue);
    for (int h = 0; h < block.n_heads; ++h) {
      const Format& format = head_of(block, h).value_format;
      const std::byte* at = after;
      after += format.tile_bytes();
      const uint64_t* lanes = unskipped_lanes(block, i, h);
      if (lanes == nullptr) continue;
      const size_t first_row = static_cast<size_t>(h) * block.rows;
      float* acc = state->acc_tile + first_row * dim;
      const float* weights = logits_of(block, i, h);
      if (masked) {
        flush();  // there is one buffer of masked weights
        weights = masked_weights(block, page.live, page.live.value_tile, weights);
      }
      if (args_.path == AttentionPath::kFused) {
        const TileAddress next = next_tile(at);
        std::construct_at(tasks + n_tasks++, simd::ValueTask{.layout = &format.layout(),
                                                             .tile = at,
                                                             .next = next.at,
                                                             .next_bytes = next.bytes,
                                                             .weights = weights,
                                                             .rows = block.rows,
                                                             .live = lanes,
                                                             .acc = acc});
        if (masked) flush();
      } else {
        format.decode(at, floats_);
        kernels_.pv_floats(floats_, kPageTokens, dim, weights, block.rows, lanes, acc);
      }
      add_tile_sums(block, i, h, weights, state->row + first_row);
    }
  }
  flush();
}

// The share of the weights that fell on tiles of head h, for values with a centre.
void AttentionRunner::add_tile_sums(const Block& block, int page, int h, const float* weights,
                                    simd::RowState* row) const {
  if (!head_of(block, h).value_transform->has_centre()) return;
  const Live& live = strip_[page].live;
  const float* sums =
      sums_ + static_cast<size_t>(page) * block.all_rows() + static_cast<size_t>(h) * block.rows;
  for (int r = 0; r < block.rows; ++r) {
    if (live.value_tile[r] == 0) continue;
    float sum = 0;
    if (live.value_tile[r] == live.all[r]) {
      sum = sums[r];
    } else {
      for (int t = 0; t < kPageTokens; ++t) sum += weights[r * kPageTokens + t];
    }
    row[r].tile_sum += sum;
  }
}

// Accumulators of exact rows are zeroed when they are needed for the first time.
void AttentionRunner::open_exact_rows(const Block& block, const StripPage& page, float* acc,
                                      simd::RowState* row) const {
  const size_t dim = static_cast<size_t>(layer_.shape.value_dim);
  for (int r = 0; r < block.rows; ++r) {
    if (page.live.value_rows[r] == 0 || row[r].exact) continue;
    std::memset(acc + static_cast<size_t>(r) * dim, 0, dim * sizeof(float));
    row[r].exact = true;
  }
}

// Everything that is not read from the tile: in `rows` or in `kept`.
void AttentionRunner::add_exact_values(const Block& block, const StripPage& page, int h, const float* weights,
                                       float* acc) {
  const int dim = layer_.shape.value_dim;
  const SidePage& values = *page.values;
  const uint64_t* value_rows = page.live.value_rows;
  uint64_t in_rows = 0;
  uint64_t in_kept = 0;
  uint64_t* lanes = page.live.key_rows;  // no longer needed by the keys of this page
  for (int r = 0; r < block.rows; ++r) {
    lanes[r] = value_rows[r] & values.row_mask;
    in_rows |= lanes[r];
    in_kept |= value_rows[r] & ~values.row_mask;
  }
  if (in_rows != 0) {
    const uint16_t* rows = values.rows + row_index(block.first_head + h, 0, kPageTokens, dim);
    kernels_.pv_rows(rows, next_rows(block, page, h, Side::kValue), dim, 64 - std::countl_zero(in_rows),
                     false, dim, masked_weights(block, page.live, lanes, weights), block.rows, lanes, acc);
  }
  if (in_kept == 0) return;
  const int n = std::popcount(values.kept_layout);
  const uint16_t* rows = values.kept + row_index(block.first_head + h, 0, n, dim);
  for (int r = 0; r < block.rows; ++r) {
    const uint64_t slots = value_rows[r] & ~values.row_mask;
    uint64_t bits = values.kept_layout;
    lanes[r] = 0;  // in the order of the kept rows
    for (int i = 0; i < n; ++i, bits &= bits - 1) {
      const int t = std::countr_zero(bits);
      const bool read = ((slots >> t) & 1) != 0;
      lanes[r] |= uint64_t{read} << i;
      weights_[r * kPageTokens + i] = read ? weights[r * kPageTokens + t] : 0.0f;
    }
  }
  kernels_.pv_rows(rows, rows, dim, n, false, dim, weights_, block.rows, lanes, acc);
}

// The exact rows that will be read after those of head h of a page, as far as they are easily told.
const uint16_t* AttentionRunner::next_rows(const Block& block, const StripPage& page, int h,
                                           Side side) const {
  const int dim = dim_of(layer_.shape, side);
  const auto rows_of = [&](const SidePage& at, int head) {
    return at.rows + row_index(block.first_head + head, 0, kPageTokens, dim);
  };
  const SidePage& here = side == Side::kKey ? *page.keys : *page.values;
  if (h + 1 < block.n_heads) return rows_of(here, h + 1);
  const StreamId stream = block.stream->stream;
  if (page.number + 1 < block.stream->n_pages) {
    const SidePage& next = cache_.side_page(args_.layer, stream, page.number + 1, side);
    if (next.rows != nullptr) return rows_of(next, 0);
  }
  return rows_of(here, h);
}

const std::byte* AttentionRunner::head_tile(const SidePage& page, int head, Side side) const {
  const std::byte* at = page.tiles;
  for (int h = 0; h < head; ++h) at += format_of(layer_.heads[h], side).tile_bytes();
  return at;
}

void AttentionRunner::list_page_tiles(const Block& block, const SidePage& page, Side side) {
  if (page.tile_mask == 0) return;
  const std::byte* at = head_tile(page, block.first_head, side);
  for (int h = 0; h < block.n_heads; ++h) {
    const size_t bytes = format_of(head_of(block, h), side).tile_bytes();
    tiles_[n_tiles_++] = {at, static_cast<uint32_t>(bytes)};
    at += bytes;
  }
}

// The first key tiles from page `first` on, as many as are asked for ahead.
void AttentionRunner::list_first_key_tiles(const Block& block, int first) {
  const int wanted = n_tiles_ + kPrefetchTiles;
  const int end = std::min(first + kPrefetchTiles, block.stream->n_pages);
  for (int number = first; number < end && n_tiles_ < wanted; ++number) {
    list_page_tiles(block, cache_.side_page(args_.layer, block.stream->stream, number, Side::kKey),
                    Side::kKey);
  }
}

// The tiles that a strip will use, in order, and the first ones of page `after`, which follows it.
void AttentionRunner::list_tiles(const Block& block, int pages, int after) {
  n_tiles_ = at_tile_ = 0;
  if (pages == 0) return;
  for (int i = 0; i < pages; ++i) list_page_tiles(block, *strip_[i].keys, Side::kKey);
  for (int i = 0; i < pages; ++i) list_page_tiles(block, *strip_[i].values, Side::kValue);
  list_first_key_tiles(block, after);
}

// What will be read a few tiles after `tile`, or nothing of `tile` itself.
AttentionRunner::TileAddress AttentionRunner::next_tile(const std::byte* tile) {
  while (at_tile_ < n_tiles_ && tiles_[at_tile_].at != tile) ++at_tile_;
  return at_tile_ + kPrefetchTiles < n_tiles_ ? tiles_[at_tile_ + kPrefetchTiles] : TileAddress{tile, 0};
}

void AttentionRunner::attend_strip(const Block& block, const Queries& queries, int pages, int after,
                                   State* state) {
  const bool biased = args_.soft_cap != 0.0f || block.stream->has_bias;
  list_tiles(block, pages, after);
  tile_logits(block, queries, pages);
  for (int i = 0; i < pages; ++i) {
    const SidePage& keys = *strip_[i].keys;
    const bool exact = (keys.row_mask | keys.kept_mask) != 0;
    for (int h = 0; (exact || biased) && h < block.n_heads; ++h) {
      float* logits = logits_of(block, i, h);
      if (exact) row_logits(block, queries, strip_[i], h, logits);
      if (biased) bias_logits(block, strip_[i], h, logits);
    }
  }
  weigh(block, pages, state);
  add_tile_values(block, pages, state);
  for (int i = 0; i < pages; ++i) {
    if (!any(strip_[i].live.value_rows, block.rows)) continue;
    for (int h = 0; h < block.n_heads; ++h) {
      const size_t first_row = static_cast<size_t>(h) * block.rows;
      float* acc = state->acc_rows + first_row * layer_.shape.value_dim;
      open_exact_rows(block, strip_[i], acc, state->row + first_row);
      add_exact_values(block, strip_[i], h, logits_of(block, i, h), acc);
    }
  }
}

}  // namespace kvant

#include "attention/runner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvant/half.h"

namespace kvant {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

bool any(const uint64_t* masks, int rows) {
  uint64_t all = 0;
  for (int r = 0; r < rows; ++r) all |= masks[r];
  return all != 0;
}

int rank(uint64_t layout, int t) { return std::popcount(layout & ((uint64_t{1} << t) - 1)); }

}  // namespace

AttentionRunner::AttentionRunner(AttentionJob* job, int ith)
    : job_(job),
      cache_(*job->cache_),
      layer_(job->cache_->layer(job->args_.layer)),
      args_(job->args_),
      kernels_(*simd::kernels().attention),
      layout_(job->workspace_->layout()),
      group_(layer_.shape.n_query_heads / layer_.shape.n_kv_heads) {
  std::byte* p = job->workspace_->thread_memory(ith);
  auto take = [&p](size_t bytes) {
    std::byte* at = p;
    p += align_up(bytes, 64);
    return at;
  };
  const size_t rows = static_cast<size_t>(layout_.rows);
  queries_ = place_queries(take(layout_.shared_query));
  prepared_memory_ = take(layout_.prepared);
  run_state_ = place_state(take(layout_.state));
  total_state_ = place_state(take(layout_.state));
  logits_ = reinterpret_cast<float*>(take(rows * kPageTokens * 4));
  scratch_ = reinterpret_cast<float*>(take(rows * kPageTokens * 4));
  weights_ = reinterpret_cast<float*>(take(rows * kPageTokens * 4));
  rescale_ = reinterpret_cast<float*>(take(rows * 4));
  for (uint64_t** mask : {&live_.all, &live_.key_tile, &live_.key_rows, &live_.key_kept, &live_.value_tile,
                          &live_.value_rows}) {
    *mask = reinterpret_cast<uint64_t*>(take(rows * 8));
  }
  pv_workspace_ = take(layout_.pv);
  floats_ = reinterpret_cast<float*>(p);
}

AttentionRunner::Queries AttentionRunner::place_queries(std::byte* memory) const {
  Queries q;
  const size_t bytes = align_up(static_cast<size_t>(layout_.rows) * layout_.key_dim * 4, 64);
  q.plain = reinterpret_cast<float*>(memory);
  q.transformed = reinterpret_cast<float*>(memory + bytes);
  q.centre = reinterpret_cast<float*>(memory + 2 * bytes);
  return q;
}

AttentionRunner::State AttentionRunner::place_state(std::byte* memory) const {
  State s;
  const size_t acc = align_up(static_cast<size_t>(layout_.rows) * layout_.value_dim * 4, 64);
  s.row = reinterpret_cast<simd::RowState*>(memory);
  memory += align_up(static_cast<size_t>(layout_.rows) * sizeof(simd::RowState), 64);
  s.acc_tile = reinterpret_cast<float*>(memory);
  s.acc_rows = reinterpret_cast<float*>(memory + acc);
  return s;
}

AttentionRunner::Block AttentionRunner::find_block(int pair) const {
  Block block;
  block.head = pair % job_->n_kv_heads_;
  int index = pair / job_->n_kv_heads_;
  const auto blocks = [&](const StreamPlan& s) {
    return (s.n_queries + job_->query_block_ - 1) / job_->query_block_;
  };
  // Pairs are numbered over the blocks of all streams, so one of the streams has this block.
  const StreamPlan* stream = args_.plan->streams.data();
  for (; index >= blocks(*stream); ++stream) index -= blocks(*stream);
  block.stream = stream;
  block.stream_index = static_cast<int>(stream - args_.plan->streams.data());
  block.first_query = index * job_->query_block_;
  block.n_queries = std::min(job_->query_block_, stream->n_queries - block.first_query);
  block.rows = block.n_queries * group_;
  return block;
}

void AttentionRunner::transform_queries(const Block& block, const Queries& queries) const {
  const int dim = layer_.shape.key_dim;
  const float factor = args_.scale * kLog2e;
  for (int n = 0; n < block.n_queries; ++n) {
    for (int g = 0; g < group_; ++g) {
      const float* q = args_.q + block.stream_index * args_.q_stream +
                       (block.first_query + n) * args_.q_token + (block.head * group_ + g) * args_.q_head;
      float* to = queries.plain + static_cast<size_t>(n * group_ + g) * dim;
      for (int c = 0; c < dim; ++c) to[c] = q[c] * factor;
    }
  }
  const HeadScheme& head = layer_.heads[block.head];
  if (layer_.exact || head.key_format.exact()) return;
  head.key_transform->apply_to_query(queries.plain, queries.transformed, block.rows);
  head.key_transform->centre_dot(queries.plain, queries.centre, block.rows);
}

void AttentionRunner::prepare_queries(const Block& block, const Queries& queries) {
  const HeadScheme& head = layer_.heads[block.head];
  if (layer_.exact || head.key_format.exact() || args_.path != AttentionPath::kFused) return;
  const TileLayout& layout = head.key_format.layout();
  simd::place_prepared_queries(layout, block.rows, prepared_memory_, &prepared_);
  kernels_.prepare_queries(layout, queries.transformed, block.rows, &prepared_);
}

void AttentionRunner::reset(State* state, int rows) const {
  const size_t bytes = static_cast<size_t>(rows) * layer_.shape.value_dim * 4;
  for (int r = 0; r < rows; ++r) state->row[r] = simd::RowState();
  std::memset(state->acc_tile, 0, bytes);
  std::memset(state->acc_rows, 0, bytes);
}

// Fills live_ for the page; false when no row sees anything of it.
bool AttentionRunner::find_live(const Block& block, int page, const SidePage& kp, const SidePage& vp) {
  const StreamPlan& stream = *block.stream;
  const uint64_t sinks = cache_.sink_mask(stream.stream, page);
  const uint64_t held =
      (kp.tile_mask | kp.row_mask | kp.kept_mask) & (vp.tile_mask | vp.row_mask | vp.kept_mask);
  uint64_t seen = 0;
  for (int n = 0; n < block.n_queries; ++n) {
    const int query = block.first_query + n;
    const uint64_t visible = stream.visible[static_cast<size_t>(query) * stream.n_pages + page] & held;
    const uint64_t exact = stream.in_window(query, page) ? ~uint64_t{0} : sinks;
    auto tile_part = [&](const SidePage& sp) {
      return visible & sp.tile_mask & ~(exact & (sp.row_mask | sp.kept_mask));
    };
    const uint64_t key_tile = tile_part(kp);
    const uint64_t value_tile = tile_part(vp);
    const uint64_t key_rows = visible & ~key_tile & kp.row_mask;
    for (int g = 0; g < group_; ++g) {
      const int r = n * group_ + g;
      live_.all[r] = visible;
      live_.key_tile[r] = key_tile;
      live_.key_rows[r] = key_rows;
      live_.key_kept[r] = visible & ~key_tile & ~key_rows;
      live_.value_tile[r] = value_tile;
      live_.value_rows[r] = visible & ~value_tile;
    }
    seen |= visible;
    pairs_ += static_cast<uint64_t>(group_ * std::popcount(visible));
    pairs_tile_ += static_cast<uint64_t>(group_ * std::popcount(key_tile));
    pairs_tile_v_ += static_cast<uint64_t>(group_ * std::popcount(value_tile));
  }
  return seen != 0;
}

// Copies logits of the given lanes; `layout` non-null: `from` holds them densely in the order of its bits.
void AttentionRunner::merge_lanes(const Block& block, const uint64_t* lanes, const uint64_t* layout,
                                  const float* from) {
  for (int r = 0; r < block.rows; ++r) {
    uint64_t bits = lanes[r];
    if (bits == ~uint64_t{0} && layout == nullptr) {
      std::memcpy(logits_ + r * kPageTokens, from + r * kPageTokens, kPageTokens * 4);
      continue;
    }
    while (bits != 0) {
      const int t = std::countr_zero(bits);
      bits &= bits - 1;
      logits_[r * kPageTokens + t] = from[r * kPageTokens + (layout != nullptr ? rank(*layout, t) : t)];
    }
  }
}

void AttentionRunner::key_logits(const Block& block, const Queries& queries, int number,
                                 const SidePage& page) {
  const int dim = layer_.shape.key_dim;
  const HeadScheme& head = layer_.heads[block.head];
  const bool tile = page.tile_mask != 0 && any(live_.key_tile, block.rows);
  if (tile) {
    const std::byte* at = head_tile(page, block.head, Side::kKey);
    if (args_.path == AttentionPath::kFused) {
      kernels_.qk_tile(head.key_format.layout(), at, next_tile(block, number, Side::kKey, at), prepared_,
                       queries.centre, live_.key_tile, logits_);
    } else {
      head.key_format.decode(at, floats_);
      kernels_.qk_floats(floats_, kPageTokens, dim, queries.transformed, block.rows, live_.key_tile, logits_);
      for (int r = 0; r < block.rows; ++r) {
        for (int t = 0; t < kPageTokens; ++t) logits_[r * kPageTokens + t] += queries.centre[r];
      }
    }
  }
  if (page.row_mask != 0 && any(live_.key_rows, block.rows)) {
    const uint16_t* rows = page.rows + static_cast<size_t>(block.head) * kPageTokens * dim;
    uint64_t used = 0;
    for (int r = 0; r < block.rows; ++r) used |= live_.key_rows[r];
    const int count = 64 - std::countl_zero(used);
    float* to = tile ? scratch_ : logits_;
    kernels_.qk_rows(rows, dim, count, false, dim, queries.plain, block.rows, live_.key_rows, to);
    if (tile) merge_lanes(block, live_.key_rows, nullptr, scratch_);
  }
  if (page.kept_mask != 0 && any(live_.key_kept, block.rows)) {
    const int n = std::popcount(page.kept_layout);
    const uint16_t* rows = page.kept + static_cast<size_t>(block.head) * n * dim;
    kernels_.qk_rows(rows, dim, n, false, dim, queries.plain, block.rows, live_.key_kept, scratch_);
    merge_lanes(block, live_.key_kept, &page.kept_layout, scratch_);
  }
}

// Soft cap and mask bias, in base-2 logits.
void AttentionRunner::bias_logits(const Block& block, int page) {
  if (args_.soft_cap != 0.0f) {
    const float cap = args_.soft_cap * kLog2e;
    for (int r = 0; r < block.rows; ++r) {
      for (int t = 0; t < kPageTokens; ++t) {
        float& x = logits_[r * kPageTokens + t];
        if ((live_.all[r] >> t) & 1) x = cap * std::tanh(x / cap);
      }
    }
  }
  if (!block.stream->has_bias) return;
  for (int r = 0; r < block.rows; ++r) {
    const int query = block.first_query + r / group_;
    const uint16_t* mask = block.stream->mask + static_cast<size_t>(query) * block.stream->mask_stride +
                           static_cast<size_t>(page) * kPageTokens;
    const float slope =
        args_.alibi_slopes != nullptr ? args_.alibi_slopes[block.head * group_ + r % group_] : 1.0f;
    for (int t = 0; t < kPageTokens; ++t) {
      if ((live_.all[r] >> t) & 1) logits_[r * kPageTokens + t] += slope * kLog2e * half_to_float(mask[t]);
    }
  }
}

// Weights with the lanes outside `lanes` set to zero; the weights themselves when nothing is outside.
const float* AttentionRunner::masked_weights(const Block& block, const uint64_t* lanes) {
  bool same = true;
  for (int r = 0; r < block.rows; ++r) same = same && (lanes[r] == 0 || lanes[r] == live_.all[r]);
  if (same) return logits_;
  for (int r = 0; r < block.rows; ++r) {
    for (int t = 0; t < kPageTokens; ++t) {
      weights_[r * kPageTokens + t] = ((lanes[r] >> t) & 1) != 0 ? logits_[r * kPageTokens + t] : 0.0f;
    }
  }
  return weights_;
}

void AttentionRunner::add_values(const Block& block, int number, const SidePage& page, State* state) {
  const int dim = layer_.shape.value_dim;
  const HeadScheme& head = layer_.heads[block.head];
  kernels_.rescale(state->acc_rows, dim, block.rows, live_.all, rescale_);
  if (!layer_.exact) kernels_.rescale(state->acc_tile, dim, block.rows, live_.all, rescale_);
  for (int r = 0; r < block.rows; ++r) {
    if (live_.all[r] != 0) state->row[r].tile_sum *= rescale_[r];
  }
  if (page.tile_mask != 0 && any(live_.value_tile, block.rows)) {
    const float* weights = masked_weights(block, live_.value_tile);
    const std::byte* at = head_tile(page, block.head, Side::kValue);
    if (args_.path == AttentionPath::kFused) {
      kernels_.pv_tile(head.value_format.layout(), at, next_tile(block, number, Side::kValue, at), weights,
                       block.rows, live_.value_tile, state->acc_tile, pv_workspace_);
    } else {
      head.value_format.decode(at, floats_);
      kernels_.pv_floats(floats_, kPageTokens, dim, weights, block.rows, live_.value_tile, state->acc_tile);
    }
    if (head.value_transform->has_centre()) {
      for (int r = 0; r < block.rows; ++r) {
        if (live_.value_tile[r] == 0) continue;
        float sum = 0;
        for (int t = 0; t < kPageTokens; ++t) sum += weights[r * kPageTokens + t];
        state->row[r].tile_sum += sum;
      }
    }
  }
  // live_.value_rows: everything that is not read from the tile, in `rows` or in `kept`.
  uint64_t in_rows = 0;
  uint64_t in_kept = 0;
  uint64_t* lanes = live_.key_rows;  // no longer needed by the keys of this page
  for (int r = 0; r < block.rows; ++r) {
    lanes[r] = live_.value_rows[r] & page.row_mask;
    in_rows |= lanes[r];
    in_kept |= live_.value_rows[r] & ~page.row_mask;
  }
  if (in_rows != 0) {
    const uint16_t* rows = page.rows + static_cast<size_t>(block.head) * kPageTokens * dim;
    kernels_.pv_rows(rows, dim, 64 - std::countl_zero(in_rows), false, dim, masked_weights(block, lanes),
                     block.rows, lanes, state->acc_rows);
  }
  if (in_kept != 0) {
    const int n = std::popcount(page.kept_layout);
    const uint16_t* rows = page.kept + static_cast<size_t>(block.head) * n * dim;
    for (int r = 0; r < block.rows; ++r) {
      const uint64_t slots = live_.value_rows[r] & ~page.row_mask;
      uint64_t bits = page.kept_layout;
      lanes[r] = 0;  // in the order of the kept rows
      for (int i = 0; i < n; ++i, bits &= bits - 1) {
        const int t = std::countr_zero(bits);
        const bool read = ((slots >> t) & 1) != 0;
        lanes[r] |= uint64_t{read} << i;
        weights_[r * kPageTokens + i] = read ? logits_[r * kPageTokens + t] : 0.0f;
      }
    }
    kernels_.pv_rows(rows, dim, n, false, dim, weights_, block.rows, lanes, state->acc_rows);
  }
}

// The head's tile of the page after `page`, or `tile` when that page has none.
const std::byte* AttentionRunner::next_tile(const Block& block, int page, Side side,
                                            const std::byte* tile) const {
  if (page + 1 >= block.stream->n_pages) return tile;
  const SidePage& next = cache_.side_page(args_.layer, block.stream->stream, page + 1, side);
  return next.tile_mask != 0 ? head_tile(next, block.head, side) : tile;
}

const std::byte* AttentionRunner::head_tile(const SidePage& page, int head, Side side) const {
  const std::byte* at = page.tiles;
  for (int h = 0; h < head; ++h) at += tile_format(h, side).tile_bytes();
  return at;
}

const Format& AttentionRunner::tile_format(int head, Side side) const {
  return side == Side::kKey ? layer_.heads[head].key_format : layer_.heads[head].value_format;
}

void AttentionRunner::attend_page(const Block& block, const Queries& queries, int page, State* state) {
  const SidePage& kp = cache_.side_page(args_.layer, block.stream->stream, page, Side::kKey);
  const SidePage& vp = cache_.side_page(args_.layer, block.stream->stream, page, Side::kValue);
  if (!find_live(block, page, kp, vp)) return;
  key_logits(block, queries, page, kp);
  if (args_.soft_cap != 0.0f || block.stream->has_bias) bias_logits(block, page);
  kernels_.softmax(logits_, block.rows, live_.all, state->row, rescale_);
  add_values(block, page, vp, state);
}

void AttentionRunner::attend_run(const Block& block, const Queries& queries, int run, State* state) {
  reset(state, block.rows);
  const int end = std::min((run + 1) * kRunPages, block.stream->n_pages);
  for (int page = run * kRunPages; page < end; ++page) attend_page(block, queries, page, state);
}

void AttentionRunner::merge(const Block& block, const State& from, State* into) const {
  const int dim = layer_.shape.value_dim;
  for (int r = 0; r < block.rows; ++r) {
    const simd::RowState& a = into->row[r];
    const simd::RowState& b = from.row[r];
    if (b.sum == 0.0f) continue;
    const float top = std::max(a.max, b.max);
    const float fa = a.sum == 0.0f ? 0.0f : std::exp2(a.max - top);
    const float fb = std::exp2(b.max - top);
    into->row[r] = {
        .max = top, .sum = a.sum * fa + b.sum * fb, .tile_sum = a.tile_sum * fa + b.tile_sum * fb};
    float* tile = into->acc_tile + static_cast<size_t>(r) * dim;
    float* rows = into->acc_rows + static_cast<size_t>(r) * dim;
    const float* tile_b = from.acc_tile + static_cast<size_t>(r) * dim;
    const float* rows_b = from.acc_rows + static_cast<size_t>(r) * dim;
    for (int c = 0; c < dim; ++c) {
      tile[c] = tile[c] * fa + tile_b[c] * fb;
      rows[c] = rows[c] * fa + rows_b[c] * fb;
    }
  }
}

void AttentionRunner::finish(const Block& block, State* state) {
  const int dim = layer_.shape.value_dim;
  const HeadScheme& head = layer_.heads[block.head];
  // The queries of this thread are spent, their memory is wide enough only for key_dim: use the run state.
  float* inverted = run_state_.acc_rows;
  if (!layer_.exact && !head.value_format.exact()) {
    head.value_transform->invert_output(state->acc_tile, inverted, block.rows);
  } else {
    std::memset(inverted, 0, static_cast<size_t>(block.rows) * dim * 4);
  }
  const auto centre = head.value_transform->centre();
  for (int r = 0; r < block.rows; ++r) {
    const int query_head = block.head * group_ + r % group_;
    simd::RowState row = state->row[r];
    float factor = 1.0f;
    if (args_.sink_logits != nullptr) {
      const float sink = args_.sink_logits[query_head] * kLog2e;
      const float top = std::max(row.max, sink);
      factor = row.sum == 0.0f ? 0.0f : std::exp2(row.max - top);
      row.sum = row.sum * factor + std::exp2(sink - top);
    }
    const float norm = row.sum == 0.0f ? 0.0f : factor / row.sum;
    float* out = args_.out + block.stream_index * args_.out_stream +
                 (block.first_query + r / group_) * args_.out_token + query_head * args_.out_head;
    const float* rows = state->acc_rows + static_cast<size_t>(r) * dim;
    const float* tile = inverted + static_cast<size_t>(r) * dim;
    for (int c = 0; c < dim; ++c) {
      const float centred = centre.empty() ? 0.0f : centre[c] * row.tile_sum;
      out[c] = (rows[c] + tile[c] + centred) * norm;
    }
  }
}

void AttentionRunner::run_split(const Block& block, int pair, int run) {
  const int runs = job_->max_runs_;
  std::byte* shared = job_->workspace_->shared_memory();
  const Queries queries = place_queries(shared + static_cast<size_t>(pair) * layout_.shared_query);
  // The first thread to meet a pair transforms its queries, others wait for it.
  std::atomic<int>& transformed = job_->progress_[static_cast<size_t>(pair) * 2];
  int expected = 0;
  if (transformed.compare_exchange_strong(expected, 1)) {
    transform_queries(block, queries);
    transformed.store(2, std::memory_order_release);
  } else {
    while (transformed.load(std::memory_order_acquire) != 2) cpu_relax();
  }
  if (prepared_pair_ != pair) prepare_queries(block, queries);
  prepared_pair_ = pair;
  // States of this pair in the shared memory: [rows of earlier pairs * runs + run * rows].
  size_t rows_before = 0;
  for (int p = 0; p < pair; ++p) rows_before += find_block(p).rows;
  std::byte* states = shared + static_cast<size_t>(kMaxSplitPairs) * layout_.shared_query +
                      rows_before * runs * layout_.row_state;
  auto state_at = [&](int index) {
    std::byte* at = states + static_cast<size_t>(index) * block.rows * layout_.row_state;
    State s;
    s.row = reinterpret_cast<simd::RowState*>(at);
    s.acc_tile = reinterpret_cast<float*>(at + align_up(block.rows * sizeof(simd::RowState), 64));
    s.acc_rows = s.acc_tile + static_cast<size_t>(block.rows) * layer_.shape.value_dim;
    return s;
  };
  State mine = state_at(run);
  attend_run(block, queries, run, &mine);
  std::atomic<int>& finished = job_->progress_[static_cast<size_t>(pair) * 2 + 1];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < runs) return;
  reset(&total_state_, block.rows);
  for (int i = 0; i < runs; ++i) merge(block, state_at(i), &total_state_);
  finish(block, &total_state_);
}

void AttentionRunner::run_item(int item) {
  pairs_ = pairs_tile_ = pairs_tile_v_ = 0;
  if (job_->split_) {
    const int pair = item / job_->max_runs_;
    run_split(find_block(pair), pair, item % job_->max_runs_);
  } else {
    const Block block = find_block(item);
    transform_queries(block, queries_);
    prepare_queries(block, queries_);
    reset(&total_state_, block.rows);
    const int runs = (block.stream->n_pages + kRunPages - 1) / kRunPages;
    for (int run = 0; run < runs; ++run) {
      attend_run(block, queries_, run, &run_state_);
      merge(block, run_state_, &total_state_);
    }
    finish(block, &total_state_);
  }
  ReadCounters& counters = job_->cache_->counters();
  counters.pairs_total.fetch_add(pairs_, std::memory_order_relaxed);
  counters.pairs_quantized.fetch_add(pairs_tile_, std::memory_order_relaxed);
  counters.pairs_quantized_v.fetch_add(pairs_tile_v_, std::memory_order_relaxed);
}

}  // namespace kvant

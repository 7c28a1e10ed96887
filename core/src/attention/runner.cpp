#include "attention/runner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cache/side_page.h"

namespace kvant {
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
  const size_t strip_rows = static_cast<size_t>(layout_.logit_rows);
  logits_ = reinterpret_cast<float*>(take(strip_rows * kPageTokens * 4));
  scratch_ = reinterpret_cast<float*>(take(rows * kPageTokens * 4));
  weights_ = reinterpret_cast<float*>(take(rows * kPageTokens * 4));
  rescale_ = reinterpret_cast<float*>(take(rows * 4));
  sums_ = reinterpret_cast<float*>(take(strip_rows * 4));
  masks_ = reinterpret_cast<uint64_t*>(take(6 * align_up(strip_rows * 8, 64)));
  unskipped_ = reinterpret_cast<uint64_t*>(take(strip_rows * 8));
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

AttentionRunner::Block AttentionRunner::find_block(int group) const {
  Block block;
  block.first_head = group % job_->n_chunks_ * job_->item_heads_;
  block.n_heads = std::min(job_->item_heads_, job_->n_kv_heads_ - block.first_head);
  int index = group / job_->n_chunks_;
  const auto blocks = [&](const StreamPlan& s) {
    return (s.n_queries + job_->query_block_ - 1) / job_->query_block_;
  };
  // Groups are numbered over the blocks of all streams, so one of the streams has this block.
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
  for (int h = 0; h < block.n_heads; ++h) {
    const size_t first_row = static_cast<size_t>(h) * block.rows;
    float* plain = queries.plain + first_row * dim;
    const int query_head = (block.first_head + h) * group_;
    for (int r = 0; r < block.rows; ++r) {
      const float* q = args_.q + block.stream_index * args_.q_stream +
                       (block.first_query + r / group_) * args_.q_token +
                       (query_head + r % group_) * args_.q_head;
      for (int c = 0; c < dim; ++c) plain[static_cast<size_t>(r) * dim + c] = q[c] * factor;
    }
    const HeadScheme& head = head_of(block, h);
    if (layer_.exact || head.key_format.exact()) continue;
    head.key_transform->apply_to_query(plain, queries.transformed + first_row * dim, block.rows);
    head.key_transform->centre_dot(plain, queries.centre + first_row, block.rows);
  }
}

void AttentionRunner::prepare_queries(const Block& block, const Queries& queries) {
  if (layer_.exact || args_.path != AttentionPath::kFused) return;
  std::byte* memory = prepared_memory_;
  for (int h = 0; h < block.n_heads; ++h) {
    const HeadScheme& head = head_of(block, h);
    if (head.key_format.exact()) continue;
    const TileLayout& layout = head.key_format.layout();
    simd::place_prepared_queries(layout, block.rows, memory, &prepared_[h]);
    memory += simd::prepared_query_bytes(layout, block.rows);
    const float* q = queries.transformed + static_cast<size_t>(h) * block.rows * layer_.shape.key_dim;
    kernels_.prepare_queries(layout, q, block.rows, &prepared_[h]);
  }
}

void AttentionRunner::reset(State* state, int rows) const {
  const size_t bytes = static_cast<size_t>(rows) * layer_.shape.value_dim * 4;
  for (int r = 0; r < rows; ++r) state->row[r] = simd::RowState();
  std::memset(state->acc_tile, 0, bytes);
}

// Of what this thread reads after a run of the block; the number of pages where that is not known.
int AttentionRunner::first_page_of_next_run(const Block& block, int run) const {
  if (!job_->split_) return (run + 1) * kRunPages;
  const bool known = following_ < job_->n_items_ && following_ / job_->max_runs_ == prepared_group_;
  return known ? following_ % job_->max_runs_ * kRunPages : block.stream->n_pages;
}

// Asks for what is known of the pages of a run, which says where their tiles lie.
void AttentionRunner::ask_for_run(const Block& block, int first_page) const {
  const int end = std::min(first_page + kRunPages, block.stream->n_pages);
  for (int number = first_page; number < end; ++number) {
    for (const Side side : kSides) {
      __builtin_prefetch(&cache_.side_page(args_.layer, block.stream->stream, number, side));
    }
  }
}

// The first tiles of a run, which no strip before has asked for.
void AttentionRunner::ask_for_first_tiles(const Block& block, int run) {
  n_tiles_ = 0;
  list_first_key_tiles(block, run * kRunPages);
  for (int i = 0; i < std::min(n_tiles_, kPrefetchTiles); ++i) {
    for (uint32_t at = 0; at < tiles_[i].bytes; at += 64) __builtin_prefetch(tiles_[i].at + at, 0, 2);
  }
}

void AttentionRunner::attend_run(const Block& block, const Queries& queries, int run, State* state) {
  reset(state, block.all_rows());
  const int strip_pages = std::clamp(layout_.logit_rows / block.all_rows(), 1, kRunPages);
  const size_t rows = static_cast<size_t>(block.rows);
  const int end = std::min((run + 1) * kRunPages, block.stream->n_pages);
  const int next_run = first_page_of_next_run(block, run);
  ask_for_run(block, next_run);
  int pages = 0;
  for (int number = run * kRunPages; number < end; ++number) {
    StripPage& page = strip_[pages];
    page.number = number;
    page.keys = &cache_.side_page(args_.layer, block.stream->stream, number, Side::kKey);
    page.values = &cache_.side_page(args_.layer, block.stream->stream, number, Side::kValue);
    uint64_t* masks = masks_ + static_cast<size_t>(pages) * 6 * rows;
    page.live = {masks, masks + rows, masks + 2 * rows, masks + 3 * rows, masks + 4 * rows, masks + 5 * rows};
    if (find_live(block, &page)) ++pages;
    if (pages == strip_pages || (number + 1 == end && pages > 0)) {
      attend_strip(block, queries, pages, number + 1 == end ? next_run : number + 1, state);
      pages = 0;
    }
  }
}

namespace {

// 2^n for integers n <= 0, of which the maxima of softmaxes differ by.
float power_of_two(float n) {
  constexpr float kSmallest = -126.0f;
  if (n < kSmallest) return std::exp2(n);
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23);
}

}  // namespace

void AttentionRunner::merge(const Block& block, const State& from, State* into) const {
  const int dim = layer_.shape.value_dim;
  for (int r = 0; r < block.all_rows(); ++r) {
    const simd::RowState& a = into->row[r];
    const simd::RowState& b = from.row[r];
    if (b.sum == 0.0f) continue;
    const float top = std::max(a.max, b.max);
    const float fa = a.sum == 0.0f ? 0.0f : power_of_two(a.max - top);
    const float fb = power_of_two(b.max - top);
    const size_t at = static_cast<size_t>(r) * dim;
    kernels_.combine(into->acc_tile + at, from.acc_tile + at, dim, fa, fb);
    if (a.exact || b.exact) {
      float* rows = into->acc_rows + at;
      const float* rows_b = from.acc_rows + at;
      for (int c = 0; c < dim; ++c) {
        rows[c] = (a.exact ? rows[c] * fa : 0.0f) + (b.exact ? rows_b[c] * fb : 0.0f);
      }
    }
    into->row[r] = {.max = top,
                    .sum = a.sum * fa + b.sum * fb,
                    .tile_sum = a.tile_sum * fa + b.tile_sum * fb,
                    .exact = a.exact || b.exact};
  }
}

void AttentionRunner::finish(const Block& block, State* state) {
  const int dim = layer_.shape.value_dim;
  // The queries of this thread are spent, their memory is wide enough only for key_dim: use the run state.
  float* inverted = run_state_.acc_rows;
  for (int h = 0; h < block.n_heads; ++h) {
    const HeadScheme& head = head_of(block, h);
    const size_t first_row = static_cast<size_t>(h) * block.rows;
    if (!layer_.exact && !head.value_format.exact()) {
      head.value_transform->invert_output(state->acc_tile + first_row * dim, inverted, block.rows);
    } else {
      std::memset(inverted, 0, static_cast<size_t>(block.rows) * dim * 4);
    }
    const auto centre = head.value_transform->centre();
    for (int r = 0; r < block.rows; ++r) {
      const int query_head = (block.first_head + h) * group_ + r % group_;
      simd::RowState row = state->row[first_row + r];
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
      const float* rows = state->acc_rows + (first_row + r) * dim;
      const float* tile = inverted + static_cast<size_t>(r) * dim;
      for (int c = 0; c < dim; ++c) {
        const float centred = centre.empty() ? 0.0f : centre[c] * row.tile_sum;
        out[c] = ((row.exact ? rows[c] : 0.0f) + tile[c] + centred) * norm;
      }
    }
  }
}

AttentionRunner::State AttentionRunner::state_of_run(const Block& block, std::byte* states, int run) const {
  const size_t rows = static_cast<size_t>(block.all_rows());
  std::byte* at = states + static_cast<size_t>(run) * rows * layout_.row_state;
  State s;
  s.row = reinterpret_cast<simd::RowState*>(at);
  s.acc_tile = reinterpret_cast<float*>(at + align_up(rows * sizeof(simd::RowState), 64));
  s.acc_rows = s.acc_tile + rows * layer_.shape.value_dim;
  return s;
}

// Merges runs in order, into the state of the first, as far as they have finished; other threads go on
// meanwhile. The thread that merges looks again after it let go, so that no run is left behind.
void AttentionRunner::merge_finished(const Block& block, std::byte* states, std::atomic<int>* merged,
                                     const std::atomic<int>* finished) {
  constexpr int kMerging = -1;
  const int runs = job_->max_runs_;
  State total = state_of_run(block, states, 0);
  int at = merged->load();
  while (at != kMerging && at < runs && finished[at].load() != 0) {
    if (!merged->compare_exchange_strong(at, kMerging)) continue;
    do {
      if (at != 0) merge(block, state_of_run(block, states, at), &total);
    } while (++at < runs && finished[at].load() != 0);
    if (at == runs) finish(block, &total);
    merged->store(at);
  }
}

void AttentionRunner::run_split(const Block& block, int group, int run) {
  std::byte* shared = job_->workspace_->shared_memory();
  const Queries queries = place_queries(shared + static_cast<size_t>(group) * layout_.shared_query);
  if (prepared_group_ != group) ask_for_first_tiles(block, run);
  // The first thread to meet a group transforms its queries, others wait for it.
  std::atomic<int>* progress = job_->progress_.data() + static_cast<size_t>(group) * job_->group_progress_;
  std::atomic<int>& transformed = progress[0];
  int expected = 0;
  if (transformed.compare_exchange_strong(expected, 1)) {
    transform_queries(block, queries);
    transformed.store(2, std::memory_order_release);
  } else {
    while (transformed.load(std::memory_order_acquire) != 2) cpu_relax();
  }
  if (prepared_group_ != group) prepare_queries(block, queries);
  prepared_group_ = group;
  // States of this group in the shared memory: [rows of earlier groups * runs + run * rows].
  size_t rows_before = 0;
  for (int g = 0; g < group; ++g) rows_before += find_block(g).all_rows();
  std::byte* states = shared + static_cast<size_t>(kMaxSplitGroups) * layout_.shared_query +
                      rows_before * job_->max_runs_ * layout_.row_state;
  State mine = state_of_run(block, states, run);
  attend_run(block, queries, run, &mine);
  std::atomic<int>* finished = progress + 2;
  finished[run].store(1);
  merge_finished(block, states, progress + 1, finished);
}

void AttentionRunner::run_item(int item, int following) {
  following_ = following;
  pairs_ = pairs_tile_ = pairs_tile_v_ = pairs_skipped_ = 0;
  if (job_->split_) {
    const int group = item / job_->max_runs_;
    run_split(find_block(group), group, item % job_->max_runs_);
  } else {
    const Block block = find_block(item);
    transform_queries(block, queries_);
    prepare_queries(block, queries_);
    const int runs = (block.stream->n_pages + kRunPages - 1) / kRunPages;
    if (runs == 1) {
      attend_run(block, queries_, 0, &total_state_);
    } else {
      reset(&total_state_, block.all_rows());
    }
    for (int run = 0; runs > 1 && run < runs; ++run) {
      attend_run(block, queries_, run, &run_state_);
      merge(block, run_state_, &total_state_);
    }
    finish(block, &total_state_);
  }
  ReadCounters& counters = job_->cache_->counters();
  counters.pairs_total.fetch_add(pairs_, std::memory_order_relaxed);
  counters.pairs_quantized.fetch_add(pairs_tile_, std::memory_order_relaxed);
  counters.pairs_quantized_v.fetch_add(pairs_tile_v_, std::memory_order_relaxed);
  counters.pairs_skipped.fetch_add(pairs_skipped_, std::memory_order_relaxed);
}

}  // namespace kvant

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "attention/runner.h"
#include "cache/side_page.h"
#include "kvant/attention.h"
#include "simd/kernels.h"

namespace kvant {
namespace {

int largest_group(const SlotCache::Options& options) {
  int group = 1;
  for (const LayerScheme& layer : options.layers) {
    group = std::max(group, layer.shape.n_query_heads / layer.shape.n_kv_heads);
  }
  return group;
}

}  // namespace

WorkspaceLayout workspace_layout(const SlotCache::Options& options) {
  WorkspaceLayout w;
  w.rows = std::max(kBlockRows, largest_group(options));
  for (const LayerScheme& layer : options.layers) {
    w.key_dim = std::max(w.key_dim, layer.shape.key_dim);
    w.value_dim = std::max(w.value_dim, layer.shape.value_dim);
    for (const HeadScheme& head : layer.heads) {
      for (int heads = 1; heads <= std::min(kMaxItemHeads, layer.shape.n_kv_heads); ++heads) {
        const size_t bytes = simd::prepared_query_bytes(head.key_format.layout(), w.rows / heads);
        w.prepared = std::max(w.prepared, bytes * static_cast<size_t>(heads));
      }
      w.pv = std::max(w.pv, simd::pv_workspace_bytes(head.value_format.layout(), w.rows));
    }
  }
  w.prepared = align_up(w.prepared, 64);
  w.pv = align_up(w.pv, 64);
  const size_t row_floats = align_up(static_cast<size_t>(w.rows) * 4, 64);
  const size_t logits = static_cast<size_t>(w.rows) * kPageTokens * 4;
  w.logit_rows = std::max(w.rows, kStripRows);
  const size_t strip_logits = static_cast<size_t>(w.logit_rows) * kPageTokens * 4;
  const size_t sums = align_up(static_cast<size_t>(w.logit_rows) * 4, 64);
  const size_t queries = align_up(static_cast<size_t>(w.rows) * w.key_dim * 4, 64);
  w.state = align_up(static_cast<size_t>(w.rows) * sizeof(simd::RowState), 64) +
            2 * align_up(static_cast<size_t>(w.rows) * w.value_dim * 4, 64);
  w.shared_query = 2 * queries + row_floats;
  const size_t masks = 7 * align_up(static_cast<size_t>(w.logit_rows) * 8, 64);
  const size_t floats = align_up(static_cast<size_t>(kPageTokens) * std::max(w.key_dim, w.value_dim) * 4, 64);
  w.thread_bytes = align_up(w.shared_query, 64) + w.prepared + 2 * w.state + strip_logits + 2 * logits +
                   row_floats + sums + masks + w.pv + floats;
  // Split: every group has one query preparation and one state per run.
  w.max_runs = (pages_for(options.n_slots) + kRunPages - 1) / kRunPages;
  int heads = 1;
  for (const LayerScheme& layer : options.layers) heads = std::max(heads, layer.shape.n_kv_heads);
  const int group = largest_group(options);
  // States of one token per stream, at least four, for each query head; of more tokens over fewer runs.
  w.split_rows = static_cast<size_t>(heads) * group * std::max(4, options.n_streams);
  w.row_state = align_up(sizeof(simd::RowState) + 2 * static_cast<size_t>(w.value_dim) * 4, 64);
  w.shared_bytes =
      w.split_rows * w.max_runs * w.row_state + static_cast<size_t>(kMaxSplitGroups) * w.shared_query;
  return w;
}

size_t AttentionWorkspace::bytes(const SlotCache::Options& options) {
  const WorkspaceLayout w = workspace_layout(options);
  return w.shared_bytes + w.thread_bytes * static_cast<size_t>(std::max(1, options.max_threads));
}

Result<std::unique_ptr<AttentionWorkspace>> AttentionWorkspace::create(SlotCache* cache) {
  std::unique_ptr<AttentionWorkspace> workspace(new AttentionWorkspace());
  workspace->layout_ = std::make_unique<WorkspaceLayout>(workspace_layout(cache->options()));
  workspace->max_threads_ = std::max(1, cache->options().max_threads);
  const size_t bytes = AttentionWorkspace::bytes(cache->options());
  workspace->buffer_ = PoolBuffer(&cache->pool(), bytes, Use::kWorkspace);
  if (!workspace->buffer_) {
    return Status(Code::kPoolExhausted, "the workspace of " + std::to_string(bytes) +
                                            " bytes does not fit in the memory limit of " +
                                            std::to_string(cache->pool().limit_bytes()) + " bytes");
  }
  return workspace;
}

AttentionWorkspace::AttentionWorkspace() = default;
AttentionWorkspace::~AttentionWorkspace() = default;

std::byte* AttentionWorkspace::shared_memory() const { return buffer_.data(); }

std::byte* AttentionWorkspace::thread_memory(int ith) const {
  return buffer_.data() + layout_->shared_bytes + layout_->thread_bytes * static_cast<size_t>(ith);
}

Status AttentionJob::prepare(SlotCache* cache, AttentionWorkspace* workspace, const AttentionArgs& args) {
  if (args.layer.value < 0 || args.layer.value >= cache->n_layers()) {
    return {Code::kOutOfRange, "layer " + std::to_string(args.layer.value) + ": the cache has " +
                                   std::to_string(cache->n_layers())};
  }
  if (args.plan == nullptr || args.q == nullptr || args.out == nullptr) {
    return {Code::kInvalidArgument, "attention needs a plan, queries and an output"};
  }
  cache_ = cache;
  workspace_ = workspace;
  args_ = args;
  const LayerShape& shape = cache->layer(args.layer).shape;
  const int group = shape.n_query_heads / shape.n_kv_heads;
  n_kv_heads_ = shape.n_kv_heads;
  query_block_ = std::max(1, workspace->layout().rows / group);
  max_runs_ = 0;
  size_t rows = 0;
  for (const StreamPlan& stream : args.plan->streams) {
    max_runs_ = std::max(max_runs_, (stream.n_pages + kRunPages - 1) / kRunPages);
    rows += static_cast<size_t>(stream.n_queries) * shape.n_query_heads;
  }
  n_blocks_ = count_blocks();
  choose_items(rows);
  group_progress_ = 2 + static_cast<size_t>(workspace->layout().max_runs);
  const size_t groups = split_ ? static_cast<size_t>(n_blocks_) * n_chunks_ : 0;
  if (progress_.size() < groups * group_progress_) {
    progress_ = std::vector<std::atomic<int>>(groups * group_progress_);
  }
  for (size_t g = 0; g < groups; ++g) {
    std::atomic<int>* progress = progress_.data() + g * group_progress_;
    for (int i = 0; i < 2 + max_runs_; ++i) progress[i].store(0, std::memory_order_relaxed);
  }
  cache->seal_items(args.layer, *args.plan, &seal_);
  next_seal_.store(0, std::memory_order_relaxed);
  sealed_.store(0, std::memory_order_relaxed);
  next_.store(0, std::memory_order_release);
  return {};
}

int AttentionJob::count_blocks() const {
  int blocks = 0;
  for (const StreamPlan& stream : args_.plan->streams) {
    blocks += (stream.n_queries + query_block_ - 1) / query_block_;
  }
  return blocks;
}

// Several KV heads per item, as long as there are items for every thread to be busy to the end.
void AttentionJob::choose_items(size_t rows) {
  const WorkspaceLayout& w = workspace_->layout();
  const int block_rows_per_query = cache_->layer(args_.layer).shape.n_query_heads / n_kv_heads_;
  int largest_block = 1;
  for (const StreamPlan& stream : args_.plan->streams) {
    largest_block = std::max(largest_block, std::min(query_block_, stream.n_queries));
  }
  query_block_ = largest_block;
  const int rows_per_head = largest_block * block_rows_per_query;
  const bool fits = max_runs_ > 1 &&
                    rows * static_cast<size_t>(max_runs_) <= w.split_rows * static_cast<size_t>(w.max_runs);
  const int wanted = kItemsPerThread * workspace_->max_threads();
  item_heads_ = std::clamp(w.rows / rows_per_head, 1, std::min(kMaxItemHeads, n_kv_heads_));
  const auto chunks = [this] { return (n_kv_heads_ + item_heads_ - 1) / item_heads_; };
  while (item_heads_ > 1 && n_blocks_ * chunks() * (fits ? max_runs_ : 1) < wanted) {
    item_heads_ = (item_heads_ + 1) / 2;
  }
  n_chunks_ = chunks();
  // Small blocks of queries rather than idle threads: many rows are limited by arithmetic, not by reading.
  while (!fits && query_block_ * block_rows_per_query > kSmallBlockRows && n_blocks_ * n_chunks_ < wanted) {
    query_block_ = (query_block_ + 1) / 2;
    n_blocks_ = count_blocks();
  }
  const int groups = n_blocks_ * n_chunks_;
  split_ = fits && groups <= kMaxSplitGroups;
  n_items_ = groups * (split_ ? max_runs_ : 1);
}

void AttentionJob::seal(bool timed) {
  using Clock = std::chrono::steady_clock;
  const int n_seal = static_cast<int>(seal_.size());
  if (n_seal == 0) return;
  const Clock::time_point start = timed ? Clock::now() : Clock::time_point();
  for (int i = next_seal_.fetch_add(1); i < n_seal; i = next_seal_.fetch_add(1)) {
    cache_->seal_page(seal_[i]);
    sealed_.fetch_add(1, std::memory_order_release);
  }
  while (sealed_.load(std::memory_order_acquire) < n_seal) cpu_relax();
  if (!timed) return;
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  args_.seal_nanoseconds->fetch_add(static_cast<uint64_t>(spent.count()), std::memory_order_relaxed);
}

void AttentionJob::run(WorkShare share) {
  seal(args_.seal_nanoseconds != nullptr && share.ith == 0);
  AttentionRunner runner(this, share.ith);
  // Far from the end a thread takes the item after its current one as well, to ask for its tiles in time.
  const int take_two = split_ ? n_items_ - kItemsPerThread * share.nth : 0;
  for (int i = next_.fetch_add(1); i < n_items_;) {
    const int following = i < take_two ? next_.fetch_add(1) : n_items_;
    runner.run_item(i, following);
    i = i < take_two ? following : next_.fetch_add(1);
  }
}

}  // namespace kvant

// DQREF: double-precision attention over what the cache stores.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kvant/attention.h"
#include "kvant/half.h"

namespace kvant {
namespace {

// Both readings of every slot of one head and side of a stream.
struct Stored {
  std::vector<double> exact, tile;  // [n_slots][dim]
  std::vector<char> has_exact, has_tile;
};

Stored load(const SlotCache& cache, LayerId layer, Side side, StreamId stream, int head, int n_pages) {
  const LayerScheme& scheme = cache.layer(layer);
  const int dim = dim_of(scheme.shape, side);
  const size_t n = static_cast<size_t>(n_pages) * kPageTokens;
  Stored s;
  s.exact.assign(n * dim, 0.0);
  s.tile.assign(n * dim, 0.0);
  s.has_exact.assign(n, 0);
  s.has_tile.assign(n, 0);
  std::vector<float> row(static_cast<size_t>(scheme.shape.n_kv_heads) * dim);
  for (size_t slot = 0; slot < n; ++slot) {
    const SidePage& sp = cache.side_page(layer, stream, static_cast<int>(slot) / kPageTokens, side);
    const int t = static_cast<int>(slot) % kPageTokens;
    if (((sp.row_mask | sp.kept_mask) >> t) & 1) {
      s.has_exact[slot] =
          cache.read_slot(layer, side, stream, static_cast<int>(slot), false, row.data()).ok();
      std::copy_n(row.data() + static_cast<size_t>(head) * dim, dim, s.exact.data() + slot * dim);
    }
    if ((sp.tile_mask >> t) & 1) {
      s.has_tile[slot] = cache.read_slot(layer, side, stream, static_cast<int>(slot), true, row.data()).ok();
      std::copy_n(row.data() + static_cast<size_t>(head) * dim, dim, s.tile.data() + slot * dim);
    }
  }
  return s;
}

const double* pick(const Stored& s, size_t slot, int dim, bool exact_wanted) {
  const bool exact = s.has_exact[slot] && (exact_wanted || !s.has_tile[slot]);
  if (exact) return s.exact.data() + slot * dim;
  return s.has_tile[slot] ? s.tile.data() + slot * dim : nullptr;
}

struct Row {
  const float* q = nullptr;
  float* out = nullptr;
  int query = 0;
  int query_head = 0;
};

void attend(const SlotCache& cache, const AttentionArgs& args, const StreamPlan& stream, const Stored& keys,
            const Stored& values, const Row& row) {
  const LayerShape& shape = cache.layer(args.layer).shape;
  std::vector<double> logits;
  std::vector<const double*> rows;
  double top = args.sink_logits != nullptr ? args.sink_logits[row.query_head] : -HUGE_VAL;
  for (int page = 0; page < stream.n_pages; ++page) {
    const uint64_t sinks = cache.sink_mask(stream.stream, page);
    for (int t = 0; t < kPageTokens; ++t) {
      if (((stream.visible[static_cast<size_t>(row.query) * stream.n_pages + page] >> t) & 1) == 0) continue;
      const size_t slot = static_cast<size_t>(page) * kPageTokens + t;
      const bool exact = stream.in_window(row.query, page) || ((sinks >> t) & 1) != 0;
      const double* k = pick(keys, slot, shape.key_dim, exact);
      const double* v = pick(values, slot, shape.value_dim, exact);
      if (k == nullptr || v == nullptr) continue;
      double x = 0;
      for (int c = 0; c < shape.key_dim; ++c) x += static_cast<double>(row.q[c]) * k[c];
      x *= args.scale;
      if (args.soft_cap != 0.0f) x = args.soft_cap * std::tanh(x / args.soft_cap);
      if (stream.has_bias) {
        const double slope = args.alibi_slopes != nullptr ? args.alibi_slopes[row.query_head] : 1.0;
        x += slope * half_to_float(stream.mask[static_cast<size_t>(row.query) * stream.mask_stride + slot]);
      }
      logits.push_back(x);
      rows.push_back(v);
      top = std::max(top, x);
    }
  }
  double sum = args.sink_logits != nullptr ? std::exp(args.sink_logits[row.query_head] - top) : 0.0;
  std::vector<double> acc(shape.value_dim, 0.0);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double w = std::exp(logits[i] - top);
    sum += w;
    for (int c = 0; c < shape.value_dim; ++c) acc[c] += w * rows[i][c];
  }
  for (int c = 0; c < shape.value_dim; ++c) row.out[c] = sum > 0 ? static_cast<float>(acc[c] / sum) : 0.0f;
}

}  // namespace

Status reference_attention(const SlotCache& cache, const AttentionArgs& args) {
  const LayerShape& shape = cache.layer(args.layer).shape;
  const int group = shape.n_query_heads / shape.n_kv_heads;
  for (size_t s = 0; s < args.plan->streams.size(); ++s) {
    const StreamPlan& stream = args.plan->streams[s];
    for (int head = 0; head < shape.n_kv_heads; ++head) {
      const Stored keys = load(cache, args.layer, Side::kKey, stream.stream, head, stream.n_pages);
      const Stored values = load(cache, args.layer, Side::kValue, stream.stream, head, stream.n_pages);
      for (int n = 0; n < stream.n_queries; ++n) {
        for (int g = 0; g < group; ++g) {
          const int h = head * group + g;
          attend(cache, args, stream, keys, values,
                 {.q = args.q + s * args.q_stream + n * args.q_token + h * args.q_head,
                  .out = args.out + s * args.out_stream + n * args.out_token + h * args.out_head,
                  .query = n,
                  .query_head = h});
        }
      }
    }
  }
  return {};
}

}  // namespace kvant

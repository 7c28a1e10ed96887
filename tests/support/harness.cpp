#include "support/harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "cache/side_page.h"
#include "formats/family.h"
#include "formats/spec.h"

namespace kvant::test {
namespace {

constexpr uint16_t kHidden = 0xFC00;

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Sum of four uniforms, scaled to variance 1: close enough to Gaussian, and the same everywhere.
float gaussian(uint64_t* state) {
  const uint64_t bits = mix((*state)++);
  int sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int>((bits >> (16 * i)) & 0xFFFF);
  return (static_cast<float>(sum) / 65535.0f - 2.0f) * 1.7320508f;
}

float round_half(float x) { return half_to_float(float_to_half(x)); }

uint64_t hash_bytes(uint64_t h, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001B3u;
  return h;
}

size_t tile_bytes(const LayerScheme& layer, Side side) {
  return side == Side::kKey ? layer.key_tile_bytes() : layer.value_tile_bytes();
}

}  // namespace

Content random_content(uint64_t seed, float outlier) {
  return [seed, outlier](int layer, const LayerShape& shape, int seq, int pos) {
    uint64_t state = mix(mix(mix(seed) + static_cast<uint64_t>(layer)) + static_cast<uint64_t>(seq)) +
                     static_cast<uint64_t>(pos) * 0x100000;
    TokenRows rows;
    rows.q.resize(static_cast<size_t>(shape.n_query_heads) * shape.key_dim);
    rows.k.resize(static_cast<size_t>(shape.n_kv_heads) * shape.key_dim);
    rows.v.resize(static_cast<size_t>(shape.n_kv_heads) * shape.value_dim);
    for (auto* x : {&rows.q, &rows.k, &rows.v}) {
      for (float& value : *x) value = gaussian(&state);
    }
    for (int head = 0; head < shape.n_kv_heads; ++head) {
      rows.k[static_cast<size_t>(head) * shape.key_dim + 5] += outlier;
      rows.k[static_cast<size_t>(head) * shape.key_dim + shape.key_dim / 2] += outlier;
    }
    return rows;
  };
}

Content remembered(Content content) {
  auto known = std::make_shared<std::map<std::tuple<int, int, int>, TokenRows>>();
  return [known, content = std::move(content)](int layer, const LayerShape& shape, int seq, int pos) {
    const auto [it, is_new] = known->try_emplace({layer, seq, pos});
    if (is_new) it->second = content(layer, shape, seq, pos);
    return it->second;
  };
}

Content tag_content() {
  return [](int, const LayerShape& shape, int seq, int pos) {
    TokenRows rows;
    rows.q.assign(static_cast<size_t>(shape.n_query_heads) * shape.key_dim, 1.0f);
    rows.k.assign(static_cast<size_t>(shape.n_kv_heads) * shape.key_dim, 0.0f);
    rows.v.assign(static_cast<size_t>(shape.n_kv_heads) * shape.value_dim,
                  static_cast<float>(1000 * seq + pos));
    return rows;
  };
}

void in_threads(int threads, const std::function<void(WorkShare)>& body) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads) - 1);
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&body, i, threads] { body({.ith = i, .nth = threads}); });
  }
  body({.ith = 0, .nth = threads});
  for (std::thread& t : others) t.join();
}

void vary_key_widths(int layer, LayerScheme* scheme) {
  for (size_t h = 0; h < scheme->heads.size(); ++h) {
    Format& format = scheme->heads[h].key_format;
    Result<FormatSpec> spec = format_spec_from_id(format.id());
    if (!spec.ok() || spec.value().family->prefix != "t" || spec.value().asymmetric) {
      ADD_FAILURE() << format.name() << " is not symmetric or not of family t";
      return;
    }
    uint8_t* widths = spec.value().widths.data();
    const int n = spec.value().n_widths;
    const int narrowest = *std::min_element(widths, widths + n);
    for (int b = 0; b < n; ++b) {
      const int more = (7 * static_cast<int>(h) + 3 * b + 5 * layer) % (kMaxBits + 1 - narrowest);
      widths[b] = static_cast<uint8_t>(narrowest + more);
    }
    Result<Format> made = Format::parse(format_spec_name(spec.value()), Side::kKey, scheme->shape.key_dim);
    if (!made.ok()) {
      ADD_FAILURE() << made.status().message();
      return;
    }
    format = std::move(made.value());
  }
}

Engine::Engine(EngineOptions options, Content content)
    : options_(std::move(options)), content_(std::move(content)) {
  Result<Scheme> scheme = parse_scheme(options_.scheme);
  if (!scheme.ok()) {
    ADD_FAILURE() << scheme.status().message();
    return;
  }
  SlotCache::Options cache = {.layers = {},
                              .n_slots = options_.n_slots,
                              .n_streams = options_.n_streams,
                              .window = scheme.value().window,
                              .sinks = scheme.value().sinks,
                              .max_threads = options_.threads,
                              .memory = {.limit_bytes = options_.limit_bytes, .poison = options_.poison}};
  for (size_t i = 0; i < options_.shapes.size(); ++i) {
    Result<Scheme> own = options_.layer_schemes.empty() ? scheme : parse_scheme(options_.layer_schemes[i]);
    if (!own.ok()) {
      ADD_FAILURE() << own.status().message();
      return;
    }
    Result<LayerScheme> layer = resolve_layer(own.value(), options_.shapes[i]);
    if (!layer.ok()) {
      ADD_FAILURE() << layer.status().message();
      return;
    }
    if (options_.adjust) options_.adjust(static_cast<int>(i), &layer.value());
    cache.layers.push_back(std::move(layer.value()));
  }
  Result<std::unique_ptr<SlotCache>> made = SlotCache::create(std::move(cache));
  if (!made.ok()) {
    ADD_FAILURE() << made.status().message();
    return;
  }
  cache_ = std::move(made.value());
  Result<std::unique_ptr<AttentionWorkspace>> workspace = AttentionWorkspace::create(cache_.get());
  if (!workspace.ok()) {
    ADD_FAILURE() << workspace.status().message();
    return;
  }
  workspace_ = std::move(workspace.value());
  const auto slots = static_cast<size_t>(cache_->n_pages()) * kPageTokens;
  owners_.assign(static_cast<size_t>(options_.n_streams), std::vector<Owner>(slots));
}

Engine::~Engine() = default;

std::optional<float> Engine::mask_value(const Entry& query, int slot, const Look& look) const {
  const Owner& owner = owners_[query.stream][slot];
  const int distance = query.pos - owner.pos;
  if (owner.seq != query.seq || distance < 0) return std::nullopt;
  if (look.sliding_window > 0 && distance >= look.sliding_window) return std::nullopt;
  if (!look.alibi_slopes.empty()) return static_cast<float>(-distance);
  if (look.bias) return round_half(static_cast<float>(-distance) / 8.0f);
  return 0.0f;
}

Status Engine::run(const std::vector<Entry>& entries, const Look& look, bool write,
                   std::vector<Outputs>* out) {
  out->assign(options_.shapes.size(), Outputs());
  std::vector<int32_t> layers(options_.shapes.size());
  for (size_t i = 0; i < layers.size(); ++i) layers[i] = static_cast<int32_t>(i);
  const int per_stream = cache_->n_pages() * kPageTokens;
  std::vector<int64_t> slots;
  for (const Entry& e : entries) slots.push_back(static_cast<int64_t>(e.stream) * per_stream + e.slot);
  if (write) {
    KVANT_RETURN_IF_ERROR(cache_->begin_batch(slots, layers));
    for (const Entry& e : entries) owners_[e.stream][e.slot] = {.seq = e.seq, .pos = e.pos};
  }
  std::vector<std::vector<int>> by_stream(options_.n_streams);
  for (size_t i = 0; i < entries.size(); ++i) by_stream[entries[i].stream].push_back(static_cast<int>(i));
  std::erase_if(by_stream, [](const std::vector<int>& list) { return list.empty(); });
  std::vector<std::vector<uint16_t>> masks(by_stream.size());
  std::vector<std::vector<int32_t>> own(by_stream.size());
  std::vector<StreamQueries> queries;
  for (size_t s = 0; s < by_stream.size(); ++s) {
    const int stream = entries[by_stream[s].front()].stream;
    int n_slots = 0;
    for (int i = 0; i < per_stream; ++i) {
      if (owners_[stream][i].seq >= 0) n_slots = i + 1;
    }
    for (const int i : by_stream[s]) {
      own[s].push_back(write ? entries[i].slot : -1);
      for (int slot = 0; slot < n_slots; ++slot) {
        const std::optional<float> value = mask_value(entries[i], slot, look);
        masks[s].push_back(value ? float_to_half(*value) : kHidden);
      }
    }
    queries.push_back({.stream = StreamId{stream},
                       .n_queries = static_cast<int>(by_stream[s].size()),
                       .n_slots = n_slots,
                       .mask = masks[s].data(),
                       .mask_stride = static_cast<size_t>(n_slots),
                       .own_slot = own[s]});
  }
  BatchPlan plan;
  KVANT_RETURN_IF_ERROR(cache_->plan(queries, layers, &plan));
  for (const int32_t layer : layers) {
    if (write) {
      const LayerShape& shape = options_.shapes[layer];
      for (const Side side : kSides) {
        const size_t width = static_cast<size_t>(shape.n_kv_heads) * dim_of(shape, side);
        std::vector<float> rows;
        for (const Entry& e : entries) {
          const TokenRows token = content_(layer, shape, e.seq, e.pos);
          const std::vector<float>& x = side == Side::kKey ? token.k : token.v;
          rows.insert(rows.end(), x.begin(), x.end());
          std::vector<float>& kept = originals_[{layer, static_cast<int>(side), e.stream, e.slot}];
          kept.resize(width);
          std::transform(x.begin(), x.end(), kept.begin(), round_half);
        }
        in_threads(options_.threads, [&](WorkShare share) {
          cache_->write(LayerId{layer}, side, slots, rows.data(), width, share);
        });
      }
    }
    if (look.seal_only) {
      std::vector<SealItem> items;
      cache_->seal_items(LayerId{layer}, plan, &items);
      for (const SealItem& item : items) cache_->seal_page(item);
    } else {
      run_layer(layer, by_stream, entries, look, plan, &(*out)[layer]);
    }
  }
  cache_->end_batch(plan);
  return cache_->take_error();
}

void Engine::run_layer(int layer, const std::vector<std::vector<int>>& by_stream,
                       const std::vector<Entry>& entries, const Look& look, const BatchPlan& plan,
                       Outputs* out) {
  const LayerShape& shape = options_.shapes[layer];
  size_t most = 0;
  for (const auto& list : by_stream) most = std::max(most, list.size());
  const size_t q_token = static_cast<size_t>(shape.n_query_heads) * shape.key_dim;
  const size_t out_token = static_cast<size_t>(shape.n_query_heads) * shape.value_dim;
  std::vector<float> q(q_token * most * by_stream.size());
  for (size_t s = 0; s < by_stream.size(); ++s) {
    for (size_t i = 0; i < by_stream[s].size(); ++i) {
      const Entry& e = entries[by_stream[s][i]];
      const TokenRows token = content_(layer, shape, e.seq, e.pos);
      std::copy(token.q.begin(), token.q.end(), q.begin() + static_cast<ptrdiff_t>((s * most + i) * q_token));
    }
  }
  std::vector<float> result(out_token * most * by_stream.size(), std::nanf(""));
  AttentionArgs args = {
      .layer = LayerId{layer},
      .plan = &plan,
      .q = q.data(),
      .q_head = static_cast<size_t>(shape.key_dim),
      .q_token = q_token,
      .q_stream = most * q_token,
      .out = result.data(),
      .out_head = static_cast<size_t>(shape.value_dim),
      .out_token = out_token,
      .out_stream = most * out_token,
      .scale = look.scale != 0 ? look.scale : 1.0f / std::sqrt(static_cast<float>(shape.key_dim)),
      .soft_cap = look.soft_cap,
      .alibi_slopes = look.alibi_slopes.empty() ? nullptr : look.alibi_slopes.data(),
      .sink_logits = look.sink_logits.empty() ? nullptr : look.sink_logits.data(),
      .path = look.path,
      .skip_below = look.skip_below};
  const Status prepared = job_.prepare(cache_.get(), workspace_.get(), args);
  EXPECT_TRUE(prepared.ok()) << prepared.message();
  in_threads(look.threads > 0 ? look.threads : options_.threads, [&](WorkShare share) { job_.run(share); });
  auto scatter = [&](std::vector<std::vector<float>>* rows) {
    rows->resize(entries.size());
    for (size_t s = 0; s < by_stream.size(); ++s) {
      for (size_t i = 0; i < by_stream[s].size(); ++i) {
        const auto at = result.begin() + static_cast<ptrdiff_t>((s * most + i) * out_token);
        (*rows)[by_stream[s][i]].assign(at, at + static_cast<ptrdiff_t>(out_token));
      }
    }
  };
  scatter(&out->engine);
  if (look.dqref) {
    const Status status = reference_attention(*cache_, args);
    EXPECT_TRUE(status.ok()) << status.message();
    scatter(&out->dqref);
  }
  if (look.ref) {
    for (const Entry& e : entries) out->ref.push_back(attend_original(layer, e, look));
  }
}

std::vector<float> Engine::attend_original(int layer, const Entry& entry, const Look& look) const {
  const LayerShape& shape = options_.shapes[layer];
  const TokenRows token = content_(layer, shape, entry.seq, entry.pos);
  const int group = shape.n_query_heads / shape.n_kv_heads;
  const double scale =
      look.scale != 0 ? look.scale : static_cast<double>(1.0f / std::sqrt(static_cast<float>(shape.key_dim)));
  std::vector<float> out;
  for (int head = 0; head < shape.n_query_heads; ++head) {
    const size_t kv = static_cast<size_t>(head / group);
    std::vector<double> logits;
    std::vector<const float*> values;
    double top = look.sink_logits.empty() ? -HUGE_VAL : look.sink_logits[head];
    for (int slot = 0; slot < static_cast<int>(owners_[entry.stream].size()); ++slot) {
      const std::optional<float> mask = mask_value(entry, slot, look);
      if (!mask) continue;
      const float* k = originals_.at({layer, 0, entry.stream, slot}).data() + kv * shape.key_dim;
      values.push_back(originals_.at({layer, 1, entry.stream, slot}).data() + kv * shape.value_dim);
      double x = 0;
      for (int c = 0; c < shape.key_dim; ++c) {
        x += static_cast<double>(token.q[static_cast<size_t>(head) * shape.key_dim + c]) * k[c];
      }
      x *= scale;
      if (look.soft_cap != 0.0f) x = look.soft_cap * std::tanh(x / look.soft_cap);
      x += (look.alibi_slopes.empty() ? 1.0 : look.alibi_slopes[head]) * *mask;
      logits.push_back(x);
      top = std::max(top, x);
    }
    double sum = look.sink_logits.empty() ? 0.0 : std::exp(look.sink_logits[head] - top);
    std::vector<double> acc(shape.value_dim, 0.0);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double w = std::exp(logits[i] - top);
      sum += w;
      for (int c = 0; c < shape.value_dim; ++c) acc[c] += w * values[i][c];
    }
    for (const double a : acc) out.push_back(sum > 0 ? static_cast<float>(a / sum) : 0.0f);
  }
  return out;
}

Status Engine::step(const std::vector<Entry>& entries, const Look& look, std::vector<Outputs>* out) {
  return run(entries, look, true, out);
}

Outputs Engine::append(int stream, int seq, int first_pos, int count, int chunk, const Look& look) {
  Outputs all;
  for (int at = 0; at < count; at += chunk) {
    std::vector<Entry> entries;
    for (int i = at; i < std::min(count, at + chunk); ++i) {
      entries.push_back({.stream = stream, .seq = seq, .pos = first_pos + i, .slot = first_pos + i});
    }
    std::vector<Outputs> out;
    const Status status = step(entries, look, &out);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) return all;
    for (auto member : {&Outputs::engine, &Outputs::dqref, &Outputs::ref}) {
      auto& rows = out[0].*member;
      (all.*member).insert((all.*member).end(), rows.begin(), rows.end());
    }
  }
  return all;
}

Outputs Engine::attend(const std::vector<Entry>& entries, const Look& look) {
  std::vector<Outputs> out;
  const Status status = run(entries, look, false, &out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out.empty() ? Outputs() : std::move(out[0]);
}

std::vector<float> Engine::original(int layer, Side side, int stream, int slot) const {
  return originals_.at({layer, static_cast<int>(side), stream, slot});
}

void Engine::copy_stream(int from, int to) {
  const Status status = cache_->copy_stream(StreamId{from}, StreamId{to});
  EXPECT_TRUE(status.ok()) << status.message();
  owners_[to] = owners_[from];
  for (size_t layer = 0; layer < options_.shapes.size(); ++layer) {
    for (int side = 0; side < 2; ++side) {
      for (int slot = 0; slot < static_cast<int>(owners_[to].size()); ++slot) {
        const auto it = originals_.find({static_cast<int>(layer), side, from, slot});
        if (it == originals_.end()) continue;
        originals_[{static_cast<int>(layer), side, to, slot}] = it->second;
      }
    }
  }
}

void Engine::clear() {
  cache_->clear();
  for (auto& stream : owners_) std::fill(stream.begin(), stream.end(), Owner());
  originals_.clear();
}

}  // namespace kvant::test

namespace kvant {
struct SlotCacheTestAccess {
  static bool settled(const SlotCache& cache, int layer, int stream, int page) {
    return cache.settled(layer, stream, page);
  }
};
}  // namespace kvant

namespace kvant::test {

int Engine::wrongly_settled_pages() const {
  int wrong = 0;
  for (int layer = 0; layer < cache_->n_layers(); ++layer) {
    for (int stream = 0; stream < options_.n_streams; ++stream) {
      for (int page = 0; page < cache_->n_pages(); ++page) {
        if (!SlotCacheTestAccess::settled(*cache_, layer, stream, page)) continue;
        for (const Side side : kSides) {
          const SidePage& sp = cache_->side_page(LayerId{layer}, StreamId{stream}, page, side);
          if (!side_quantized(cache_->layer(LayerId{layer}), side)) continue;
          wrong += sp.tile_mask == 0 || sp.rows != nullptr ? 1 : 0;
        }
      }
    }
  }
  return wrong;
}

MemoryReport Engine::walk() const {
  MemoryReport report;
  for (int layer = 0; layer < cache_->n_layers(); ++layer) {
    const LayerScheme& scheme = cache_->layer(LayerId{layer});
    for (int stream = 0; stream < options_.n_streams; ++stream) {
      for (int page = 0; page < cache_->n_pages(); ++page) {
        for (const Side side : kSides) {
          const SidePage& sp = cache_->side_page(LayerId{layer}, StreamId{stream}, page, side);
          const size_t row = static_cast<size_t>(scheme.shape.n_kv_heads) * dim_of(scheme.shape, side) * 2;
          if (sp.tiles != nullptr) report.tile_bytes += tile_bytes(scheme, side);
          if (sp.rows != nullptr) report.exact_row_bytes += row * kPageTokens;
          if (sp.kept != nullptr) {
            report.exact_row_bytes += align_up(row * static_cast<size_t>(std::popcount(sp.kept_layout)), 64);
          }
        }
      }
    }
  }
  return report;
}

double relative_error(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size() || a.empty()) return HUGE_VAL;
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() || a[i].empty()) return HUGE_VAL;
    for (size_t c = 0; c < a[i].size(); ++c) {
      const double d = static_cast<double>(a[i][c]) - b[i][c];
      if (!std::isfinite(d)) return HUGE_VAL;
      error += d * d;
      norm += static_cast<double>(b[i][c]) * b[i][c];
    }
  }
  return norm > 0 ? std::sqrt(error / norm) : (error > 0 ? HUGE_VAL : 0.0);
}

double worst_row_error(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size() || a.empty()) return HUGE_VAL;
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, relative_error({a[i]}, {b[i]}));
  return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size() || a.empty()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

uint64_t stream_hash(const SlotCache& cache, int stream) {
  uint64_t h = 0xCBF29CE484222325u;
  for (int layer = 0; layer < cache.n_layers(); ++layer) {
    const LayerScheme& scheme = cache.layer(LayerId{layer});
    for (int page = 0; page < cache.n_pages(); ++page) {
      for (const Side side : kSides) {
        const SidePage& sp = cache.side_page(LayerId{layer}, StreamId{stream}, page, side);
        const uint64_t masks[] = {sp.tile_mask, sp.row_mask, sp.kept_mask, sp.kept_layout,
                                  cache.sink_mask(StreamId{stream}, page)};
        h = hash_bytes(h, masks, sizeof masks);
        if (sp.tile_mask != 0) h = hash_bytes(h, sp.tiles, tile_bytes(scheme, side));
        const size_t row = static_cast<size_t>(dim_of(scheme.shape, side)) * 2;
        const auto kept_rows = static_cast<size_t>(std::popcount(sp.kept_layout));
        for (int head = 0; head < scheme.shape.n_kv_heads; ++head) {
          for (int t = 0; t < kPageTokens; ++t) {
            if ((sp.row_mask >> t) & 1) {
              h = hash_bytes(h, sp.rows + (static_cast<size_t>(head) * kPageTokens + t) * row / 2, row);
            }
          }
          if (sp.kept_mask != 0) h = hash_bytes(h, sp.kept + head * kept_rows * row / 2, kept_rows * row);
        }
      }
    }
  }
  return h;
}

// The fused path rounds a query to 8 bits per band (13 bits for codes of 7 and 8 bits) and the weights of a
// page, times their token scales, to 8 (12) bits. For Gaussian queries the largest of a band is about 3
// standard deviations, so rounding adds 3 / 127 / sqrt(12) = 0.7 % noise to logits of size 1, and that to the
// output. Weights of such logits have a maximum of about 4 times their root mean square: 4 / 255 / sqrt(12) =
// 0.45 %. Asymmetric grids multiply codes that are not centred, which are 2 to 3 times larger.
double engine_tolerance(const SlotCache& cache, int layer, AttentionPath path) {
  double square = 1e-5 * 1e-5;
  if (path != AttentionPath::kFused) return std::sqrt(square);
  for (const Side side : {Side::kKey, Side::kValue}) {
    double worst = 0;
    for (const HeadScheme& head : cache.layer(LayerId{layer}).heads) {
      const Format& format = format_of(head, side);
      if (format.exact()) continue;
      int narrowest = 8;
      for (int b = 0; b < format.layout().n_bands; ++b) {
        narrowest = std::min<int>(narrowest, format.layout().bands[b].bits);
      }
      double noise = narrowest >= 7 ? 4e-4 : 1.0e-2;
      if (format.layout().asymmetric) noise *= 3;
      worst = std::max(worst, noise);
    }
    square += worst * worst;
  }
  return std::sqrt(square);
}

}  // namespace kvant::test

// Time of the attention kernels per cached token, on tiles that stay in cache. s/token is the number to
// read. Names: isa/what/width/head_dim/rows.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "simd/kernels.h"
#include "unit/kernel_tiles.h"

namespace kvant {
namespace {

using simd::KernelTable;

struct Problem {
  test::TileSpec key, value;
  int rows = 4;
  int tiles = 16;
};

test::TileSpec spec_of(Side side, int dim, int bits, int bands, ScaleType scale, bool channel) {
  test::TileSpec spec;
  spec.side = side;
  spec.head_dim = dim;
  for (int b = 0; b < bands; ++b) spec.bands.push_back({dim / bands, bits});
  spec.token_scale = channel ? ScaleType::kNone : scale;
  spec.channel_scale = spec.channel_centre = channel;
  return spec;
}

class Fixture {
 public:
  Fixture(const KernelTable& table, const Problem& p)
      : kernels_(*table.attention),
        key_(make_layout(p.key)),
        value_(make_layout(p.value)),
        rows_(p.rows),
        tiles_(p.tiles),
        keys_(static_cast<size_t>(key_.tile_bytes) * p.tiles),
        values_(static_cast<size_t>(value_.tile_bytes) * p.tiles),
        prepared_memory_(simd::prepared_query_bytes(key_, p.rows)),
        workspace_(simd::pv_workspace_bytes(value_, p.rows)),
        q_(static_cast<size_t>(p.rows) * p.key.head_dim),
        base_(p.rows, 0.0f),
        rescale_(p.rows, 1.0f),
        sums_(static_cast<size_t>(kStrip) * p.rows),
        live_(static_cast<size_t>(kStrip) * p.rows, ~uint64_t{0}),
        state_(p.rows),
        logits_(static_cast<size_t>(kStrip) * p.rows * kPageTokens),
        weights_(static_cast<size_t>(kStrip) * p.rows * kPageTokens),
        acc_(static_cast<size_t>(p.rows) * p.value.head_dim) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    for (float& x : q_) x = normal(rng) * 0.02f;
    for (float& x : weights_) x = std::exp2(-4.0f * std::abs(normal(rng)));
    for (int i = 0; i < tiles_; ++i) {
      test::fill_tile(key_, rng, key(i));
      test::fill_tile(value_, rng, value(i));
    }
    simd::place_prepared_queries(key_, rows_, prepared_memory_.data(), &prepared_);
    kernels_.prepare_queries(key_, q_.data(), rows_, &prepared_);
  }
  std::byte* key(int i) { return keys_.data() + static_cast<size_t>(i) * key_.tile_bytes; }
  std::byte* value(int i) { return values_.data() + static_cast<size_t>(i) * value_.tile_bytes; }
  // Strips of kStrip tiles from tile i on, as the driver visits them.
  static constexpr int kStrip = 4;
  void scores(int i) {
    simd::KeyTask tasks[kStrip];
    for (int n = 0; n < kStrip; ++n) {
      tasks[n] = {.layout = &key_,
                  .tile = key(i + n),
                  .next = key(i + n),
                  .queries = &prepared_,
                  .base = base_.data(),
                  .live = live_.data(),
                  .logits = logits_.data() + static_cast<size_t>(n) * rows_ * kPageTokens};
    }
    kernels_.qk_tiles(tasks, kStrip);
  }
  void softmax() {
    const simd::LogitStrip strip = {.logits = logits_.data(),
                                    .page_stride = static_cast<size_t>(rows_) * kPageTokens,
                                    .live = live_.data(),
                                    .live_stride = static_cast<size_t>(rows_),
                                    .pages = kStrip,
                                    .rows = rows_,
                                    .sums = sums_.data(),
                                    .sum_stride = static_cast<size_t>(rows_)};
    kernels_.softmax(strip, state_.data(), rescale_.data());
  }
  void sums(int i, const float* weights) {
    simd::ValueTask tasks[kStrip];
    for (int n = 0; n < kStrip; ++n) {
      tasks[n] = {.layout = &value_,
                  .tile = value(i + n),
                  .next = value(i + n),
                  .weights = weights + static_cast<size_t>(n) * rows_ * kPageTokens,
                  .rows = rows_,
                  .live = live_.data(),
                  .acc = acc_.data()};
    }
    kernels_.pv_tiles(tasks, kStrip, workspace_.data());
  }
  void tile(int i) {
    scores(i);
    softmax();
    kernels_.rescale(acc_.data(), value_.head_dim, rows_, rescale_.data());
    sums(i, logits_.data());
  }
  // Scores, then weighted sums, of the first tiles.
  std::vector<float> sample() {
    scores(0);
    std::vector<float> out = logits_;
    std::fill(acc_.begin(), acc_.end(), 0.0f);
    sums(0, weights_.data());
    out.insert(out.end(), acc_.begin(), acc_.end());
    return out;
  }
  const float* weights() const { return weights_.data(); }
  int tiles() const { return tiles_; }

 private:
  const simd::AttentionKernels& kernels_;
  TileLayout key_, value_;
  int rows_, tiles_;
  test::AlignedBytes keys_, values_, prepared_memory_, workspace_;
  std::vector<float> q_, base_, rescale_, sums_;
  std::vector<uint64_t> live_;
  std::vector<simd::RowState> state_;
  std::vector<float> logits_, weights_, acc_;
  simd::PreparedQueries prepared_;
};

// Integer sums are equal on all targets, so only float rounding may differ.
bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0.0f, difference = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    difference = std::max(difference, std::abs(a[i] - b[i]));
  }
  return difference <= 1e-4f * largest;
}

enum class What { kScores, kSums, kTile };

void run_tiles(benchmark::State& state, const KernelTable* table, Problem problem, What what) {
  Fixture fixture(*table, problem);
  if (!agree(fixture.sample(), Fixture(*simd::available_kernels().front(), problem).sample())) {
    state.SkipWithError("differs from the scalar kernels");
    return;
  }
  for (auto _ : state) {
    for (int i = 0; i < fixture.tiles(); i += Fixture::kStrip) {
      if (what == What::kScores) fixture.scores(i);
      if (what == What::kSums) fixture.sums(i, fixture.weights());
      if (what == What::kTile) fixture.tile(i);
    }
    benchmark::ClobberMemory();
  }
  const double tokens = static_cast<double>(state.iterations()) * fixture.tiles() * kPageTokens;
  state.SetItemsProcessed(static_cast<int64_t>(tokens));
  state.counters["s/token"] =
      benchmark::Counter(tokens, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void run_page(const KernelTable& table, const uint16_t* page, int dim, bool scores,
              const std::vector<float>& in, std::vector<float>* out) {
  const int rows = static_cast<int>((scores ? in.size() : out->size()) / dim);
  const std::vector<uint64_t> live(rows, ~uint64_t{0});
  const auto run = scores ? table.attention->qk_rows : table.attention->pv_rows;
  run(page, page, dim, kPageTokens, false, dim, in.data(), rows, live.data(), out->data());
}

void run_rows(benchmark::State& state, const KernelTable* table, int dim, int rows, bool scores) {
  std::mt19937 rng(7);
  constexpr int kPages = 16;
  std::vector<uint16_t> words(static_cast<size_t>(kPages) * kPageTokens * dim);
  for (uint16_t& w : words) w = float_to_half(static_cast<float>(rng() % 4096) / 1024.0f - 2.0f);
  std::vector<float> in(static_cast<size_t>(rows) * (scores ? dim : kPageTokens));
  for (float& x : in) x = static_cast<float>(rng() % 1024) / 1024.0f;
  std::vector<float> out(static_cast<size_t>(rows) * (scores ? kPageTokens : dim), 0.0f), expected = out;
  run_page(*table, words.data(), dim, scores, in, &out);
  run_page(*simd::available_kernels().front(), words.data(), dim, scores, in, &expected);
  if (!agree(out, expected)) {
    state.SkipWithError("differs from the scalar kernels");
    return;
  }
  for (auto _ : state) {
    for (int i = 0; i < kPages; ++i) {
      run_page(*table, words.data() + static_cast<size_t>(i) * kPageTokens * dim, dim, scores, in, &out);
    }
    benchmark::ClobberMemory();
  }
  const double tokens = static_cast<double>(state.iterations()) * kPages * kPageTokens;
  state.counters["s/token"] =
      benchmark::Counter(tokens, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void add(const std::string& name, const KernelTable* table, const Problem& problem, What what) {
  benchmark::RegisterBenchmark((std::string(table->name) + "/" + name).c_str(), run_tiles, table, problem,
                               what);
}

void register_table(const KernelTable* table) {
  const auto problem = [](int dim, int bits, int bands, int rows, bool channel) {
    return Problem{spec_of(Side::kKey, dim, bits, bands, ScaleType::kLog4, channel),
                   spec_of(Side::kValue, dim, bits, bands, ScaleType::kLog4, channel), rows, 16};
  };
  for (int bits = 2; bits <= 8; ++bits) {
    const std::string tail = "/" + std::to_string(bits) + "bit/d128/rows4";
    add("scores" + tail, table, problem(128, bits, 1, 4, false), What::kScores);
    add("sums" + tail, table, problem(128, bits, 1, 4, false), What::kSums);
  }
  for (int bands : {1, 2, 4}) {
    add("tile/4bit/d128/rows4/bands" + std::to_string(bands), table, problem(128, 4, bands, 4, false),
        What::kTile);
  }
  add("tile/4bit/d128/rows4/channel", table, problem(128, 4, 1, 4, true), What::kTile);
  add("scores/4bit/d128/rows4/channel", table, problem(128, 4, 1, 4, true), What::kScores);
  add("tile/4bit/d64/rows3", table, problem(64, 4, 1, 3, false), What::kTile);
  add("tile/8bit/d64/rows3", table, problem(64, 8, 1, 3, false), What::kTile);
  add("tile/4bit/d128/rows1", table, problem(128, 4, 1, 1, false), What::kTile);
  add("scores/4bit/d128/rows64", table, problem(128, 4, 1, 64, false), What::kScores);
  add("sums/4bit/d128/rows64", table, problem(128, 4, 1, 64, false), What::kSums);
  add("tile/4bit/d128/rows64", table, problem(128, 4, 1, 64, false), What::kTile);
  for (int rows : {4, 64}) {
    for (bool scores : {true, false}) {
      const std::string name = std::string(table->name) + "/" + (scores ? "scores" : "sums") +
                               "/f16/d128/rows" + std::to_string(rows);
      benchmark::RegisterBenchmark(name.c_str(), run_rows, table, 128, rows, scores);
    }
  }
}

const bool kRegistered = [] {
  for (const KernelTable* table : simd::available_kernels()) {
    if (std::string(table->name) != "scalar") register_table(table);
  }
  return true;
}();

}  // namespace
}  // namespace kvant

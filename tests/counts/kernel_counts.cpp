// Six kernels on fixed inputs, for a count of instructions. Under callgrind each measured call is dumped as
// "TARGET KERNEL" (tests/e2e/instruction_counts.sh reads the dumps); alone it only runs them.
#include <valgrind/callgrind.h>

#include <deque>
#include <random>
#include <string>
#include <vector>

#include "simd/kernels.h"
#include "unit/kernel_tiles.h"

namespace kvant {
namespace {

using simd::KernelTable;

constexpr int kDim = 128;
constexpr int kRows = 4;
// The first pages of a call may be cheaper or dearer than others; a decode step reads many.
constexpr int kTiles = 8;

class Counts {
 public:
  explicit Counts(const KernelTable& table)
      : table_(table), attention_(*table.attention), live_(kRows, ~uint64_t{0}), q_(kRows * kDim) {
    for (float& x : q_) x = value();
  }

  void run() {
    scores("scores-4bit", {{kDim, 4}});
    scores("scores-3bit-bands", {{32, 3}, {32, 3}, {32, 3}, {32, 3}});
    sums();
    exact_scores();
    encode();
    hadamard();
  }

 private:
  // Multiples of 1/1024 in [-2, 2): the same on every machine.
  float value() { return static_cast<float>(rng_() % 4096) / 1024.0f - 2.0f; }

  template <typename F>
  void measure(const char* kernel, const F& call) {
    call();  // lazily made tables and first touches are not counted
    // Callgrind reads the name after the request.
    const std::string& name = names().emplace_back(std::string(table_.name) + " " + kernel);
    CALLGRIND_ZERO_STATS;
    call();
    CALLGRIND_DUMP_STATS_AT(name.c_str());
  }

  void scores(const char* name, std::vector<std::pair<int, int>> bands) {
    test::TileSpec spec;
    spec.bands = std::move(bands);
    const TileLayout layout = test::make_layout(spec);
    test::AlignedBytes tiles(static_cast<size_t>(layout.tile_bytes) * kTiles);
    for (int i = 0; i < kTiles; ++i) fill(layout, tiles.data() + static_cast<size_t>(i) * layout.tile_bytes);
    test::AlignedBytes memory(simd::prepared_query_bytes(layout, kRows));
    simd::PreparedQueries prepared;
    simd::place_prepared_queries(layout, kRows, memory.data(), &prepared);
    attention_.prepare_queries(layout, q_.data(), kRows, &prepared);
    const std::vector<float> base(kRows, 0.0f);
    std::vector<float> logits(static_cast<size_t>(kRows) * kPageTokens);
    measure(name, [&] {
      for (int i = 0; i < kTiles; ++i) {
        const std::byte* tile = tiles.data() + static_cast<size_t>(i) * layout.tile_bytes;
        const simd::KeyTask task = {.layout = &layout,
                                    .tile = tile,
                                    .next = tile,
                                    .queries = &prepared,
                                    .base = base.data(),
                                    .live = live_.data(),
                                    .logits = logits.data()};
        attention_.qk_tiles(&task, 1);
      }
    });
  }

  void sums() {
    test::TileSpec spec;
    spec.side = Side::kValue;
    spec.bands = {{kDim, 4}};
    const TileLayout layout = test::make_layout(spec);
    test::AlignedBytes tile(layout.tile_bytes);
    fill(layout, tile.data());
    test::AlignedBytes workspace(simd::pv_workspace_bytes(layout, kRows));
    std::vector<float> weights(static_cast<size_t>(kRows) * kPageTokens), acc(kRows * kDim, 0.0f);
    for (float& w : weights) w = static_cast<float>(1 + rng_() % 1024) / 1024.0f;
    measure("sums-4bit", [&] {
      for (int i = 0; i < kTiles; ++i) {
        const simd::ValueTask task = {.layout = &layout,
                                      .tile = tile.data(),
                                      .next = tile.data(),
                                      .weights = weights.data(),
                                      .rows = kRows,
                                      .live = live_.data(),
                                      .acc = acc.data()};
        attention_.pv_tiles(&task, 1, workspace.data());
      }
    });
  }

  void exact_scores() {
    std::vector<uint16_t> keys(static_cast<size_t>(kPageTokens) * kDim);
    for (uint16_t& k : keys) k = float_to_half(value());
    std::vector<float> logits(static_cast<size_t>(kRows) * kPageTokens);
    measure("scores-f16", [&] {
      attention_.qk_rows(keys.data(), keys.data(), kDim, kPageTokens, false, kDim, q_.data(), kRows,
                         live_.data(), logits.data());
    });
  }

  void encode() {
    if (!simd::force_kernels(table_.name).ok()) return;
    const Result<Format> format = Format::parse("t4", Side::kKey, kDim);
    if (!format.ok()) return;
    std::vector<float> x(static_cast<size_t>(kPageTokens) * kDim);
    for (float& v : x) v = value();
    test::AlignedBytes tile(format.value().tile_bytes());
    measure("encode-t4", [&] { format.value().encode({.x = x.data()}, tile.data()); });
  }

  void hadamard() {
    std::vector<float> x(static_cast<size_t>(kPageTokens) * kDim);
    for (float& v : x) v = value();
    measure("hadamard-128", [&] { table_.encode->hadamard(x.data(), kDim, kDim, kPageTokens); });
  }

  void fill(const TileLayout& layout, std::byte* tile) {
    for (uint32_t i = 0; i < layout.tile_bytes; ++i) tile[i] = static_cast<std::byte>(rng_() & 255);
    for (int b = 0; b < layout.n_bands; ++b) {
      for (int t = 0; t < kPageTokens; ++t) {
        test::put_word(tile + layout.bands[b].token_scale_offset + 2 * t, float_to_scale(1.0f));
      }
    }
  }

  static std::deque<std::string>& names() {
    static std::deque<std::string> all;
    return all;
  }

  const KernelTable& table_;
  const simd::AttentionKernels& attention_;
  std::mt19937 rng_{7};
  std::vector<uint64_t> live_;
  std::vector<float> q_;
};

}  // namespace
}  // namespace kvant

int main() {
  for (const kvant::simd::KernelTable* table : kvant::simd::available_kernels()) {
    kvant::Counts(*table).run();
  }
  return 0;
}

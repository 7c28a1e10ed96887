// Random histories of a SlotCache against a plain model: slot -> original row.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Look;
using test::Outputs;

constexpr int kSlots = 256;
constexpr int kStreams = 2;
constexpr int kSequences = 3;
constexpr Side kSides[] = {Side::kKey, Side::kValue};

class History {
 public:
  History(const char* scheme, bool per_head, int poison)
      : engine_({.scheme = scheme,
                 .shapes = {{4, 2, 64, 48}},
                 .n_slots = kSlots,
                 .n_streams = kStreams,
                 .threads = 2,
                 .poison = poison,
                 .adjust = per_head ? test::vary_key_widths : nullptr}) {}

  void step() {
    const int what = *rc::gen::inRange(0, 20);
    if (what < 12) {
      write(false);
    } else if (what < 17) {
      write(true);
    } else if (what < 19) {
      copy();
    } else if (*rc::gen::inRange(0, 3) == 0) {
      engine_.clear();
      next_pos_.clear();
    }
    check();
  }

 private:
  int stream() const { return *rc::gen::inRange(0, kStreams); }
  int& next_pos(int stream, int seq) { return next_pos_[stream * kSequences + seq]; }

  std::vector<int> choose_slots(int stream, bool over, int count) {
    std::vector<int> slots;
    const auto& owners = engine_.owners(stream);
    if (!over) {
      for (int i = 0; i < kSlots && static_cast<int>(slots.size()) < count; ++i) {
        if (owners[i].seq < 0) slots.push_back(i);
      }
      return slots;
    }
    // A run that may cross pages, or slots here and there in any order.
    const int first = *rc::gen::inRange(0, kSlots);
    const int stride = *rc::gen::element(1, 1, 3, 37);
    for (int i = 0; i < count; ++i) {
      const int slot = (first + i * stride) % kSlots;
      if (std::find(slots.begin(), slots.end(), slot) == slots.end()) slots.push_back(slot);
    }
    return slots;
  }

  void write(bool over) {
    const int s = stream();
    std::vector<Entry> entries;
    const int mixed = *rc::gen::inRange(0, 2);
    int seq = *rc::gen::inRange(0, kSequences);
    for (const int slot : choose_slots(s, over, *rc::gen::inRange(1, 90))) {
      if (mixed != 0 && slot % 5 == 0) seq = (seq + 1) % kSequences;
      entries.push_back({.stream = s, .seq = seq, .pos = next_pos(s, seq)++, .slot = slot});
    }
    if (entries.empty()) return;
    std::vector<Outputs> out;
    const Status status = engine_.step(entries, {.path = AttentionPath::kDequantize, .dqref = true}, &out);
    RC_ASSERT(status.ok());
    RC_ASSERT(test::relative_error(out[0].engine, out[0].dqref) < 1e-5);
  }

  void copy() {
    const int from = stream();
    const int to = 1 - from;
    engine_.copy_stream(from, to);
    for (int seq = 0; seq < kSequences; ++seq) next_pos(to, seq) = next_pos(from, seq);
    RC_ASSERT(test::stream_hash(engine_.cache(), from) == test::stream_hash(engine_.cache(), to));
  }

  void check_slot(int s, int slot, Side side, const std::vector<uint16_t>& rows, size_t width) {
    const SidePage& page = engine_.cache().side_page(LayerId{0}, StreamId{s}, slot / 64, side);
    const bool exact = (((page.row_mask | page.kept_mask) >> (slot % 64)) & 1) != 0;
    const bool tile = ((page.tile_mask >> (slot % 64)) & 1) != 0;
    const bool held = engine_.owners(s)[slot].seq >= 0;
    RC_ASSERT(held == (exact || tile));
    const uint16_t* row = rows.data() + static_cast<size_t>(slot) * width;
    if (!held) {
      RC_ASSERT(std::all_of(row, row + width, [](uint16_t x) { return x == 0; }));
      return;
    }
    const std::vector<float> want = engine_.original(0, side, s, slot);
    double error = 0, norm = 0;
    for (size_t c = 0; c < width; ++c) {
      const double d = half_to_float(row[c]) - want[c];
      error += d * d;
      norm += static_cast<double>(want[c]) * want[c];
    }
    RC_ASSERT(error <= (exact ? 0.0 : 0.05 * norm));
  }

  void check() {
    SlotCache& cache = engine_.cache();
    for (int s = 0; s < kStreams; ++s) {
      const auto& owners = engine_.owners(s);
      const auto used = std::count_if(owners.begin(), owners.end(), [](const auto& o) { return o.seq >= 0; });
      RC_ASSERT(cache.used_slots(StreamId{s}) == used);
      for (const Side side : kSides) {
        const size_t width = side == Side::kKey ? 128 : 96;
        std::vector<uint16_t> rows(width * kSlots);
        RC_ASSERT(cache.read_rows(LayerId{0}, side, StreamId{s}, 0, kSlots, rows.data()).ok());
        for (int slot = 0; slot < kSlots; ++slot) check_slot(s, slot, side, rows, width);
        for (int p = 0; p < cache.n_pages(); ++p) {
          const SidePage& page = cache.side_page(LayerId{0}, StreamId{s}, p, side);
          RC_ASSERT((page.tiles != nullptr) == (page.tile_mask != 0));
          RC_ASSERT((page.kept != nullptr) == (page.kept_mask != 0));
          RC_ASSERT((page.kept_mask & ~page.kept_layout) == 0u);
          RC_ASSERT((page.kept_mask & page.row_mask) == 0u);
          RC_ASSERT(page.row_mask == 0 || page.rows != nullptr);
          if (page.tiles != nullptr) check_tiles(page, side);
        }
      }
    }
    RC_ASSERT(engine_.wrongly_settled_pages() == 0);
    const MemoryReport walked = engine_.walk();
    RC_ASSERT(cache.memory().tile_bytes == walked.tile_bytes);
    RC_ASSERT(cache.memory().exact_row_bytes == walked.exact_row_bytes);
    RC_ASSERT(cache.memory().total() == cache.pool().total_bytes());
  }

  void check_tiles(const SidePage& page, Side side) {
    const LayerScheme& layer = engine_.cache().layer(LayerId{0});
    const std::byte* tile = page.tiles;
    for (const HeadScheme& head : layer.heads) {
      const Format& format = side == Side::kKey ? head.key_format : head.value_format;
      RC_ASSERT(format.verify(tile).ok());
      tile += format.tile_bytes();
    }
  }

  Engine engine_;
  std::map<int, int> next_pos_;  // [stream * kSequences + seq]
};

void random_histories(const char* scheme, bool per_head = false) {
  EXPECT_TRUE(rc::check(std::string("histories of ") + scheme, [scheme, per_head] {
    History history(scheme, per_head, *rc::gen::element(0xAA, 0xFF));
    const int steps = *rc::gen::inRange(1, 40);
    for (int i = 0; i < steps; ++i) history.step();
  }));
}

TEST(SlotCacheProperty, TokenFormats) { random_histories("k=t4:s16,v=t4:s16,w=20,s=3"); }
TEST(SlotCacheProperty, WidthsPerHead) { random_histories("k=t6-4-4-4,v=t4,w=20,s=3", true); }
TEST(SlotCacheProperty, ChannelFormats) { random_histories("k=c5,v=c5,w=1,s=0"); }
TEST(SlotCacheProperty, OneSideExact) { random_histories("k=g4,v=f16,w=70,s=70"); }
TEST(SlotCacheProperty, Exact) { random_histories("exact"); }

}  // namespace
}  // namespace kvant

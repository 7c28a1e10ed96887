// SlotTable alone: order of writing, sinks, windows, which pages are sealed and which let go of their rows.
#include "cache/slot_table.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "kvant/memory.h"

namespace kvant {
namespace {

constexpr uint16_t kHidden = 0xFC00;
constexpr uint64_t kAll = ~uint64_t{0};

// Queries of one stream with masks made by hand.
class Queries {
 public:
  explicit Queries(int n_slots) : n_slots_(n_slots) {}
  // A query whose own token is in `own` (-1: none) and that sees the given slots.
  void add(int own, const std::vector<int>& visible) {
    own_.push_back(own);
    mask_.resize(own_.size() * static_cast<size_t>(n_slots_), kHidden);
    for (const int slot : visible) mask_[(own_.size() - 1) * static_cast<size_t>(n_slots_) + slot] = 0;
  }
  void add_causal(int own) {
    std::vector<int> visible;
    for (int i = 0; i <= own; ++i) visible.push_back(i);
    add(own, visible);
  }
  void set(size_t query, int slot, uint16_t value) {
    mask_[query * static_cast<size_t>(n_slots_) + slot] = value;
  }
  StreamQueries get(int stream = 0) const {
    return {.stream = StreamId{stream},
            .n_queries = static_cast<int>(own_.size()),
            .n_slots = n_slots_,
            .mask = mask_.data(),
            .mask_stride = static_cast<size_t>(n_slots_),
            .own_slot = own_};
  }

 private:
  int n_slots_;
  std::vector<uint16_t> mask_;
  std::vector<int32_t> own_;
};

struct Table {
  explicit Table(int n_pages, int n_streams = 1, int poison = 0xAA)
      : pool({.poison = poison}), table(n_pages, n_streams, &pool) {}
  StreamPlan plan(const Queries& queries, int window, int sinks, int stream = 0) {
    StreamPlan out;
    table.plan(queries.get(stream), window, sinks, &out);
    table.mark_sinks(out);
    return out;
  }
  MemoryPool pool;
  SlotTable table;
};

std::vector<int> range(int first, int end) {
  std::vector<int> out;
  for (int i = first; i < end; ++i) out.push_back(i);
  return out;
}

TEST(SlotTable, CountsItsBytes) {
  const Table t(5, 3);
  ASSERT_TRUE(t.table.ok());
  // Per stream: 320 stamps of 4 bytes, 640 order words of 4, three masks per page rounded to 64 bytes.
  EXPECT_EQ(SlotTable::bytes(5, 3), 3u * (1280 + 2560 + 3 * 64));
  EXPECT_EQ(t.pool.bytes(Use::kTables), SlotTable::bytes(5, 3));
}

TEST(SlotTable, ReadsMasks) {
  Table t(2);
  for (int i = 0; i < 100; ++i) t.table.write(0, i);
  Queries q(90);
  q.add(89, {0, 5, 63, 64, 89});
  StreamPlan plan = t.plan(q, 1, 0);
  ASSERT_EQ(plan.n_pages, 2);
  EXPECT_EQ(plan.visible[0], (uint64_t{1} << 0) | (uint64_t{1} << 5) | (uint64_t{1} << 63));
  EXPECT_EQ(plan.visible[1], (uint64_t{1} << 0) | (uint64_t{1} << 25));
  EXPECT_FALSE(plan.has_bias);
  q.set(0, 5, 0x8000);  // -0 is no bias
  EXPECT_FALSE(t.plan(q, 1, 0).has_bias);
  q.set(0, 70, 0xBC00);  // -1
  plan = t.plan(q, 1, 0);
  EXPECT_TRUE(plan.has_bias);
  EXPECT_EQ(plan.visible[1], (uint64_t{1} << 0) | (uint64_t{1} << 6) | (uint64_t{1} << 25));
}

TEST(SlotTable, SlotsThatWereNeverWrittenAreHidden) {
  Table t(2, 2);
  t.table.write(1, 3);
  const StreamQueries all = {.stream = StreamId{1},
                             .n_queries = 1,
                             .n_slots = 128,
                             .mask = nullptr,
                             .mask_stride = 0,
                             .own_slot = {}};
  StreamPlan plan;
  t.table.plan(all, 4, 0, &plan);
  EXPECT_EQ(plan.visible[0], uint64_t{1} << 3);
  EXPECT_EQ(plan.visible[1], 0u);
  EXPECT_EQ(t.table.used_slots(0), 0);
  EXPECT_EQ(t.table.used_slots(1), 1);
}

TEST(SlotTable, WindowCountsVisibleTokens) {
  for (const bool ascending : {true, false}) {
    Table t(4);
    // The same tokens; when not ascending, slot 255 was written first.
    if (!ascending) t.table.write(0, 255);
    for (int i = 0; i < 200; ++i) t.table.write(0, i);
    Queries q(256);
    q.add_causal(199);
    EXPECT_EQ(t.plan(q, 1, 0).window[0], 0b1000u);
    EXPECT_EQ(t.plan(q, 8, 0).window[0], 0b1000u);  // tokens 192 .. 199
    EXPECT_EQ(t.plan(q, 9, 0).window[0], 0b1100u);  // token 191 is in page 2
    EXPECT_EQ(t.plan(q, 72, 0).window[0], 0b1100u);
    EXPECT_EQ(t.plan(q, 73, 0).window[0], 0b1110u);
    EXPECT_EQ(t.plan(q, 4096, 0).window[0], 0b1111u);
    EXPECT_EQ(t.plan(q, 0, 0).window[0], 0b1000u);  // the newest page is exact anyway
    // Tokens that the query does not see do not count.
    Queries sparse(256);
    sparse.add(199, {3, 70, 130, 131, 199});
    EXPECT_EQ(t.plan(sparse, 2, 0).window[0], 0b1100u);
    EXPECT_EQ(t.plan(sparse, 3, 0).window[0], 0b1100u);
    EXPECT_EQ(t.plan(sparse, 4, 0).window[0], 0b1110u);
    EXPECT_EQ(t.plan(sparse, 5, 0).window[0], 0b1111u);
  }
}

TEST(SlotTable, WindowFollowsTheOrderOfWritingNotOfSlots) {
  Table t(3);
  for (int i = 0; i < 192; ++i) t.table.write(0, i);
  t.table.write(0, 10);  // now the newest
  Queries q(192);
  q.add(10, range(0, 192));
  const StreamPlan plan = t.plan(q, 1, 0);
  EXPECT_EQ(plan.window[0], 0b001u);
  EXPECT_EQ(t.plan(q, 2, 0).window[0], 0b101u);
}

TEST(SlotTable, OrderSurvivesManyRewrites) {
  Table t(2);
  // Compaction happens every 2 * 128 writes; slot k is written k % 7 + 1 times in all.
  for (int round = 0; round < 40; ++round) {
    for (int i = 0; i < 128; ++i) {
      if (round < 33 || i % 7 >= round - 33) t.table.write(0, i);
    }
  }
  EXPECT_EQ(t.table.used_slots(0), 128);
  // Round 39 wrote slots with i % 7 == 6 only: 6, 13, .., 125.
  Queries q(128);
  q.add(125, range(0, 128));
  EXPECT_EQ(t.plan(q, 9, 0).window[0], 0b10u);   // 69 .. 125 are nine tokens of page 1
  EXPECT_EQ(t.plan(q, 10, 0).window[0], 0b11u);  // 62 is in page 0
}

TEST(SlotTable, SinksAreTheFirstTokensOfASequence) {
  Table t(3);
  for (int i = 0; i < 150; ++i) t.table.write(0, i);
  Queries q(150);
  for (int i = 0; i < 150; ++i) q.add_causal(i);
  t.plan(q, 64, 70);
  EXPECT_EQ(t.table.sinks(0, 0), kAll);
  EXPECT_EQ(t.table.sinks(0, 1), (uint64_t{1} << 6) - 1);
  EXPECT_EQ(t.table.sinks(0, 2), 0u);
  // A slot that is written again is a sink only if its new token is one.
  t.table.write(0, 5);
  EXPECT_EQ(t.table.sinks(0, 0), kAll & ~(uint64_t{1} << 5));
  Queries other(150);
  other.add(5, {5});
  t.plan(other, 64, 70);
  EXPECT_EQ(t.table.sinks(0, 0), kAll);
}

TEST(SlotTable, EverySequenceOfASharedStreamHasItsSinks) {
  Table t(2);
  Queries q(100);
  std::vector<int> seen[2];
  for (int i = 0; i < 100; ++i) {
    t.table.write(0, i);
    seen[i % 2].push_back(i);
    q.add(i, seen[i % 2]);
  }
  t.plan(q, 8, 3);
  EXPECT_EQ(t.table.sinks(0, 0), 0b111111u);
  EXPECT_EQ(t.table.sinks(0, 1), 0u);
}

TEST(SlotTable, RestoredTokensBecomeSinksWithTheFirstQuery) {
  Table t(2);
  for (int i = 0; i < 100; ++i) t.table.adopt(0, i);
  EXPECT_EQ(t.table.sinks(0, 0), 0u);
  t.table.write(0, 100);
  Queries q(101);
  q.add(100, range(10, 101));
  t.plan(q, 8, 4);
  EXPECT_EQ(t.table.sinks(0, 0), uint64_t{0b1111} << 10);
  Queries next(101);
  next.add(100, range(50, 101));
  t.plan(next, 8, 4);
  EXPECT_EQ(t.table.sinks(0, 0), uint64_t{0b1111} << 10);
}

// A restored sequence finds its sinks when its own query comes, whoever else was planned before.
TEST(SlotTable, RestoredTokensWaitForTheirOwnQuery) {
  Table t(2);
  for (int i = 0; i < 40; ++i) t.table.adopt(0, i);
  t.table.write(0, 64);
  Queries stranger(128);
  stranger.add(64, {64});
  t.plan(stranger, 8, 4);
  EXPECT_EQ(t.table.sinks(0, 0), 0u);
  EXPECT_EQ(t.table.sinks(0, 1), 1u);
  // A second restored sequence is not touched by the first one's query.
  for (int i = 40; i < 60; ++i) t.table.adopt(0, i);
  t.table.write(0, 65);
  Queries first(128);
  std::vector<int> seen = range(0, 40);
  seen.push_back(65);
  first.add(65, seen);
  t.plan(first, 8, 4);
  EXPECT_EQ(t.table.sinks(0, 0), 0b1111u);
  t.table.write(0, 66);
  Queries second(128);
  seen = range(40, 60);
  seen.push_back(66);
  second.add(66, seen);
  t.plan(second, 8, 3);
  EXPECT_EQ(t.table.sinks(0, 0), 0b1111u | (uint64_t{0b111} << 40));
  EXPECT_EQ(t.table.sinks(0, 1), 1u);
}

TEST(SlotTable, AnUndoneBatchWasNeverThere) {
  // 128 slots: the order holds 256 writes, so that some of these batches find it nearly full.
  for (const int written : {100, 128, 250, 256, 300}) {
    Table t(2), untouched(2);
    for (Table* table : {&t, &untouched}) {
      for (int i = 0; i < written; ++i) table->table.write(0, i * 37 % 128);
      table->table.adopt(0, 5);
      Queries q(128);
      q.add(7, {7});
      table->plan(q, 8, 2);
    }
    std::vector<int64_t> batch = {5, 7, 127, 100};
    for (int i = 10; i < 90; ++i) batch.push_back(i);
    t.table.write_batch(batch);
    EXPECT_EQ(t.table.sinks(0, 0), 0u);
    EXPECT_TRUE(t.table.is_newest_run(0, 10, 80));
    t.table.undo_batch();
    EXPECT_EQ(t.table.sinks(0, 0), uint64_t{1} << 7);
    Queries all(128);
    all.add(-1, range(0, 128));
    for (int page = 0; page < 2; ++page) EXPECT_EQ(t.table.filled(0, page), untouched.table.filled(0, page));
    for (int window = 1; window <= 128; ++window) {
      StreamPlan got, want;
      t.table.plan(all.get(), window, 3, &got);
      untouched.table.plan(all.get(), window, 3, &want);
      ASSERT_EQ(got.window, want.window) << written << ", " << window;
      ASSERT_EQ(got.sinks, want.sinks) << written;
      ASSERT_EQ(got.sinks.size(), 3u) << "slot 5 is adopted: the oldest three become sinks";
    }
    // Kept batches are not undone.
    t.table.write_batch(batch);
    t.table.keep_batch();
    t.table.undo_batch();
    EXPECT_TRUE(t.table.is_newest_run(0, 10, 80));
  }
}

TEST(SlotTable, SealsFullPagesThatAreReadOutsideTheWindow) {
  Table t(4);
  for (int i = 0; i < 191; ++i) t.table.write(0, i);
  Queries q(191);
  q.add_causal(190);
  StreamPlan plan = t.plan(q, 10, 0);
  EXPECT_EQ(plan.seal, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.release, (std::vector<int32_t>{0, 1}));
  // With a window that reaches into page 1, only page 0.
  plan = t.plan(q, 64, 0);
  EXPECT_EQ(plan.seal, (std::vector<int32_t>{0}));
  // A page with a hole is not full.
  Table holed(2);
  for (int i = 0; i < 128; ++i) {
    if (i != 40) holed.table.write(0, i);
  }
  Queries all(128);
  all.add(127, range(0, 128));
  EXPECT_TRUE(holed.plan(all, 1, 0).seal.empty());
}

TEST(SlotTable, KeepsRowsWhileSomeQueryStillCountsThemIntoItsWindow) {
  Table t(4);
  for (int i = 0; i < 256; ++i) t.table.write(0, i);
  // Two sequences: A is slots 0 .. 63 and 128 .. 191, B the others; windows of 70 reach back over two pages.
  std::vector<int> a = range(0, 64), b = range(64, 128);
  for (const int i : range(128, 192)) a.push_back(i);
  for (const int i : range(192, 256)) b.push_back(i);
  Queries both(256);
  both.add(191, a);
  both.add(255, b);
  StreamPlan plan = t.plan(both, 70, 0);
  EXPECT_TRUE(plan.seal.empty());
  plan = t.plan(both, 60, 0);
  EXPECT_EQ(plan.seal, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.release, (std::vector<int32_t>{0, 1}));
  // A third query sees all but the newest token of A: it wants pages 0 to 2 quantized, A has 0 and 2 in its
  // window.
  std::vector<int> rest = range(0, 191);
  for (const int i : range(192, 256)) rest.push_back(i);
  Queries mixed(256);
  mixed.add(191, a);
  mixed.add(-1, rest);
  plan = t.plan(mixed, 70, 0);
  EXPECT_EQ(plan.seal, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.release, (std::vector<int32_t>{1}));
}

TEST(SlotTable, EarlierQueriesOfASequenceDoNotHoldRows) {
  Table t(4);
  for (int i = 0; i < 256; ++i) t.table.write(0, i);
  // A prefill: page 0 is in the window of the query at 100, but the query at 255 comes later in the sequence.
  Queries q(256);
  q.add_causal(100);
  q.add_causal(255);
  const StreamPlan plan = t.plan(q, 64, 0);
  EXPECT_TRUE(plan.in_window(0, 0));
  EXPECT_FALSE(plan.in_window(1, 0));
  EXPECT_EQ(plan.release, (std::vector<int32_t>{0, 1, 2}));
}

TEST(SlotTable, TokensThatNobodySeesHoldRowsForAWhile) {
  // Page 0 has one token of a sequence that is not in the batch; it keeps its rows for 4,096 more tokens.
  Table t(80);
  std::vector<int> seen;
  for (int i = 0; i < 80 * 64; ++i) {
    t.table.write(0, i);
    if (i != 7) seen.push_back(i);
    if (i != 1000 && i != 4102 && i != 4103) continue;
    Queries q(i + 1);
    q.add(i, seen);
    const StreamPlan plan = t.plan(q, 64, 0);
    ASSERT_FALSE(plan.seal.empty());
    EXPECT_EQ(plan.seal.front(), 0);
    EXPECT_EQ(plan.release.front() == 0, i == 4103) << i;
  }
}

TEST(SlotTable, CopyAndClear) {
  Table t(2, 2, 0xFF);
  for (int i = 0; i < 100; ++i) t.table.write(0, i);
  Queries q(100);
  for (int i = 0; i < 100; ++i) q.add_causal(i);
  t.plan(q, 8, 5);
  t.table.copy_stream(0, 1);
  EXPECT_EQ(t.table.used_slots(1), 100);
  EXPECT_EQ(t.table.sinks(1, 0), 0b11111u);
  EXPECT_TRUE(t.table.is_newest_run(1, 90, 10));
  EXPECT_FALSE(t.table.is_newest_run(1, 80, 10));
  EXPECT_FALSE(t.table.is_newest_run(1, 0, 0));
  t.table.write(1, 100);
  EXPECT_EQ(t.table.used_slots(0), 100);
  t.table.clear();
  EXPECT_EQ(t.table.used_slots(0) + t.table.used_slots(1), 0);
  EXPECT_EQ(t.table.sinks(0, 0), 0u);
  EXPECT_FALSE(t.table.is_newest_run(0, 90, 10));
}

}  // namespace
}  // namespace kvant

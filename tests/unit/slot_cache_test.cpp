// SlotCache: content by index, slots written again, copies, refusals, and that a decode step allocates
// nothing.
#include "kvant/slot_cache.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "support/allocations.h"
#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::EngineOptions;
using test::Entry;
using test::Look;
using test::Outputs;

constexpr Side kSides[] = {Side::kKey, Side::kValue};

const SidePage& page_of(Engine& engine, int page, Side side, int stream = 0) {
  return engine.cache().side_page(LayerId{0}, StreamId{stream}, page, side);
}

std::vector<float> slot_of(Engine& engine, Side side, int slot, bool quantized, int stream = 0) {
  const LayerShape& shape = engine.shape();
  std::vector<float> row(static_cast<size_t>(shape.n_kv_heads) *
                         (side == Side::kKey ? shape.key_dim : shape.value_dim));
  const Status status =
      engine.cache().read_slot(LayerId{0}, side, StreamId{stream}, slot, quantized, row.data());
  EXPECT_TRUE(status.ok()) << status.message();
  return row;
}

TEST(SlotCache, RefusesImpossibleOptions) {
  Result<LayerScheme> layer = resolve_layer(parse_scheme("k=t4,v=t4").value(), {2, 1, 64, 64});
  ASSERT_TRUE(layer.ok());
  const SlotCache::Options good = {.layers = {layer.value()}, .n_slots = 64, .memory = {}};
  ASSERT_TRUE(SlotCache::create(good).ok());
  auto refused = [](const SlotCache::Options& options, const char* option) {
    const auto made = SlotCache::create(options);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
    EXPECT_NE(made.status().message().find(option), std::string::npos) << made.status().message();
  };
  SlotCache::Options bad = good;
  bad.layers.clear();
  refused(bad, "layers");
  bad = good;
  bad.n_slots = 0;
  refused(bad, "n_slots");
  bad = good;
  bad.n_streams = 0;
  refused(bad, "n_streams");
  bad = good;
  bad.window = -1;
  refused(bad, "window");
  bad = good;
  bad.sinks = -1;
  refused(bad, "sinks");
  bad = good;
  // The page table fits, the slot table does not.
  bad.memory = {.limit_bytes = 512, .poison = 0xAA};
  EXPECT_EQ(SlotCache::create(bad).status().code(), Code::kPoolExhausted);
  bad.memory.limit_bytes = 4096;
  const auto made = SlotCache::create(bad);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(AttentionWorkspace::create(made.value().get()).status().code(), Code::kPoolExhausted);
}

TEST(SlotCache, RefusesSlotsAndStreamsBeyondTheEnd) {
  Engine engine({.n_slots = 128, .n_streams = 2});
  const std::vector<int32_t> layers = {0};
  for (const int64_t slot : {int64_t{-1}, int64_t{256}, int64_t{1} << 40}) {
    const std::vector<int64_t> slots = {5, slot};
    const Status status = engine.cache().begin_batch(slots, layers);
    EXPECT_EQ(status.code(), Code::kOutOfRange);
    EXPECT_NE(status.message().find(std::to_string(slot)), std::string::npos);
    EXPECT_EQ(engine.cache().used_slots(StreamId{0}), 0);
    EXPECT_EQ(engine.cache().memory().exact_row_bytes, 0u);
  }
  std::vector<uint16_t> rows(64 * 200);
  SlotCache& cache = engine.cache();
  EXPECT_EQ(cache.read_rows(LayerId{0}, Side::kKey, StreamId{0}, 100, 29, rows.data()).code(),
            Code::kOutOfRange);
  EXPECT_EQ(cache.read_rows(LayerId{0}, Side::kKey, StreamId{0}, -1, 2, rows.data()).code(),
            Code::kOutOfRange);
  EXPECT_EQ(cache.write_rows(LayerId{0}, Side::kKey, StreamId{0}, 100, 29, rows.data()).code(),
            Code::kOutOfRange);
  EXPECT_EQ(cache.copy_stream(StreamId{0}, StreamId{2}).code(), Code::kOutOfRange);
  EXPECT_EQ(cache.copy_stream(StreamId{-1}, StreamId{1}).code(), Code::kOutOfRange);
  BatchPlan plan;
  const StreamQueries beyond = {
      .stream = StreamId{2}, .n_queries = 0, .n_slots = 1, .mask = nullptr, .mask_stride = 0, .own_slot = {}};
  EXPECT_EQ(cache.plan({&beyond, 1}, layers, &plan).code(), Code::kOutOfRange);
  const StreamQueries long_stream = {.stream = StreamId{0},
                                     .n_queries = 0,
                                     .n_slots = 129,
                                     .mask = nullptr,
                                     .mask_stride = 0,
                                     .own_slot = {}};
  EXPECT_EQ(cache.plan({&long_stream, 1}, layers, &plan).code(), Code::kOutOfRange);
}

// State saved by rows and restored elsewhere: exact rows stay exact, sinks are found again, and what is read
// is what was read before.
TEST(SlotCache, WriteRowsRestoresWhatReadRowsSaved) {
  for (const char* scheme : {"exact", "k=t4,v=t4,w=64,s=5", "k=c4,v=g3,w=1,s=70"}) {
    const test::EngineOptions options = {.scheme = scheme, .shapes = {{4, 2, 64, 48}}, .n_slots = 320};
    Engine saved(options);
    saved.append(0, 0, 0, 250, 50);
    Engine restored({.scheme = scheme, .shapes = {{4, 2, 64, 48}}, .n_slots = 320, .poison = 0xFF});
    std::vector<uint16_t> rows(size_t{250} * 128), again(rows.size());
    for (const Side side : kSides) {
      const size_t width = side == Side::kKey ? 128 : 96;
      ASSERT_TRUE(saved.cache().read_rows(LayerId{0}, side, StreamId{0}, 0, 250, rows.data()).ok());
      ASSERT_TRUE(restored.cache().write_rows(LayerId{0}, side, StreamId{0}, 0, 250, rows.data()).ok());
      ASSERT_TRUE(restored.cache().read_rows(LayerId{0}, side, StreamId{0}, 0, 250, again.data()).ok());
      for (size_t i = 0; i < width * 250; ++i) ASSERT_EQ(rows[i], again[i]);
    }
    for (int t = 0; t < 250; ++t) restored.owners(0)[t] = {.seq = 0, .pos = t};
    EXPECT_EQ(restored.cache().used_slots(StreamId{0}), 250);
    Look look = {.path = AttentionPath::kDequantize, .dqref = true};
    const Outputs before = saved.append(0, 0, 250, 1, 1, look);
    const Outputs after = restored.append(0, 0, 250, 1, 1, look);
    EXPECT_LT(test::relative_error(after.engine, after.dqref), 1e-5) << scheme;
    if (restored.cache().layer(LayerId{0}).exact) {
      EXPECT_TRUE(test::same_bits(after.engine, before.engine));
      continue;
    }
    // Encoding again what was decoded costs one more rounding.
    EXPECT_LT(test::relative_error(after.engine, before.engine), 0.15) << scheme;
    const int sinks = saved.cache().options().sinks;
    for (int t = 0; t < sinks; ++t) {
      ASSERT_NE((restored.cache().sink_mask(StreamId{0}, t / 64) >> (t % 64)) & 1, 0u) << t;
      ASSERT_TRUE(
          test::same_bits(slot_of(restored, Side::kKey, t, false), saved.original(0, Side::kKey, 0, t)));
    }
    EXPECT_EQ(restored.cache().memory().total(), saved.cache().memory().total()) << scheme;
  }
}

TEST(SlotCache, WriteRowsRefusesNan) {
  Engine engine({});
  std::vector<uint16_t> rows(64 * 3, 0x3C00);
  rows[64 * 2 + 7] = 0x7E00;
  const Status status = engine.cache().write_rows(LayerId{0}, Side::kValue, StreamId{0}, 10, 3, rows.data());
  EXPECT_EQ(status.code(), Code::kBadValue);
  EXPECT_NE(status.message().find("value of layer 0, slot 12"), std::string::npos) << status.message();
  EXPECT_EQ(engine.cache().used_slots(StreamId{0}), 0);
  EXPECT_EQ(engine.cache().memory().exact_row_bytes, 0u);
}

TEST(SlotCache, WriteRowsThatDoNotFitChangeNothing) {
  EngineOptions options = {.n_slots = 256};
  const size_t empty = Engine(options).cache().memory().total();
  options.limit_bytes = empty + size_t{2} * 64 * 64 * 2;
  Engine engine(options);
  const std::vector<uint16_t> rows(size_t{64} * 192, 0x3C00);
  SlotCache& cache = engine.cache();
  EXPECT_EQ(cache.write_rows(LayerId{0}, Side::kKey, StreamId{0}, 0, 192, rows.data()).code(),
            Code::kPoolExhausted);
  EXPECT_EQ(cache.used_slots(StreamId{0}), 0);
  EXPECT_EQ(cache.memory().total(), empty);
  EXPECT_TRUE(cache.write_rows(LayerId{0}, Side::kKey, StreamId{0}, 0, 128, rows.data()).ok());
}

// A slot of a sealed page that is written again becomes an exact patch; the others keep their tile.
TEST(SlotCache, PatchesOfSealedPages) {
  for (const char* scheme : {"k=t4,v=t4,w=64,s=5", "k=c4,v=c3,w=1,s=0", "k=t4,v=f16,w=1,s=2"}) {
    Engine engine({.scheme = scheme, .shapes = {{4, 2, 64, 64}}, .n_slots = 320, .threads = 2});
    engine.append(0, 0, 0, 250, 50);
    std::vector<std::vector<float>> before;
    for (int t = 0; t < 64; ++t) before.push_back(slot_of(engine, Side::kKey, t, true));
    std::vector<Entry> entries;
    // Another sequence takes over slots of page 0 and 1, in no order; 3 is a sink of two of the schemes.
    for (const int slot : {60, 3, 17, 100, 18}) {
      entries.push_back({.seq = 1, .pos = static_cast<int>(entries.size()), .slot = slot});
    }
    Look look = {.path = AttentionPath::kDequantize, .dqref = true, .ref = true};
    std::vector<Outputs> out;
    ASSERT_TRUE(engine.step(entries, look, &out).ok());
    EXPECT_LT(test::relative_error(out[0].engine, out[0].dqref), 1e-5) << scheme;
    EXPECT_LT(test::relative_error(out[0].engine, out[0].ref), 1e-5)
        << scheme << ": all its tokens are exact";
    const SidePage& page = page_of(engine, 0, Side::kKey);
    const uint64_t patches =
        (uint64_t{1} << 60) | (uint64_t{1} << 3) | (uint64_t{1} << 17) | (uint64_t{1} << 18);
    EXPECT_EQ(page.tile_mask, ~patches);
    EXPECT_EQ(page.row_mask, patches);
    EXPECT_EQ(page.kept_mask & patches, 0u);
    for (int t = 0; t < 64; ++t) {
      if ((patches >> t) & 1) {
        EXPECT_TRUE(
            test::same_bits(slot_of(engine, Side::kKey, t, false), engine.original(0, Side::kKey, 0, t)));
      } else {
        EXPECT_TRUE(test::same_bits(slot_of(engine, Side::kKey, t, true), before[t]));
      }
    }
    const Outputs next = engine.append(0, 0, 250, 4, 1, {.path = AttentionPath::kDequantize, .dqref = true});
    EXPECT_LT(test::relative_error(next.engine, next.dqref), 1e-5) << scheme;
    EXPECT_EQ(engine.cache().memory().tile_bytes, engine.walk().tile_bytes);
    EXPECT_EQ(engine.cache().memory().exact_row_bytes, engine.walk().exact_row_bytes);
  }
}

// A page whose every slot was written again is encoded anew, as a fresh page would be.
TEST(SlotCache, PagesAreSealedAgainAfterBeingRewritten) {
  for (const int chunk : {1, 16, 64}) {
    Engine engine({.scheme = "k=t4,v=c4,w=1,s=3", .n_slots = 320});
    engine.append(0, 0, 0, 200, 50);
    const uint64_t sealed = engine.cache().sealed_tiles();
    for (int slot = 0; slot < 200; ++slot) engine.forget(0, slot);
    // The same stream holds a new sequence, longer than the old one.
    const Outputs out =
        engine.append(0, 9, 0, 260, chunk, {.path = AttentionPath::kDequantize, .dqref = true});
    EXPECT_LT(test::relative_error(out.engine, out.dqref), 1e-5);
    EXPECT_GT(engine.cache().sealed_tiles(), sealed);
    Engine fresh({.scheme = "k=t4,v=c4,w=1,s=3", .n_slots = 320, .poison = 0xFF});
    const Outputs want = fresh.append(0, 9, 0, 260, 64, {.path = AttentionPath::kDequantize});
    // While a page is rewritten it is full already, of two sequences; at the end nothing of that is left.
    for (int page = 0; page < 4; ++page) {
      for (const Side side : kSides) {
        EXPECT_EQ(page_of(engine, page, side).tile_mask, page_of(fresh, page, side).tile_mask) << page;
      }
    }
    EXPECT_TRUE(test::same_bits(slot_of(engine, Side::kKey, 40, true), slot_of(fresh, Side::kKey, 40, true)));
    EXPECT_TRUE(test::same_bits({out.engine.back()}, {want.engine.back()}));
    EXPECT_EQ(engine.cache().memory().total(), fresh.cache().memory().total());
  }
}

// A plan names the pages that it has something to do for: not those that are in their tiles alone, unless a
// slot of theirs was written since.
TEST(SlotCache, PlansLeaveOutPagesInTheirTiles) {
  for (const char* scheme : {"k=t4,v=c4,w=1,s=3", "k=t4,v=f16,w=1,s=0"}) {
    Engine engine({.scheme = scheme, .shapes = {{2, 1, 64, 64}, {2, 1, 64, 64}}, .n_slots = 320});
    engine.append(0, 0, 0, 200, 50, {.seal_only = true});
    const std::vector<int32_t> both = {0, 1};
    const auto sealed_by_plan = [&](std::vector<int64_t> slots, const std::vector<int32_t>& layers,
                                    bool ends) {
      SlotCache& cache = engine.cache();
      EXPECT_TRUE(cache.begin_batch(slots, both).ok());
      const std::vector<int32_t> own(slots.begin(), slots.end());
      const StreamQueries query = {.stream = StreamId{0},
                                   .n_queries = static_cast<int>(own.size()),
                                   .n_slots = 320,
                                   .mask = nullptr,
                                   .mask_stride = 0,
                                   .own_slot = own};
      BatchPlan plan;
      EXPECT_TRUE(cache.plan({&query, 1}, layers, &plan).ok());
      const std::vector<float> rows(slots.size() * 64, 0.5f);
      for (const int32_t layer : both) {
        for (const Side side : kSides) cache.write(LayerId{layer}, side, slots, rows.data(), 64, {});
      }
      std::vector<SealItem> items;
      for (const int32_t layer : layers) {
        cache.seal_items(LayerId{layer}, plan, &items);
        for (const SealItem& item : items) cache.seal_page(item);
      }
      if (ends) cache.end_batch(plan);
      return plan.streams[0].seal;
    };
    using Pages = std::vector<int32_t>;
    EXPECT_EQ(sealed_by_plan({200}, both, true), Pages()) << scheme;
    std::vector<int64_t> rest(55);
    std::iota(rest.begin(), rest.end(), 201);
    EXPECT_EQ(sealed_by_plan(rest, both, true), Pages()) << scheme << ": page 3 is in the window";
    EXPECT_EQ(sealed_by_plan({256}, {0}, true), Pages{3}) << scheme;
    EXPECT_EQ(sealed_by_plan({257}, {0}, true), Pages()) << scheme << ": layer 0 is done with it";
    EXPECT_EQ(sealed_by_plan({258}, both, false), Pages{3}) << scheme << ": layer 1 is not";
    EXPECT_EQ(sealed_by_plan({259}, both, true), Pages{3}) << scheme << ": its rows were not released";
    EXPECT_EQ(sealed_by_plan({260}, both, true), Pages()) << scheme;
    EXPECT_EQ(sealed_by_plan({70}, both, true), Pages()) << scheme << ": page 1 is in the window";
    EXPECT_EQ(sealed_by_plan({261}, both, true), Pages{1}) << scheme << ": a slot of it was written";
    EXPECT_EQ(sealed_by_plan({262}, both, true), Pages{1}) << scheme << ": its row holds the others back";
  }
}

// A restore or a copy that stopped midway: slots that one side or layer lacks are hidden, and no page is
// sealed from rows that are not there.
TEST(SlotCache, SidesThatAreRestoredAloneAreNotRead) {
  Engine engine({.scheme = "k=t4,v=t4,w=1,s=3",
                 .shapes = {{2, 1, 64, 64}, {2, 1, 64, 64}},
                 .n_slots = 256,
                 .n_streams = 2,
                 .threads = 2});
  SlotCache& cache = engine.cache();
  const std::vector<uint16_t> rows(size_t{192} * 64, 0x3800);
  for (int slot = 0; slot < 192; ++slot) {
    engine.owners(0)[slot] = engine.owners(1)[slot] = {.seq = 0, .pos = slot};
  }
  const auto output = [&](int stream) {
    return engine.attend({{.stream = stream, .seq = 0, .pos = 191, .slot = 191}}, {}).engine;
  };
  const std::vector<std::vector<float>> zeros(1, std::vector<float>(128, 0.0f));
  ASSERT_TRUE(cache.write_rows(LayerId{0}, Side::kKey, StreamId{0}, 0, 192, rows.data()).ok());
  EXPECT_EQ(output(0), zeros);
  EXPECT_NE(page_of(engine, 0, Side::kKey).tile_mask, 0u);
  EXPECT_EQ(page_of(engine, 0, Side::kValue).tiles, nullptr);
  ASSERT_TRUE(cache.copy_stream_side(LayerId{0}, Side::kKey, StreamId{0}, StreamId{1}).ok());
  EXPECT_EQ(output(1), zeros);
  EXPECT_EQ(cache.memory().tile_bytes, engine.walk().tile_bytes);
  EXPECT_EQ(engine.wrongly_settled_pages(), 0);
  ASSERT_TRUE(cache.write_rows(LayerId{0}, Side::kValue, StreamId{0}, 0, 192, rows.data()).ok());
  EXPECT_NE(output(0), zeros);
  EXPECT_NE(page_of(engine, 0, Side::kValue).tile_mask, 0u);
}

TEST(SlotCache, CopyStreamReplacesItsTarget) {
  Engine engine({.scheme = "k=t4,v=g4,w=64,s=5",
                 .shapes = {{4, 2, 64, 64}, {2, 1, 32, 80}},
                 .n_slots = 320,
                 .n_streams = 3});
  engine.append(0, 0, 0, 250, 50);
  engine.append(1, 1, 0, 310, 62);
  engine.copy_stream(0, 1);
  EXPECT_EQ(test::stream_hash(engine.cache(), 0), test::stream_hash(engine.cache(), 1));
  EXPECT_EQ(engine.cache().memory().exact_row_bytes, engine.walk().exact_row_bytes);
  EXPECT_EQ(engine.cache().memory().tile_bytes, engine.walk().tile_bytes);
  // Independent from then on, and equal when they get the same tokens.
  const uint64_t before = test::stream_hash(engine.cache(), 0);
  const Outputs first = engine.append(1, 0, 250, 50, 7);
  EXPECT_EQ(test::stream_hash(engine.cache(), 0), before);
  const Outputs second = engine.append(0, 0, 250, 50, 50);
  EXPECT_TRUE(test::same_bits(first.engine, second.engine));
  EXPECT_EQ(test::stream_hash(engine.cache(), 0), test::stream_hash(engine.cache(), 1));
  // An empty stream as source empties the target.
  const size_t held = engine.cache().memory().tile_bytes;
  engine.copy_stream(2, 1);
  EXPECT_EQ(engine.cache().used_slots(StreamId{1}), 0);
  EXPECT_EQ(engine.cache().memory().tile_bytes, held / 2);
  engine.copy_stream(0, 0);
  EXPECT_EQ(engine.cache().used_slots(StreamId{0}), 300);
}

// The limit leaves room for the tiles of a copy, not for its rows; then for all of it once the target's own
// bytes are given back.
TEST(SlotCache, CopyThatDoesNotFitChangesNothing) {
  EngineOptions options = {.scheme = "k=t4,v=t3,w=64,s=3",
                           .shapes = {{2, 1, 64, 64}, {2, 1, 64, 64}},
                           .n_slots = 256,
                           .n_streams = 3};
  size_t used[3] = {};
  {
    Engine quiet(options);
    used[0] = quiet.cache().memory().total();
    quiet.append(0, 0, 0, 250, 50);
    used[1] = quiet.cache().memory().total();
    quiet.append(1, 1, 0, 40, 40);
    used[2] = quiet.cache().memory().total();
  }
  options.limit_bytes = used[2] + (used[1] - used[0]) / 2;
  Engine engine(options);
  engine.append(0, 0, 0, 250, 50);
  engine.append(1, 1, 0, 40, 40);
  const uint64_t before = test::stream_hash(engine.cache(), 1);
  const Status refused = engine.cache().copy_stream(StreamId{0}, StreamId{1});
  EXPECT_EQ(refused.code(), Code::kPoolExhausted);
  EXPECT_NE(refused.message().find("stream 0 to 1"), std::string::npos) << refused.message();
  EXPECT_EQ(test::stream_hash(engine.cache(), 1), before);
  EXPECT_EQ(engine.cache().used_slots(StreamId{1}), 40);
  EXPECT_EQ(engine.cache().memory().total(), used[2]);
  EXPECT_TRUE(engine.cache().copy_stream(StreamId{1}, StreamId{2}).ok());
  EXPECT_EQ(test::stream_hash(engine.cache(), 2), before);
}

// Writing, preparing and running attention allocate nothing once every size was met; neither do begin_batch
// and plan touch the counted pool except for the pages that a token opens.
TEST(SlotCache, DecodeStepAllocatesNothing) {
  const LayerShape shape = {.n_query_heads = 4, .n_kv_heads = 2, .key_dim = 64, .value_dim = 64};
  for (const char* scheme : {"exact", "k=t4,v=t4,w=64,s=5", "k=c4,v=g4,w=1,s=0"}) {
    Engine engine({.scheme = scheme, .shapes = {shape}, .n_slots = 2048});
    engine.append(0, 0, 0, 900, 100);
    SlotCache& cache = engine.cache();
    AttentionJob job;
    BatchPlan plan;
    const std::vector<int32_t> layers = {0};
    std::vector<float> rows(128, 0.5f), q(256, 0.25f), out(256);
    size_t counted = 0;
    for (int t = 900; t < 1060; ++t) {
      const std::vector<int64_t> slots = {t};
      const std::vector<int32_t> own = {t};
      ASSERT_TRUE(cache.begin_batch(slots, layers).ok());
      const StreamQueries query = {.stream = StreamId{0},
                                   .n_queries = 1,
                                   .n_slots = t + 1,
                                   .mask = nullptr,
                                   .mask_stride = 0,
                                   .own_slot = own};
      ASSERT_TRUE(cache.plan({&query, 1}, layers, &plan).ok());
      const AttentionArgs args = {.layer = LayerId{0},
                                  .plan = &plan,
                                  .q = q.data(),
                                  .q_head = 64,
                                  .q_token = 256,
                                  .q_stream = 256,
                                  .out = out.data(),
                                  .out_head = 64,
                                  .out_token = 256,
                                  .out_stream = 256,
                                  .scale = 0.125f};
      const size_t before = test::allocations();
      cache.write(LayerId{0}, Side::kKey, slots, rows.data(), 128, {});
      cache.write(LayerId{0}, Side::kValue, slots, rows.data(), 128, {});
      ASSERT_TRUE(job.prepare(&cache, &engine.workspace(), args).ok());
      job.run({});
      // The steps up to the first that seals a page size the job's lists. Later ones seal too, and open a
      // run.
      if (t > 980) counted += test::allocations() - before;
      cache.end_batch(plan);
    }
    EXPECT_EQ(counted, 0u) << scheme;
    ASSERT_TRUE(cache.take_error().ok());
    EXPECT_EQ(cache.memory().tile_bytes > 0, !cache.layer(LayerId{0}).exact);
  }
  const size_t before = test::allocations();
  const std::vector<float> one(before % 7 + 1);
  EXPECT_EQ(test::allocations(), before + 1) << one.size();
}

}  // namespace
}  // namespace kvant

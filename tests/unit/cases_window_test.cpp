// Cases about the exact window, sinks and sliding windows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Look;
using test::Outputs;
using test::TokenRows;

// Key 0 is aligned with q and has a spike of 40 in a channel that q does not use; V is 1 for token 0, else 0,
// so the output is the probability of token 0.
test::Content spiked_sink() {
  return [](int, const LayerShape& shape, int seq, int pos) {
    TokenRows rows = test::random_content(9)(0, shape, seq, pos);
    for (size_t c = 0; c < rows.q.size(); ++c) {
      rows.q[c] = c % 64 == 63 ? 0.0f : (c % 2 == 0 ? 1.0f : -1.0f);
      if (pos == 0) rows.k[c % 64] = c % 64 == 63 ? 40.0f : rows.q[c];
    }
    for (float& v : rows.v) v = pos == 0 ? 1.0f : 0.0f;
    return rows;
  };
}

// C20: an exact first token keeps its share of the softmax, a quantized one does not.
TEST(WindowCases, C20SinkTokenStaysExact) {
  auto sink_probability = [](const std::string& scheme, bool original) {
    Engine engine({.scheme = scheme, .shapes = {{1, 1, 64, 64}}}, spiked_sink());
    engine.append(0, 0, 0, 127, 32);
    const Outputs out = engine.append(0, 0, 127, 1, 1, {.ref = true});
    return original ? out.ref[0][0] : out.engine[0][0];
  };
  const float ref = sink_probability("exact", true);
  EXPECT_GT(ref, 0.9f);
  EXPECT_NEAR(sink_probability("exact", false), ref, 1e-5f);
  EXPECT_GT(std::fabs(sink_probability("k=t4:s16,v=f16,kx=none,w=1,s=0", false) - ref), 0.05f);
  for (const char* scheme : {"k=t4:s16,v=f16,kx=none,w=1,s=1", "k=t4:s16,v=t4,kx=none,w=1,s=1",
                             "k=t4:s16,v=f16,kx=none,w=1,s=16"}) {
    EXPECT_NEAR(sink_probability(scheme, false), ref, 0.02f) << scheme;
  }
}

// Restored sinks: SlotCache.WriteRowsRestoresWhatReadRowsSaved, SlotTable.Restored*.
TEST(WindowCases, C20SinksSurviveSealingAndCopy) {
  Engine engine({.scheme = "k=t4,v=t4,w=64,s=70", .n_streams = 3}, test::random_content(2, 30.0f));
  engine.append(0, 0, 0, 300, 50);
  auto expect_exact = [&](int stream, int tokens) {
    std::vector<float> row(64);
    for (int t = 0; t < tokens; ++t) {
      for (const Side side : {Side::kKey, Side::kValue}) {
        const SidePage& page = engine.cache().side_page(LayerId{0}, StreamId{stream}, t / 64, side);
        ASSERT_TRUE((((page.row_mask | page.kept_mask) >> (t % 64)) & 1) != 0) << "token " << t;
        ASSERT_TRUE(engine.cache().read_slot(LayerId{0}, side, StreamId{stream}, t, false, row.data()).ok());
        EXPECT_TRUE(test::same_bits(row, engine.original(0, side, 0, t)))
            << "stream " << stream << " token " << t;
      }
    }
  };
  expect_exact(0, 70);
  EXPECT_NE(engine.cache().side_page(LayerId{0}, StreamId{0}, 1, Side::kKey).kept, nullptr);
  engine.copy_stream(0, 1);
  expect_exact(1, 70);
  EXPECT_EQ(test::stream_hash(engine.cache(), 0), test::stream_hash(engine.cache(), 1));
}

constexpr const char* kSinkSchemes[] = {"k=t4:s16,v=f16,kx=none,w=1,s=1", "k=t4:s16,v=t4,kx=none,w=1,s=16",
                                        "k=c4,v=t8,w=64,s=4"};

// Slot `slot` is a sink, its rows are the originals to the bit, and the query gives it the share of the
// softmax that exact keys give it.
void expect_sink(Engine* engine, const Entry& query, int slot, const std::string& what) {
  ASSERT_NE((engine->cache().sink_mask(StreamId{query.stream}, slot / 64) >> (slot % 64)) & 1, 0u) << what;
  std::vector<float> row(64);
  for (const Side side : {Side::kKey, Side::kValue}) {
    ASSERT_TRUE(
        engine->cache().read_slot(LayerId{0}, side, StreamId{query.stream}, slot, false, row.data()).ok());
    ASSERT_TRUE(test::same_bits(row, engine->original(0, side, query.stream, slot))) << what;
  }
  for (const AttentionPath path : {AttentionPath::kFused, AttentionPath::kDequantize}) {
    const Outputs out = engine->attend({query}, {.path = path, .ref = true});
    ASSERT_GT(out.ref[0][0], 0.8f) << what;
    ASSERT_NEAR(out.engine[0][0], out.ref[0][0], 0.02f) << what;
  }
}

// C20: a prefix taken over by another sequence that goes on differently: longer than the sinks, shorter than
// them, a whole page.
TEST(WindowCases, C20SinksSurvivePrefixReuse) {
  for (const char* scheme : kSinkSchemes) {
    for (const int prefix : {1, 8, 64, 100}) {
      const std::string what = std::string(scheme) + " prefix " + std::to_string(prefix);
      Engine engine({.scheme = scheme, .shapes = {{1, 1, 64, 64}}, .n_streams = 2}, spiked_sink());
      engine.append(0, 0, 0, 270, 45);
      const uint64_t before = test::stream_hash(engine.cache(), 0);
      engine.copy_stream(0, 1);
      for (int slot = 0; slot < 270; ++slot) {
        if (slot < prefix) engine.owners(1)[slot].seq = 1;
        if (slot >= prefix) engine.forget(1, slot);
      }
      engine.append(1, 1, prefix, 200 - prefix, 17);
      expect_sink(&engine, {.stream = 1, .seq = 1, .pos = 199, .slot = 199}, 0, what);
      EXPECT_EQ(test::stream_hash(engine.cache(), 0), before) << what;
      // The same in place: the cache of the sequence is cut back to the prefix.
      for (int slot = prefix; slot < 270; ++slot) engine.forget(0, slot);
      engine.append(0, 0, prefix, 250 - prefix, 17);
      expect_sink(&engine, {.seq = 0, .pos = 249, .slot = 249}, 0, what);
      // Every token that is among the first of its sequence now, the new ones too.
      const int sinks = engine.cache().options().sinks;
      for (int t = 0; t < sinks; ++t) expect_sink(&engine, {.seq = 0, .pos = 249, .slot = 249}, t, what);
      EXPECT_EQ(engine.cache().memory().exact_row_bytes, engine.walk().exact_row_bytes);
    }
  }
}

// C20: the slots around a sink change hands, in its own sequence and among sequences of one stream.
TEST(WindowCases, C20SinksSurviveEviction) {
  for (const char* scheme : kSinkSchemes) {
    // Keep 4, drop 4..100; the next tokens take the free slots.
    Engine engine({.scheme = scheme, .shapes = {{1, 1, 64, 64}}}, spiked_sink());
    engine.append(0, 0, 0, 250, 50);
    for (int slot = 4; slot <= 100; ++slot) engine.forget(0, slot);
    for (int slot = 4; slot <= 100; ++slot) {
      std::vector<Outputs> out;
      ASSERT_TRUE(engine.step({{.pos = 246 + slot, .slot = slot}}, {}, &out).ok());
      if (slot % 32 == 4) expect_sink(&engine, {.pos = 246 + slot, .slot = slot}, 0, scheme);
    }
    expect_sink(&engine, {.pos = 346, .slot = 100}, 0, scheme);

    // Sequences 0 and 1 in every second slot; 1 goes, 2 takes its slots. Both sinks lie in one page.
    Engine shared({.scheme = scheme, .shapes = {{1, 1, 64, 64}}}, spiked_sink());
    const auto interleave = [&](int seq, int first_slot) {
      for (int t = 0; t < 120; t += 4) {
        std::vector<Entry> entries;
        for (int i = t; i < t + 4; ++i) entries.push_back({.seq = seq, .pos = i, .slot = first_slot + 2 * i});
        std::vector<Outputs> out;
        ASSERT_TRUE(shared.step(entries, {}, &out).ok());
      }
    };
    interleave(0, 0);
    interleave(1, 1);
    expect_sink(&shared, {.seq = 0, .pos = 119, .slot = 238}, 0, scheme);
    expect_sink(&shared, {.seq = 1, .pos = 119, .slot = 239}, 1, scheme);
    for (int slot = 1; slot < 240; slot += 2) shared.forget(0, slot);
    interleave(2, 1);
    expect_sink(&shared, {.seq = 0, .pos = 119, .slot = 238}, 0, scheme);
    expect_sink(&shared, {.seq = 2, .pos = 119, .slot = 239}, 1, scheme);
  }
}

// Key of one head after a rotation by `angle` positions: pairs (c, c + 32), base 10000.
void rotate(float* key, int positions) {
  for (int c = 0; c < 32; ++c) {
    const double angle = positions * std::pow(10000.0, -c / 32.0);
    const float a = key[c], b = key[c + 32];
    key[c] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
    key[c + 32] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
  }
}

// As an engine shifts: keys are read, rotated and written back.
void shift_keys(Engine* engine, int first_slot, int count, int positions) {
  std::vector<uint16_t> keys(size_t{64} * count);
  SlotCache& cache = engine->cache();
  ASSERT_TRUE(cache.read_rows(LayerId{0}, Side::kKey, StreamId{0}, first_slot, count, keys.data()).ok());
  for (int i = 0; i < count; ++i) {
    float key[64];
    for (int c = 0; c < 64; ++c) key[c] = half_to_float(keys[static_cast<size_t>(i) * 64 + c]);
    rotate(key, positions);
    for (int c = 0; c < 64; ++c) keys[static_cast<size_t>(i) * 64 + c] = float_to_half(key[c]);
    engine->owners(0)[first_slot + i].pos += positions;
  }
  ASSERT_TRUE(cache.write_rows(LayerId{0}, Side::kKey, StreamId{0}, first_slot, count, keys.data()).ok());
}

// The first `tokens` are marked as sinks, their rows are the originals to the bit.
void expect_exact_sinks(Engine* engine, int tokens, const std::string& what) {
  std::vector<float> row(64);
  for (int t = 0; t < tokens; ++t) {
    ASSERT_NE((engine->cache().sink_mask(StreamId{0}, 0) >> t) & 1, 0u) << what << " token " << t;
    for (const Side side : {Side::kKey, Side::kValue}) {
      ASSERT_TRUE(engine->cache().read_slot(LayerId{0}, side, StreamId{0}, t, false, row.data()).ok());
      ASSERT_TRUE(test::same_bits(row, engine->original(0, side, 0, t))) << what << " token " << t;
    }
  }
}

// Share of slot 0 in the softmax over the keys that slots 0 .. n_slots - 1 hold.
double share_of_first(Engine* engine, int pos, int n_slots) {
  const TokenRows token = spiked_sink()(0, engine->shape(), 0, pos);
  std::vector<float> row(64);
  double sum = 0, first = 0;
  for (int slot = 0; slot < n_slots; ++slot) {
    const Status status =
        engine->cache().read_slot(LayerId{0}, Side::kKey, StreamId{0}, slot, false, row.data());
    EXPECT_TRUE(status.ok()) << status.message();
    double logit = 0;
    for (int c = 0; c < 64; ++c) logit += static_cast<double>(token.q[c]) * row[c] / 8;
    sum += std::exp(logit);
    if (slot == 0) first = std::exp(logit);
  }
  return first / sum;
}

// C20: keep 4, drop 4..19, shift the others by -16; values and the kept keys are not touched.
TEST(WindowCases, C20SinksSurviveShift) {
  constexpr int kTokens = 200;
  for (const char* scheme : kSinkSchemes) {
    Engine engine({.scheme = scheme, .shapes = {{1, 1, 64, 64}}}, spiked_sink());
    SlotCache& cache = engine.cache();
    engine.append(0, 0, 0, kTokens, 40);
    int newest = kTokens;
    for (int round = 0; round < 3; ++round) {
      const std::string what = std::string(scheme) + " round " + std::to_string(round);
      for (int slot = 4; slot < 20; ++slot) engine.forget(0, slot);
      std::vector<uint16_t> values(size_t{64} * kTokens), after(values.size());
      ASSERT_TRUE(cache.read_rows(LayerId{0}, Side::kValue, StreamId{0}, 0, kTokens, values.data()).ok());
      ASSERT_NO_FATAL_FAILURE(shift_keys(&engine, 20, kTokens - 20, -16));
      newest -= 16;
      // The next tokens take the free slots.
      for (int slot = 4; slot < 20; ++slot, ++newest) {
        std::vector<Outputs> out;
        const Look look = {.path = AttentionPath::kDequantize, .dqref = true};
        ASSERT_TRUE(engine.step({{.pos = newest, .slot = slot}}, look, &out).ok());
        ASSERT_LT(test::relative_error(out[0].engine, out[0].dqref), 1e-5) << what;
        ASSERT_GT(out[0].engine[0][0], 0.8f) << what;
      }
      ASSERT_TRUE(cache.read_rows(LayerId{0}, Side::kValue, StreamId{0}, 0, kTokens, after.data()).ok());
      EXPECT_TRUE(std::equal(after.begin() + 64 * 20, after.end(), values.begin() + 64 * 20)) << what;
      ASSERT_NO_FATAL_FAILURE(expect_exact_sinks(&engine, std::min(4, cache.options().sinks), what));
      const Outputs last = engine.attend({{.pos = newest - 1, .slot = 19}}, {});
      EXPECT_NEAR(last.engine[0][0], share_of_first(&engine, newest - 1, kTokens), 0.02) << what;
    }
  }
}

// C21: three zero logits and a sink logit of ln 3 share the softmax by halves, so V = 6 gives 3.
TEST(WindowCases, C21LearnedSinkLogit) {
  auto content = [](int, const LayerShape& shape, int, int) {
    TokenRows rows;
    rows.q.assign(static_cast<size_t>(shape.n_query_heads) * shape.key_dim, 1.0f);
    rows.k.assign(static_cast<size_t>(shape.n_kv_heads) * shape.key_dim, 0.0f);
    rows.v.assign(static_cast<size_t>(shape.n_kv_heads) * shape.value_dim, 6.0f);
    return rows;
  };
  for (const std::string& format : format_names()) {
    // No transform: a constant row stays constant, which every format holds.
    const std::string scheme = "k=" + format + ",v=" + format + ",kx=none,vx=none,w=1,s=0";
    Engine engine({.scheme = scheme, .n_slots = 192, .n_streams = 2}, content);
    auto expect_three = [&](const std::vector<std::vector<float>>& rows, float tolerance, const char* where) {
      ASSERT_FALSE(rows.empty());
      for (const float x : rows.back()) ASSERT_NEAR(x, 3.0f, tolerance) << format << ' ' << where;
    };
    const auto sink = [](int n) { return std::vector<float>(2, std::log(static_cast<float>(n))); };
    expect_three(engine.append(0, 0, 0, 3, 3, {.sink_logits = sink(3)}).engine, 1e-5f, "prefill of 3");
    for (const AttentionPath path : {AttentionPath::kFused, AttentionPath::kDequantize}) {
      engine.clear();
      expect_three(engine.append(0, 0, 0, 150, 150, {.sink_logits = sink(150), .path = path}).engine, 0.03f,
                   "prefill");
      expect_three(engine.append(0, 0, 150, 1, 1, {.sink_logits = sink(151), .path = path}).engine, 0.03f,
                   "decode");
      EXPECT_NE(engine.cache().memory().tile_bytes == 0,
                engine.cache().layer(LayerId{0}).heads[0].key_format.exact() == false);
      engine.append(1, 0, 0, 151, 50);
      std::vector<Outputs> out;
      ASSERT_TRUE(engine
                      .step({{.stream = 0, .pos = 151, .slot = 151}, {.stream = 1, .pos = 151, .slot = 151}},
                            {.sink_logits = sink(152), .path = path}, &out)
                      .ok());
      for (const auto& row : out[0].engine) expect_three({row}, 0.03f, "batch");
    }
  }
}

// C22: after every single append, what was promised exact is exact to the bit.
TEST(WindowCases, C22WindowBoundary) {
  struct Case {
    const char* scheme;
    int window;
  };
  for (const Case& c : {Case{"k=t4,v=t3,w=64,s=3", 64}, Case{"k=c4,v=t4,w=70,s=0", 70},
                        Case{"k=g4,v=c2,w=1,s=16", 1}, Case{"k=t4,v=t4,w=128,s=16", 128}}) {
    Engine single({.scheme = c.scheme, .n_slots = 448});
    const int count = std::max(2 * c.window + 3, 140);
    std::vector<float> row(64);
    for (int t = 0; t < count; ++t) {
      const Outputs out = single.append(0, 0, t, 1, 1, {.path = AttentionPath::kDequantize, .dqref = true});
      ASSERT_EQ(single.cache().used_slots(StreamId{0}), t + 1);
      ASSERT_LT(test::worst_row_error(out.engine, out.dqref), 1e-5) << c.scheme << " token " << t;
      for (int k = std::max(0, t + 1 - c.window); k <= t; ++k) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          const SidePage& page = single.cache().side_page(LayerId{0}, StreamId{0}, k / 64, side);
          ASSERT_TRUE(((page.row_mask >> (k % 64)) & 1) != 0) << c.scheme << " at " << t << " token " << k;
          ASSERT_TRUE(single.cache().read_slot(LayerId{0}, side, StreamId{0}, k, false, row.data()).ok());
          ASSERT_TRUE(test::same_bits(row, single.original(0, side, 0, k)));
        }
      }
    }
  }
}

TEST(WindowCases, C22OnePrefillEqualsSingleAppendsByteForByte) {
  for (const char* scheme : {"k=t4,v=t3,w=64,s=3", "k=c4,v=ct4,w=70,s=0", "k=g4,v=c2,w=1,s=16",
                             "k=t5-3,v=t4a,w=0,s=0", "k=t4,v=f16,w=128,s=70"}) {
    const int tokens = 384;
    Engine prefill({.scheme = scheme, .n_slots = 384, .poison = 0xAA});
    const Outputs at_once = prefill.append(0, 0, 0, tokens, tokens);
    Engine single({.scheme = scheme, .n_slots = 384, .poison = 0xFF});
    const Outputs one_by_one = single.append(0, 0, 0, tokens, 1);
    EXPECT_EQ(test::stream_hash(prefill.cache(), 0), test::stream_hash(single.cache(), 0)) << scheme;
    EXPECT_TRUE(test::same_bits(at_once.engine, one_by_one.engine)) << scheme;
    EXPECT_EQ(prefill.cache().memory().total(), single.cache().memory().total()) << scheme;
    EXPECT_EQ(prefill.cache().sealed_tiles(), single.cache().sealed_tiles()) << scheme;
    EXPECT_GT(prefill.cache().sealed_tiles(), 0u);
  }
}

// C23: sliding-window attention over values that name their token.
TEST(WindowCases, C23SlidingWindowAttention) {
  struct Case {
    const char* scheme;
    float tolerance;
  };
  for (const Case& c : {Case{"exact", 1e-4f}, Case{"k=t4,v=t8,vx=none,w=32,s=0", 1e-4f},
                        Case{"k=t4,v=t8:s16,vx=none,w=1,s=0", 0.5f}}) {
    for (const int chunk : {1, 7, 40, 100}) {
      Engine engine({.scheme = c.scheme, .n_slots = 128}, test::tag_content());
      const Outputs out = engine.append(0, 0, 0, 100, chunk, {.sliding_window = 32, .dqref = true});
      for (const int t : {5, 30, 31, 32, 33, 47, 48, 63, 64, 99}) {
        const float want = t < 31 ? static_cast<float>(t) / 2.0f : static_cast<float>(t) - 15.5f;
        EXPECT_NEAR(out.engine[t][0], want, c.tolerance) << c.scheme << " chunk " << chunk << " t " << t;
        EXPECT_NEAR(out.dqref[t][0], want, c.tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace kvant

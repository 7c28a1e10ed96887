// Cases about the exact window, sinks and sliding windows.
#include <gtest/gtest.h>

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

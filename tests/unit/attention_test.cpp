// Attention over a SlotCache against DQREF and REF: formats, shapes, masks, paths, threads.
#include "kvant/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/isa.h"
#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::EngineOptions;
using test::Entry;
using test::Look;
using test::Outputs;

std::vector<Entry> positions(int first, int count) {
  std::vector<Entry> entries;
  for (int i = 0; i < count; ++i) entries.push_back({.pos = first + i, .slot = first + i});
  return entries;
}

// Both paths against DQREF, and against each other, for the newest `count` of `tokens` tokens.
void expect_paths_agree(Engine* engine, int tokens, int count, Look look, const std::string& what) {
  engine->append(0, 0, 0, tokens, 64, {.seal_only = true});
  look.dqref = true;
  look.path = AttentionPath::kDequantize;
  const Outputs plain = engine->attend(positions(tokens - count, count), look);
  look.path = AttentionPath::kFused;
  const Outputs fused = engine->attend(positions(tokens - count, count), look);
  EXPECT_LT(test::relative_error(plain.engine, plain.dqref), 1e-5) << what;
  const double tolerance = test::engine_tolerance(engine->cache(), 0, AttentionPath::kFused);
  EXPECT_LT(test::relative_error(fused.engine, fused.dqref), tolerance) << what;
  EXPECT_LT(test::relative_error(fused.engine, plain.engine), tolerance) << what;
}

class KeyFormat : public ::testing::TestWithParam<std::string> {};

// C15: this key format with every value format, threads 1 and 4.
TEST_P(KeyFormat, C15EveryValueFormat) {
  static const test::Content content = test::remembered(test::random_content(15));
  int poison = 0xAA;
  for (const std::string& value : format_names()) {
    poison ^= 0xAA ^ 0xFF;
    const std::string scheme = "k=" + GetParam() + ",v=" + value + ",w=1,s=3";
    Engine engine({.scheme = scheme, .n_slots = 256, .threads = 4, .poison = poison}, content);
    engine.append(0, 0, 0, 192, 192, {.seal_only = true});
    const Outputs fused = engine.append(0, 0, 192, 8, 8, {.threads = 1, .dqref = true});
    ASSERT_LT(test::relative_error(fused.engine, fused.dqref),
              test::engine_tolerance(engine.cache(), 0, AttentionPath::kFused))
        << scheme;
    const Outputs four = engine.attend(positions(192, 8), {.threads = 4});
    ASSERT_TRUE(test::same_bits(fused.engine, four.engine)) << scheme;
    const Outputs plain =
        engine.attend(positions(192, 8), {.path = AttentionPath::kDequantize, .threads = 4});
    ASSERT_LT(test::relative_error(plain.engine, fused.dqref), 1e-5) << scheme;
    // A tile is used wherever the format is not exact: nothing falls back to exact rows.
    const HeadScheme& head = engine.cache().layer(LayerId{0}).heads[0];
    const SidePage& keys = engine.cache().side_page(LayerId{0}, StreamId{0}, 1, Side::kKey);
    const SidePage& values = engine.cache().side_page(LayerId{0}, StreamId{0}, 1, Side::kValue);
    ASSERT_EQ(keys.tile_mask, head.key_format.exact() ? 0 : ~uint64_t{0});
    ASSERT_EQ(values.tile_mask, head.value_format.exact() ? 0 : ~uint64_t{0});
    ASSERT_EQ(keys.rows == nullptr, !head.key_format.exact());
  }
}

std::string test_name(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Formats, KeyFormat, ::testing::ValuesIn(format_names()),
                         [](const auto& info) { return test_name(info.param); });

constexpr int kHeadDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256};

TEST(AttentionShapes, HeadSizes) {
  for (const int dim : kHeadDims) {
    for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=2", "k=c5,v=g3,w=64,s=0", "k=t5-3,v=t8,w=1,s=0",
                               "k=ct4-3,v=c2a,w=1,s=0", "k=g4a,v=t6-4-3-3,w=1,s=0"}) {
      // Four bands of at least 16 channels.
      if (dim < 64 && std::string(scheme).find("6-4-3-3") != std::string::npos) continue;
      Engine engine({.scheme = scheme, .shapes = {{4, 2, dim, dim}}, .n_slots = 256, .threads = 2});
      expect_paths_agree(&engine, 150, 5, {}, std::string(scheme) + " D=" + std::to_string(dim));
    }
  }
}

TEST(AttentionShapes, KeyAndValueHeadSizesDiffer) {
  for (const auto& [k, v] : {std::pair{32, 256}, {256, 32}, {192, 128}, {40, 72}, {96, 64}, {64, 120}}) {
    for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=2", "k=c4,v=g4,w=1,s=0"}) {
      Engine engine({.scheme = scheme, .shapes = {{6, 2, k, v}}, .n_slots = 256, .poison = 0xFF});
      expect_paths_agree(&engine, 150, 5, {},
                         std::string(scheme) + " " + std::to_string(k) + "/" + std::to_string(v));
    }
  }
}

// Widths that differ from head to head (fit=1): one KV head or several, one query head or several, every ISA.
TEST(AttentionShapes, WidthsPerHead) {
  const std::string best(active_isa());
  for (const std::string_view isa : available_isas()) {
    ASSERT_TRUE(force_isa(isa).ok());
    for (const int dim : {32, 40, 80, 96, 256}) {
      for (const auto& [queries, kv] : {std::pair{1, 1}, {8, 1}, {3, 3}, {10, 5}}) {
        Engine engine({.scheme = "k=t4-2-2-2,v=t4,w=1,s=2",
                       .shapes = {{queries, kv, dim, dim}},
                       .n_slots = 256,
                       .threads = 2,
                       .poison = 0xFF,
                       .adjust = test::vary_key_widths});
        expect_paths_agree(&engine, 150, 5, {},
                           std::string(isa) + " D=" + std::to_string(dim) + " " + std::to_string(queries) +
                               " heads on " + std::to_string(kv));
      }
    }
  }
  ASSERT_TRUE(force_isa(best).ok());
}

TEST(AttentionShapes, QueryGroups) {
  for (const int group : {1, 3, 4, 7, 8, 16, 71}) {
    for (const int n_kv_heads : {1, 2}) {
      Engine engine({.scheme = "k=t4,v=t3,w=1,s=2",
                     .shapes = {{group * n_kv_heads, n_kv_heads, 64, 32}},
                     .n_slots = 704,
                     .threads = 3});
      expect_paths_agree(&engine, 650, 3, {}, "group " + std::to_string(group));
    }
  }
}

// Several layers of one cache with different shapes and schemes share the workspace.
TEST(AttentionShapes, LayersOfDifferentShapes) {
  Engine engine({.layer_schemes = {"k=t4,v=t8", "exact", "k=c3,v=f16", "k=f16,v=g4"},
                 .shapes = {{4, 2, 64, 64}, {2, 2, 128, 32}, {3, 1, 32, 256}, {8, 1, 256, 40}},
                 .n_slots = 256,
                 .threads = 2});
  std::vector<Outputs> out;
  ASSERT_TRUE(engine.step(positions(0, 200), {}, &out).ok());
  ASSERT_TRUE(engine.step(positions(200, 4), {.path = AttentionPath::kDequantize, .dqref = true}, &out).ok());
  for (const Outputs& layer : out) EXPECT_LT(test::relative_error(layer.engine, layer.dqref), 1e-5);
  ASSERT_TRUE(engine.step(positions(204, 4), {.dqref = true}, &out).ok());
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_LT(test::relative_error(out[layer].engine, out[layer].dqref),
              test::engine_tolerance(engine.cache(), layer, AttentionPath::kFused));
  }
}

TEST(AttentionShapes, OneSideExact) {
  for (const char* scheme :
       {"k=f16,v=t4,w=1,s=3", "k=t4,v=f16,w=1,s=3", "k=bf16,v=c4,w=1,s=0", "k=g4,v=bf16,w=1,s=0"}) {
    Engine engine({.scheme = scheme, .n_slots = 256});
    expect_paths_agree(&engine, 200, 8, {}, scheme);
    const bool key_exact = engine.cache().layer(LayerId{0}).heads[0].key_format.exact();
    const Side exact = key_exact ? Side::kKey : Side::kValue;
    std::vector<uint16_t> rows(size_t{200} * 64);
    ASSERT_TRUE(engine.cache().read_rows(LayerId{0}, exact, StreamId{0}, 0, 200, rows.data()).ok());
    for (int t = 0; t < 200; ++t) {
      const std::vector<float> want = engine.original(0, exact, 0, t);
      for (int c = 0; c < 64; ++c) ASSERT_EQ(half_to_float(rows[static_cast<size_t>(t) * 64 + c]), want[c]);
    }
  }
}

TEST(AttentionMasks, SoftCapBiasSlopesAndSinks) {
  const std::vector<float> slopes = {0.5f, 0.125f, 0.03f, 0.25f};
  const std::vector<float> sinks = {0.5f, -3.0f, 4.0f, 0.0f};
  const std::vector<Look> looks = {
      {.soft_cap = 2.0f},
      {.bias = true},
      {.alibi_slopes = slopes},
      {.sink_logits = sinks},
      {.sliding_window = 90},
      {.scale = 0.5f},
      {.sliding_window = 150, .scale = 0.2f, .soft_cap = 5.0f, .alibi_slopes = slopes, .sink_logits = sinks}};
  for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=2", "k=c8,v=g8,w=70,s=0"}) {
    for (size_t i = 0; i < looks.size(); ++i) {
      Engine engine({.scheme = scheme, .shapes = {{4, 2, 64, 64}}, .n_slots = 640, .threads = 2});
      const std::string what = std::string(scheme) + " look " + std::to_string(i);
      expect_paths_agree(&engine, 600, 4, looks[i], what);
      Look look = looks[i];
      look.ref = true;
      const Outputs out = engine.attend(positions(590, 3), look);
      const bool exact = engine.cache().layer(LayerId{0}).exact;
      const bool wide = scheme[2] == 'c';
      EXPECT_LT(test::relative_error(out.engine, out.ref), exact ? 1e-5 : wide ? 0.02 : 0.25) << what;
    }
  }
}

// A query that sees nothing gives zeros, with learned sinks too.
TEST(AttentionMasks, NothingVisible) {
  for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=0"}) {
    Engine engine({.scheme = scheme});
    engine.append(0, 0, 0, 200, 100);
    for (const bool sinks : {false, true}) {
      Look look;
      if (sinks) look.sink_logits = {1.0f, -2.0f};
      const Outputs out =
          engine.attend({{.seq = 7, .pos = 3, .slot = 0}, {.seq = 0, .pos = 50, .slot = 50}}, look);
      EXPECT_EQ(out.engine[0], std::vector<float>(128, 0.0f));
      EXPECT_NE(out.engine[1], std::vector<float>(128, 0.0f));
    }
  }
}

TEST(AttentionPaths, DqrefIsNearRef) {
  struct Case {
    const char* scheme;
    double most;
  };
  // Relative error of the output for Gaussian data: what each width loses, and that wider loses less.
  double last = 0;
  for (const Case& c : {Case{"k=t8:s16,v=t8:s16,w=1,s=0", 0.02}, Case{"k=t6:s16,v=t6:s16,w=1,s=0", 0.05},
                        Case{"k=t4:s16,v=t4:s16,w=1,s=0", 0.2}, Case{"k=t3:s16,v=t3:s16,w=1,s=0", 0.4}}) {
    Engine engine({.scheme = c.scheme});
    engine.append(0, 0, 0, 320, 64);
    const Outputs out = engine.append(0, 0, 320, 16, 16, {.dqref = true, .ref = true});
    const double error = test::relative_error(out.dqref, out.ref);
    EXPECT_LT(error, c.most) << c.scheme;
    EXPECT_GT(error, 1.5 * last) << c.scheme;
    last = error;
  }
}

// A calibrated transform with a centre, on both sides: exact and quantized keys meet in one softmax.
TEST(AttentionPaths, DenseTransformsWithCentre) {
  const int dim = 64;
  std::vector<float> matrix(static_cast<size_t>(dim) * dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      matrix[static_cast<size_t>(i) * dim + j] =
          (i == j ? 1.0f : 0.0f) + 0.3f * std::sin(static_cast<float>(i * 7 + j * 3)) / 8.0f;
    }
  }
  std::vector<float> centre(dim);
  for (int c = 0; c < dim; ++c) centre[c] = 0.5f * std::cos(static_cast<float>(c));
  auto adjust = [&](int, LayerScheme* layer) {
    for (HeadScheme& head : layer->heads) {
      for (const Side side : {Side::kKey, Side::kValue}) {
        Result<Transform> made = Transform::dense(dim, matrix, side);
        ASSERT_TRUE(made.ok()) << made.status().message();
        made.value().set_centre(centre);
        auto& transform = side == Side::kKey ? head.key_transform : head.value_transform;
        transform = std::make_shared<const Transform>(made.value());
      }
    }
  };
  Engine engine({.scheme = "k=t6:s16,v=t6:s16,w=64,s=3", .shapes = {{4, 2, dim, dim}}, .adjust = adjust});
  expect_paths_agree(&engine, 300, 6, {}, "dense");
  const Outputs out = engine.attend(positions(290, 6), {.ref = true});
  EXPECT_LT(test::relative_error(out.engine, out.ref), 0.08);
}

// The share of visible keys that were read from tiles.
TEST(AttentionCounters, CountVisibleAndQuantizedPairs) {
  Engine engine({.scheme = "k=t4,v=f16,w=64,s=3", .shapes = {{6, 2, 64, 64}}});
  engine.append(0, 0, 0, 300, 77);
  uint64_t total = 0, quantized = 0;
  for (int t = 0; t < 300; ++t) {
    total += 6u * static_cast<uint64_t>(t + 1);
    // Pages below the one that holds the oldest of the newest 64 tokens, but for 3 sinks.
    const int sealed = std::max(0, t + 1 - 64) / 64 * 64;
    quantized += 6u * static_cast<uint64_t>(std::max(0, sealed - 3));
  }
  EXPECT_EQ(engine.cache().counters().pairs_total.load(), total);
  EXPECT_EQ(engine.cache().counters().pairs_quantized.load(), quantized);
  EXPECT_EQ(engine.cache().counters().pairs_quantized_v.load(), 0u);
}

// Two of three pages lie far below the first: leaving them out changes nothing that can be seen, for any
// number of threads and queries.
TEST(AttentionSkip, PagesThatCannotMatterAreLeftOut) {
  const test::Content random = test::random_content(3);
  const test::Content peaked = [random](int layer, const LayerShape& shape, int seq, int pos) {
    test::TokenRows rows = random(layer, shape, seq, pos);
    for (float& x : rows.k) x *= pos / kPageTokens % 3 == 0 ? 12.0f : 0.1f;
    return rows;
  };
  for (const char* scheme : {"k=t4,v=t4,w=1,s=0", "k=c4a,v=t4,w=64,s=5", "exact"}) {
    Engine engine({.scheme = scheme, .shapes = {{6, 2, 64, 64}}, .n_slots = 1280, .threads = 3}, peaked);
    engine.append(0, 0, 0, 1200, 100, {.seal_only = true});
    std::vector<Entry> queries;
    for (int t = 1100; t < 1140; ++t) queries.push_back({.pos = t, .slot = t});
    Look look;
    look.skip_below = std::numeric_limits<float>::infinity();
    const Outputs all = engine.attend(queries, look);
    EXPECT_EQ(engine.cache().counters().pairs_skipped.load(), 0u);
    look.skip_below = kSkipBelow;
    const Outputs skipped = engine.attend(queries, look);
    const uint64_t pairs = engine.cache().counters().pairs_skipped.load();
    if (std::string(scheme) != "exact") {
      EXPECT_GT(pairs, queries.size() * 6u * 128u) << scheme;
    }
    EXPECT_LT(test::relative_error(skipped.engine, all.engine), 1200 * 0x1p-24) << scheme;
    look.threads = 1;
    EXPECT_TRUE(test::same_bits(engine.attend(queries, look).engine, skipped.engine)) << scheme;
    EXPECT_TRUE(test::same_bits(engine.attend({queries[7]}, look).engine[0], skipped.engine[7])) << scheme;
  }
}

TEST(AttentionRefusals, BadArgumentsAreRefusedBeforeAnyWork) {
  Engine engine({});
  BatchPlan plan;
  std::vector<float> q(128), out(128);
  AttentionJob job;
  AttentionArgs args = {.layer = LayerId{1}, .plan = &plan, .q = q.data(), .out = out.data()};
  EXPECT_EQ(job.prepare(&engine.cache(), &engine.workspace(), args).code(), Code::kOutOfRange);
  args.layer = LayerId{0};
  args.plan = nullptr;
  EXPECT_EQ(job.prepare(&engine.cache(), &engine.workspace(), args).code(), Code::kInvalidArgument);
  args.plan = &plan;
  args.q = nullptr;
  EXPECT_EQ(job.prepare(&engine.cache(), &engine.workspace(), args).code(), Code::kInvalidArgument);
  args.q = q.data();
  args.out = nullptr;
  EXPECT_EQ(job.prepare(&engine.cache(), &engine.workspace(), args).code(), Code::kInvalidArgument);
}

TEST(AttentionRefusals, ShapesThatCannotRunNameTheNearest) {
  Result<Scheme> scheme = parse_scheme("k=t4,v=t4");
  ASSERT_TRUE(scheme.ok());
  for (const auto& [shape, named] :
       {std::pair{LayerShape{2, 1, 24, 64}, "32"}, std::pair{LayerShape{2, 1, 64, 264}, "256"},
        std::pair{LayerShape{2, 1, 66, 64}, "64"}, std::pair{LayerShape{3, 2, 64, 64}, "3 query heads"},
        std::pair{LayerShape{0, 1, 64, 64}, "0 query heads"}}) {
    const Result<LayerScheme> layer = resolve_layer(scheme.value(), shape);
    ASSERT_FALSE(layer.ok());
    EXPECT_EQ(layer.status().code(), Code::kUnsupported);
    EXPECT_NE(layer.status().message().find(named), std::string::npos) << layer.status().message();
  }
}

// One prefill of 1,024 tokens equals 1,024 single steps, bit for bit.
TEST(AttentionInvariance, PrefillEqualsSingleSteps) {
  struct Case {
    const char* scheme;
    LayerShape shape;
  };
  for (const Case& c :
       {Case{"exact", {2, 1, 64, 64}}, Case{"k=t4,v=t4,w=128,s=16", {4, 2, 64, 64}},
        Case{"k=c4,v=g3,w=64,s=0", {3, 1, 128, 128}}, Case{"k=t5-3,v=t4a,w=1,s=5", {2, 2, 80, 40}},
        Case{"k=g8,v=c8,w=0,s=0", {1, 1, 256, 96}}, Case{"k=ct4,v=f16,w=200,s=80", {8, 1, 32, 32}}}) {
    for (const AttentionPath path : {AttentionPath::kFused, AttentionPath::kDequantize}) {
      if (path == AttentionPath::kDequantize && c.shape.key_dim != 64) continue;
      const Look look = {.soft_cap = 20.0f, .path = path};
      Engine prefill(
          {.scheme = c.scheme, .shapes = {c.shape}, .n_slots = 1024, .threads = 2, .poison = 0xAA});
      const Outputs at_once = prefill.append(0, 0, 0, 1024, 1024, look);
      Engine single({.scheme = c.scheme, .shapes = {c.shape}, .n_slots = 1024, .poison = 0xFF});
      const Outputs steps = single.append(0, 0, 0, 1024, 1, look);
      EXPECT_TRUE(test::same_bits(at_once.engine, steps.engine)) << c.scheme;
      EXPECT_EQ(test::stream_hash(prefill.cache(), 0), test::stream_hash(single.cache(), 0)) << c.scheme;
    }
  }
}

// Runs are shared by threads for single steps and not for a batch: merged in the same order. With 16 runs the
// two threads also take some of them in advance.
TEST(AttentionInvariance, RunsAreMergedInOrder) {
  for (const char* scheme : {"exact", "k=t4,v=t4,w=64,s=3"}) {
    for (const auto& [tokens, threads] : {std::pair{1600, 3}, {8128, 2}}) {
      const int slots = tokens + 64;
      Engine batch({.scheme = scheme, .n_slots = slots});
      Engine steps({.scheme = scheme, .n_slots = slots, .threads = threads, .poison = 0xFF});
      for (Engine* engine : {&batch, &steps}) engine->append(0, 0, 0, tokens, 100, {.seal_only = true});
      EXPECT_TRUE(test::same_bits(batch.append(0, 0, tokens, 32, 32).engine,
                                  steps.append(0, 0, tokens, 32, 1).engine));
    }
  }
}

// Every instruction set that this machine runs: right against DQREF, the same bits for prefill and single
// steps, and the same tiles on all of them.
TEST(AttentionInvariance, EveryInstructionSet) {
  const std::string best(active_isa());
  for (const char* scheme : {"k=t4,v=t3,w=64,s=3", "k=c4,v=c8,w=1,s=0", "k=t5-3,v=g4a,w=1,s=0",
                             "k=g8,v=t6-4,w=1,s=5", "k=t7,v=ct2,w=1,s=0", "exact"}) {
    uint64_t hash = 0;
    for (const std::string_view isa : available_isas()) {
      ASSERT_TRUE(force_isa(isa).ok());
      ASSERT_EQ(active_isa(), isa);
      const std::string what = std::string(scheme) + " on " + std::string(isa);
      const LayerShape shape = {3, 1, 80, 64};
      Engine engine({.scheme = scheme, .shapes = {shape}, .n_slots = 640, .threads = 2});
      expect_paths_agree(&engine, 560, 5, {}, what);
      const Outputs at_once = engine.append(0, 0, 560, 20, 20);
      Engine single({.scheme = scheme, .shapes = {shape}, .n_slots = 640});
      single.append(0, 0, 0, 560, 80, {.seal_only = true});
      EXPECT_TRUE(test::same_bits(single.append(0, 0, 560, 20, 1).engine, at_once.engine)) << what;
      const uint64_t own = test::stream_hash(engine.cache(), 0);
      if (hash == 0) hash = own;
      EXPECT_EQ(own, hash) << what;
    }
  }
  ASSERT_TRUE(force_isa(best).ok());
}

}  // namespace
}  // namespace kvant

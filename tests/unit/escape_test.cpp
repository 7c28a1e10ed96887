// Heads that a width would break get wider bands, one head at a time, and say so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kvant/layer_scheme.h"
#include "support/format_data.h"
#include "support/harness.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

constexpr int kDim = 64;

// The identity basis with `power` spread over the first quarter of the rows.
std::shared_ptr<const CalibratedBasis> basis(float power, float excess = 1.0f) {
  auto made = std::make_shared<CalibratedBasis>();
  made->dim = kDim;
  made->forward.assign(static_cast<size_t>(kDim) * kDim, 0.0f);
  for (int i = 0; i < kDim; ++i) made->forward[static_cast<size_t>(i) * kDim + i] = 1.0f;
  made->error.spectrum.assign(kDim, 0.0f);
  for (int i = 0; i < kDim / 4; ++i) made->error.spectrum[i] = power / (kDim / 4);
  made->error.excess = excess;
  made->error.rotated = 4 * power;
  made->error.per_channel = power / 2;
  made->error.largest = 10.0f;
  return made;
}

LayerScheme resolve(const std::string& text, const LayerCalibration& calibration) {
  const Result<Scheme> scheme = parse_scheme(text);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  Result<LayerScheme> layer =
      resolve_layer(scheme.value(), {.n_query_heads = 4, .n_kv_heads = 2, .key_dim = kDim, .value_dim = kDim},
                    &calibration);
  EXPECT_TRUE(layer.ok()) << layer.status().message();
  return layer.value();
}

TEST(ExpectedError, SumsBandsByTheirShareOfTheSpectrum) {
  const ErrorModel model = basis(2.0f)->error;
  const auto error = [&](const char* name, TransformKind kind) {
    return expected_error(model, testing::must_parse(name, Side::kKey, kDim), kind);
  };
  // All of the spectrum is in the first quarter.
  EXPECT_NEAR(error("t4", TransformKind::kDense), 2 * .0099, 1e-6);
  EXPECT_NEAR(error("t6-2-2-2", TransformKind::kDense), 2 * .0007, 1e-6);
  EXPECT_NEAR(error("t4", TransformKind::kHadamard), 8 * .0099, 1e-6);
  EXPECT_NEAR(error("c4a", TransformKind::kIdentity), 1 * .0099, 1e-6);
  EXPECT_EQ(error("f16", TransformKind::kIdentity), 0.0);
  EXPECT_NEAR(expected_error(basis(2.0f, 3.0f)->error, testing::must_parse("t4", Side::kKey, kDim),
                             TransformKind::kDense),
              6 * .0099, 1e-6);
  EXPECT_EQ(expected_error(ErrorModel(), testing::must_parse("t2", Side::kKey, kDim), TransformKind::kDense),
            0.0);
}

TEST(Escape, AnErrorThatIsNoNumberIsSaid) {
  const float nan = std::nanf("");
  const LayerCalibration calibration{.key = {basis(1.0f), basis(nan)}, .value = {basis(nan), basis(1.0f)}};
  const LayerScheme layer = resolve("k=t4-2-2-2,v=t3", calibration);
  for (const HeadScheme& head : layer.heads) {
    EXPECT_EQ(head.key_format.name(), "t4-2-2-2");
    EXPECT_EQ(head.value_format.name(), "t3");
  }
  EXPECT_THAT(layer.reason, HasSubstr("keys of KV head 1: expected error is not a number at t4-2-2-2"));
  EXPECT_THAT(layer.reason, HasSubstr("values of KV head 0: expected error is not a number at t3"));
}

TEST(Escape, OnlyTheHeadThatBreaksGetsMoreBits) {
  const LayerCalibration calibration{.key = {basis(1.0f), basis(400.0f)},
                                     .value = {basis(1.0f), basis(1.0f)}};
  const LayerScheme layer = resolve("k=t4-2-2-2,v=t3", calibration);
  EXPECT_EQ(layer.heads[0].key_format.name(), "t4-2-2-2");
  // 400 * .0099 is above the limit and 400 * .0027 still is; 6 bits are the first that hold.
  EXPECT_EQ(layer.heads[1].key_format.name(), "t6-4-4-4");
  EXPECT_EQ(layer.heads[1].value_format.name(), "t3");
  EXPECT_THAT(
      layer.reason,
      HasSubstr("keys of KV head 1: expected error 3.96 at t4-2-2-2 is above 0.5, t6-4-4-4 has 0.28"));
  EXPECT_THAT(layer.effective,
              HasSubstr("k=t4-2-2-2 v=t3 kx=calibrated vx=calibrated (head 1 k=t6-4-4-4 v=t3)"));
  EXPECT_EQ(layer.requested, "k=t4-2-2-2,v=t3,w=128,s=16,kx=auto,vx=auto,fit=0");
}

TEST(Escape, StopsAtEightBitsAndLeavesHealthyHeadsAlone) {
  const LayerCalibration healthy{.key = {basis(1.0f), basis(1.0f)}, .value = {basis(1.0f), basis(1.0f)}};
  EXPECT_EQ(resolve("k=t4-2-2-2,v=t2", healthy).reason, "");
  const LayerCalibration hopeless{.key = {basis(1e9f), basis(1.0f)},
                                  .value = {basis(1.0f), basis(1.0f, 9.0f)}};
  const LayerScheme layer = resolve("k=t7-5,v=t2", hopeless);
  EXPECT_EQ(layer.heads[0].key_format.name(), "t8-8");
  EXPECT_EQ(layer.heads[1].key_format.name(), "t7-5");
  // Nine times the error of normal data at 2 bits is not a value any more.
  EXPECT_EQ(layer.heads[0].value_format.name(), "t2");
  EXPECT_EQ(layer.heads[1].value_format.name(), "t4");
  EXPECT_THAT(layer.reason, HasSubstr("values of KV head 1"));
}

TEST(Escape, KnowsPlainRotationsAndChannels) {
  const LayerCalibration calibration{.key = {basis(20.0f), basis(20.0f)},
                                     .value = {basis(1.0f), basis(1.0f)}};
  EXPECT_EQ(resolve("k=t4,v=t4", calibration).heads[0].key_format.name(), "t4");
  EXPECT_EQ(resolve("k=t4,v=t4,kx=hadamard", calibration).heads[0].key_format.name(), "t5");
  EXPECT_EQ(resolve("k=c4a,v=t4", calibration).heads[0].key_format.name(), "c4a");
}

TEST(Escape, SchemesForComparisonStayAsTheyAre) {
  const LayerCalibration broken{.key = {basis(1e6f), basis(1e6f)}, .value = {basis(1.0f), basis(1.0f)}};
  EXPECT_EQ(resolve("cmp-groups4", broken).heads[0].key_format.name(), "g4");
  EXPECT_EQ(resolve("cmp-groups4,w=64", broken).reason, "");
  EXPECT_EQ(resolve("k=g4,v=g4,kx=hadamard", broken).heads[0].key_format.name(), "g8");
}

TEST(Escape, EngineReadsHeadsOfDifferentFormats) {
  auto adjust = [](int, LayerScheme* layer) {
    layer->heads[1].key_format = testing::must_parse("t8", Side::kKey, kDim);
    layer->heads[1].value_format = testing::must_parse("t5", Side::kValue, kDim);
    layer->heads[2].key_format = testing::must_parse("c4a", Side::kKey, kDim);
  };
  test::Engine engine({.scheme = "k=t3,v=t3,w=1,s=2",
                       .shapes = {{6, 3, kDim, kDim}},
                       .n_slots = 256,
                       .threads = 2,
                       .adjust = adjust});
  engine.append(0, 0, 0, 200, 50);
  std::vector<test::Entry> entries;
  for (int pos = 192; pos < 200; ++pos) entries.push_back({.stream = 0, .seq = 0, .pos = pos, .slot = pos});
  for (const AttentionPath path : {AttentionPath::kFused, AttentionPath::kDequantize}) {
    const test::Outputs out = engine.attend(entries, {.path = path, .dqref = true});
    EXPECT_LT(test::relative_error(out.engine, out.dqref), test::engine_tolerance(engine.cache(), 0, path));
  }
}

TEST(StaticScale, HeadAndTensorTakeTheirRangeFromCalibration) {
  auto large = std::make_shared<CalibratedBasis>(*basis(1.0f));
  large->error.largest = 51.0f;
  const LayerCalibration calibration{.key = {basis(1.0f), large}, .value = {basis(1.0f), large}};
  const LayerScheme layer = resolve("k=s8,v=st8,w=0,s=0", calibration);
  EXPECT_FLOAT_EQ(layer.heads[0].key_static_scale, 10 / 127.5f);
  EXPECT_FLOAT_EQ(layer.heads[1].key_static_scale, 51 / 127.5f);
  EXPECT_FLOAT_EQ(layer.heads[0].value_static_scale, 51 / 127.5f);
  EXPECT_EQ(layer.heads[0].key_transform->kind(), TransformKind::kIdentity);
  EXPECT_EQ(layer.reason, "");
  const LayerScheme alone = resolve("k=s8,v=st8", LayerCalibration());
  EXPECT_EQ(alone.heads[0].key_static_scale, 0.0f);
  EXPECT_THAT(alone.reason, HasSubstr("keys of KV head 0: without calibration the fixed scale is not known"));
}

TEST(StaticScale, EncodeTakesTheGivenStepAndClips) {
  const Format format = testing::must_parse("s8", Side::kKey, kDim);
  std::vector<float> x = testing::normal_tile(kDim, 4);
  std::fill_n(x.begin(), kDim, 0.0f);
  x[5 * kDim] = 1000.0f;
  const testing::Encoded out = testing::encode_decode(format, {.x = x.data(), .static_scale = 0.125f});
  for (size_t i = 0; i < x.size(); ++i) {
    const float expected = i < kDim ? 0.0f : i == 5 * kDim ? 127.5f * 0.125f : x[i];
    ASSERT_NEAR(out.decoded[i], expected, i < kDim || i == 5 * kDim ? 0.0f : 0.0626f) << i;
  }
}

}  // namespace
}  // namespace kvant

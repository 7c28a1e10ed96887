// fit=1: bits move between the key bands of all heads to where errors cost most, and never more of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvant/layer_scheme.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kDim = 64;
constexpr LayerShape kShape = {.n_query_heads = 2, .n_kv_heads = 2, .key_dim = kDim, .value_dim = kDim};

// The identity basis; `quarters` is what a relative error of 1 costs in each quarter of the rows.
std::shared_ptr<const CalibratedBasis> basis(const std::vector<double>& quarters, int dim = kDim) {
  auto made = std::make_shared<CalibratedBasis>();
  made->dim = dim;
  made->forward.assign(static_cast<size_t>(dim) * dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    made->forward[static_cast<size_t>(i) * dim + i] = 1.0f;
    made->error.spectrum.push_back(static_cast<float>(quarters[i * 4 / dim] * 4 / dim));
  }
  return made;
}

LayerCalibration calibration(const std::vector<std::vector<double>>& key_quarters) {
  LayerCalibration made;
  for (const auto& quarters : key_quarters) {
    made.key.push_back(basis(quarters));
    made.value.push_back(basis({.25, .25, .25, .25}));
  }
  return made;
}

std::vector<LayerScheme> resolve(const std::string& text, const std::vector<LayerRequest>& layers) {
  const Result<Scheme> scheme = parse_scheme(text, true);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  Result<std::vector<LayerScheme>> out = resolve_layers(scheme.value(), layers);
  EXPECT_TRUE(out.ok()) << out.status().message();
  return out.value();
}

std::vector<std::string> key_names(const std::vector<LayerScheme>& layers) {
  std::vector<std::string> names;
  for (const LayerScheme& layer : layers) {
    for (const HeadScheme& head : layer.heads) names.push_back(head.key_format.name());
  }
  return names;
}

struct Cost {
  size_t bytes = 0;
  double error = 0;
};

Cost cost_of(const std::vector<LayerScheme>& layers, const std::vector<LayerRequest>& requests) {
  Cost cost;
  for (size_t l = 0; l < layers.size(); ++l) {
    cost.bytes += layers[l].key_tile_bytes();
    for (size_t h = 0; h < layers[l].heads.size(); ++h) {
      cost.error += expected_error(requests[l].calibration->key[h]->error, layers[l].heads[h].key_format,
                                   TransformKind::kDense);
    }
  }
  return cost;
}

TEST(Fit, BitsGoToTheHeadsAndBandsWhereErrorsCost) {
  // The second head's errors cost a hundred times those of the first: three bits and a third.
  const LayerCalibration c = calibration({{.01, .001, .001, .001}, {1, .1, .1, .1}});
  const std::vector<LayerScheme> layers = resolve("k=t6-4-4-2,v=t4,fit=1", {{kShape, &c, ""}});
  EXPECT_THAT(key_names(layers), ElementsAre("t4-2-2-2", "t7-5-5-5"));
  EXPECT_EQ(layers[0].heads[0].value_format.name(), "t4");
  EXPECT_EQ(layers[0].reason, "");
  EXPECT_EQ(layers[0].requested, "k=t6-4-4-2,v=t4,w=128,s=16,kx=auto,vx=auto,fit=1");
}

TEST(Fit, BitsMoveBetweenLayersToo) {
  const LayerCalibration small = calibration({{.1, .01, .01, .01}, {.1, .01, .01, .01}});
  const LayerCalibration large = calibration({{10, 1, .1, .1}, {10, 1, .1, .1}});
  const std::vector<LayerRequest> requests = {{kShape, &small, ""}, {kShape, &large, ""}};
  const std::vector<LayerScheme> layers = resolve("k=t5-3-3-2,v=t4,fit=1", requests);
  EXPECT_LT(layers[0].key_tile_bytes(), layers[1].key_tile_bytes());
  EXPECT_LE(layers[0].key_tile_bytes() + layers[1].key_tile_bytes(),
            4 * testing::must_parse("t5-3-3-2", Side::kKey, kDim).tile_bytes());
  // One layer alone has nothing to give away but between its own bands.
  const LayerScheme alone = resolve("k=t5-3-3-2,v=t4,fit=1", {requests[0]}).front();
  EXPECT_EQ(alone.key_tile_bytes(), 2 * testing::must_parse("t5-3-3-2", Side::kKey, kDim).tile_bytes());
}

// The average of a calibration does not know the rare key that a copy looks for.
TEST(Fit, NoBandIsNarrowerThanTheNarrowestOfTheScheme) {
  const LayerCalibration c = calibration({{1, .1, .0001, 0}, {1, .1, .1, 0}});
  const std::vector<LayerRequest> requests = {{kShape, &c, ""}};
  EXPECT_THAT(key_names(resolve("k=t6-4-3-3,v=t4,fit=1", requests)), ElementsAre("t6-4-3-3", "t5-4-4-3"));
  EXPECT_THAT(key_names(resolve("k=t4-4-4-4,v=t4,fit=1", requests)), ElementsAre("t4-4-4-4", "t4-4-4-4"));
  EXPECT_THAT(key_names(resolve("k=t8-8-8-8,v=t4,fit=1", requests)), ElementsAre("t8-8-8-8", "t8-8-8-8"));
}

// Every way to give two heads of two bands widths of 2 to 8 bits.
TEST(Fit, IsTheBestOfAllWidthsThatTakeNoMoreBits) {
  std::mt19937 random(5);
  std::exponential_distribution<double> power(1.0);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<double>> heads(2);
    for (auto& quarters : heads) {
      const double first = power(random), second = first * std::min(1.0, power(random));
      quarters = {first, first, second, second};
    }
    const LayerCalibration c = calibration(heads);
    const std::vector<LayerRequest> requests = {{kShape, &c, ""}};
    const Cost fitted = cost_of(resolve("k=t6-2,v=t4,fit=1", requests), requests);
    const Cost asked = cost_of(resolve("k=t6-2,v=t4,fit=0", requests), requests);
    EXPECT_LE(fitted.bytes, asked.bytes);
    EXPECT_LE(fitted.error, asked.error);
    double best = std::numeric_limits<double>::infinity();
    for (int code = 0; code < 7 * 7 * 7 * 7; ++code) {
      const int widths[] = {code % 7 + 2, code / 7 % 7 + 2, code / 49 % 7 + 2, code / 343 + 2};
      if (widths[0] + widths[1] + widths[2] + widths[3] > 2 * (6 + 2)) continue;
      double error = 0;
      for (int h = 0; h < 2; ++h) {
        const std::string name =
            "t" + std::to_string(widths[2 * h]) + "-" + std::to_string(widths[2 * h + 1]);
        error += expected_error(c.key[h]->error, testing::must_parse(name, Side::kKey, kDim),
                                TransformKind::kDense);
      }
      best = std::min(best, error);
    }
    EXPECT_NEAR(fitted.error, best, 1e-9 * best) << round;
  }
}

TEST(Fit, NeverMoreBytesAtAnyHeadSizeAndScheme) {
  std::mt19937 random(6);
  std::exponential_distribution<double> power(20.0);
  for (const int dim : {32, 40, 64, 72, 80, 96, 112, 128, 192, 256}) {
    LayerShape shape = kShape;
    shape.key_dim = shape.value_dim = dim;
    LayerCalibration c;
    for (int h = 0; h < 2; ++h) {
      std::vector<double> quarters = {power(random), power(random), power(random), power(random)};
      std::sort(quarters.rbegin(), quarters.rend());
      c.key.push_back(basis(quarters, dim));
      c.value.push_back(basis({.25, .25, .25, .25}, dim));
    }
    const std::vector<LayerRequest> requests = {{shape, &c, ""}, {shape, &c, ""}};
    for (const char* name : {"kv6", "kv5", "kv4", "kv3", "kv2"}) {
      const std::string fixed = std::string(name) + ",fit=0";
      const Cost fitted = cost_of(resolve(name, requests), requests);
      const Cost asked = cost_of(resolve(fixed, requests), requests);
      EXPECT_LE(fitted.error, asked.error) << name << " at " << dim;
      EXPECT_LE(fitted.bytes, asked.bytes) << name << " at " << dim;
      EXPECT_EQ(resolve(name, requests)[0].reason, "") << "escape would blur the comparison";
    }
  }
}

TEST(Fit, WithoutCalibrationWidthsStayAndThatIsSaid) {
  const LayerCalibration c = calibration({{1, 1, .1, .1}, {1, 1, .1, .1}});
  // A basis of a file that does not know what errors cost.
  auto mute = std::make_shared<CalibratedBasis>(*basis({1, 1, 1, 1}));
  mute->error = ErrorModel();
  const LayerCalibration silent = {.key = {mute, mute}, .value = {mute, mute}};
  const std::vector<LayerScheme> layers =
      resolve("kv4", {{kShape, nullptr, ""}, {kShape, &silent, ""}, {kShape, &c, ""}});
  for (const int l : {0, 1}) {
    EXPECT_EQ(layers[l].heads[0].key_format.name(), "t6-4-3-3");
    EXPECT_THAT(layers[l].reason, HasSubstr("there is no calibration to fit the keys to"));
  }
  EXPECT_EQ(layers[2].reason, "");
}

TEST(Fit, CostsThatAreNoCostsAreNoCalibration) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0}) {
    const LayerCalibration c = calibration({{1, .1, bad, .1}, {1, .1, .1, .1}});
    const std::vector<LayerScheme> layers = resolve("kv4,s=16", {{kShape, &c, ""}});
    ASSERT_EQ(layers.size(), 1u);
    EXPECT_THAT(layers[0].reason, HasSubstr("there is no calibration to fit the keys to")) << bad;
    EXPECT_THAT(layers[0].reason, HasSubstr("KV head 0 has costs that are not finite or below zero")) << bad;
    EXPECT_EQ(layers[0].heads[1].key_format.name(), "t6-4-3-3") << bad;
  }
}

TEST(Fit, ACalibrationOfOtherHeadsIsRefusedAndCounted) {
  const LayerCalibration one = calibration({{1, .1, .1, .1}});
  const LayerCalibration three = calibration({{1, .1, .1, .1}, {1, .1, .1, .1}, {1, .1, .1, .1}});
  for (const auto& [c, heads] : {std::pair{&one, "1 KV heads"}, std::pair{&three, "3 KV heads"}}) {
    for (const char* text : {"kv4", "kv4,fit=0", "kv8"}) {
      const Result<std::vector<LayerScheme>> out = resolve_layers(
          parse_scheme(text, true).value(), {{kShape, nullptr, "layer 1"}, {kShape, c, "layer 2"}});
      ASSERT_FALSE(out.ok()) << text;
      EXPECT_EQ(out.status().code(), Code::kMismatch);
      EXPECT_THAT(out.status().message(), HasSubstr(std::string("layer 2: the calibration has keys of ") +
                                                    heads + ", the layer has 2"));
    }
  }
}

TEST(Fit, RefusesKeysThatHaveNoBandsOfTheBasis) {
  const LayerCalibration c = calibration({{1, 1, 1, 1}, {1, 1, 1, 1}});
  for (const char* text : {"k=c4a,v=t4,fit=1", "k=t4a,v=t4,fit=1", "k=ct4-3,v=t4,fit=1", "k=f16,v=t4,fit=1",
                           "k=t5-3,v=t4,kx=hadamard,fit=1"}) {
    const Result<std::vector<LayerScheme>> out =
        resolve_layers(parse_scheme(text).value(), {{kShape, &c, ""}});
    ASSERT_FALSE(out.ok()) << text;
    EXPECT_EQ(out.status().code(), Code::kUnsupported);
    EXPECT_THAT(out.status().message(), HasSubstr("fit=1"));
  }
}

TEST(ResolveLayers, NamesTheLayerThatIsWrong) {
  const LayerShape odd = {.n_query_heads = 2, .n_kv_heads = 2, .key_dim = 60, .value_dim = 64};
  const Result<std::vector<LayerScheme>> out =
      resolve_layers(parse_scheme("kv4").value(), {{kShape, nullptr, "layer 7"}, {odd, nullptr, "layer 9"}});
  ASSERT_FALSE(out.ok());
  EXPECT_THAT(out.status().message(), HasSubstr("layer 9: head size 60"));
  const LayerCalibration c = calibration({{1, 1, .1, .1}, {1, 1, .1, .1}});
  const Result<std::vector<LayerScheme>> fitted =
      resolve_layers(parse_scheme("kv4", true).value(), {{kShape, &c, "layer 7"}, {odd, &c, "layer 9"}});
  ASSERT_FALSE(fitted.ok());
  EXPECT_EQ(fitted.status().message(), out.status().message());
}

}  // namespace
}  // namespace kvant

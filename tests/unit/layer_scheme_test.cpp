// resolve_layer: which formats and transforms a layer gets, what is refused and how it is named.
#include "kvant/layer_scheme.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace kvant {
namespace {

constexpr LayerShape kShape = {.n_query_heads = 4, .n_kv_heads = 2, .key_dim = 64, .value_dim = 32};

Result<LayerScheme> resolve(const char* scheme, const LayerShape& shape = kShape,
                            const LayerCalibration* calibration = nullptr) {
  return resolve_layer(parse_scheme(scheme).value(), shape, calibration);
}

void expect_refused(const Result<LayerScheme>& result, Code code, const std::string& part) {
  ASSERT_FALSE(result.ok()) << part;
  EXPECT_EQ(result.status().code(), code);
  EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

// Channels in reverse order, around the values 1, 2, 3, ...
std::shared_ptr<const CalibratedBasis> reversed(int dim) {
  auto basis = std::make_shared<CalibratedBasis>();
  basis->dim = dim;
  basis->forward.assign(static_cast<size_t>(dim) * dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    basis->forward[static_cast<size_t>(i) * dim + (dim - 1 - i)] = 1.0f;
    basis->centre.push_back(static_cast<float>(i + 1));
  }
  return basis;
}

LayerCalibration calibration_of(int key_dim, int value_dim, int heads) {
  LayerCalibration calibration;
  calibration.key.assign(heads, reversed(key_dim));
  calibration.value.assign(heads, reversed(value_dim));
  return calibration;
}

TEST(LayerScheme, AutomaticTransformsFollowTheFormat) {
  EXPECT_EQ(resolve("k=t4,v=t4").value().effective, "k=t4 v=t4 kx=hadamard vx=hadamard");
  EXPECT_EQ(resolve("k=c4,v=g4").value().effective, "k=c4 v=g4 kx=none vx=hadamard");
  EXPECT_EQ(resolve("k=f16,v=t4").value().effective, "k=f16 v=t4 kx=none vx=hadamard");
  EXPECT_EQ(resolve("exact").value().effective, "exact");
  const LayerCalibration calibration = calibration_of(64, 32, 2);
  EXPECT_EQ(resolve("k=t5-3,v=t4", kShape, &calibration).value().effective,
            "k=t5-3 v=t4 kx=calibrated vx=calibrated");
  EXPECT_EQ(resolve("k=c4,v=t4,vx=hadamard", kShape, &calibration).value().effective,
            "k=c4 v=t4 kx=none vx=hadamard");
}

TEST(LayerScheme, BitsAndBytesCountMetadata) {
  const LayerScheme layer = resolve("k=t4,v=c4").value();
  EXPECT_EQ(layer.key_tile_bytes(), 2 * layer.heads[0].key_format.tile_bytes());
  EXPECT_EQ(layer.value_tile_bytes(), 2 * layer.heads[0].value_format.tile_bytes());
  EXPECT_DOUBLE_EQ(layer.key_bits(), layer.heads[0].key_format.bits_per_value());
  EXPECT_GT(layer.value_bits(), 4.0);
  const LayerScheme exact = resolve("exact").value();
  EXPECT_EQ(exact.key_tile_bytes() + exact.value_tile_bytes(), 0u);
  EXPECT_DOUBLE_EQ(exact.key_bits(), 16.0);
  EXPECT_DOUBLE_EQ(exact.value_bits(), 16.0);
}

// A calibrated basis keeps its channel order across bands: rotation stays inside each of them.
TEST(LayerScheme, CalibratedBasisIsRotatedInsideItsBands) {
  const LayerCalibration calibration = calibration_of(64, 32, 2);
  const LayerScheme layer = resolve("k=t5-3,v=t4,kx=calibrated", kShape, &calibration).value();
  const Transform& transform = *layer.heads[1].key_transform;
  const TileLayout& layout = layer.heads[1].key_format.layout();
  ASSERT_EQ(layout.n_bands, 2);
  for (const int channel : {0, 20, 40, 63}) {
    std::vector<float> x(64), y(64), back(64);
    for (int i = 0; i < 64; ++i) x[i] = static_cast<float>(i + 1);
    transform.apply(x.data(), y.data(), 1);
    for (const float v : y) EXPECT_NEAR(v, 0.0f, 1e-5) << "the centre";
    x[channel] += 8.0f;
    transform.apply(x.data(), y.data(), 1);
    const int place = 63 - channel;
    for (int b = 0; b < 2; ++b) {
      const BandLayout& band = layout.bands[b];
      double energy = 0;
      for (int c = 0; c < band.channels; ++c) energy += std::pow(y[band.first_channel + c], 2);
      const bool here = place >= band.first_channel && place < band.first_channel + band.channels;
      EXPECT_NEAR(energy, here ? 64.0 : 0.0, 64 * 0x1p-11) << channel << ", band " << b;
    }
    transform.invert(y.data(), back.data(), 1);
    for (int i = 0; i < 64; ++i) EXPECT_NEAR(back[i], x[i], 1e-4 + 0x1p-12 * std::fabs(x[i]));
  }
}

TEST(LayerScheme, RefusesCalibrationsThatDoNotFit) {
  expect_refused(resolve("k=t4,v=t4,kx=calibrated"), Code::kUnsupported, "use kx=hadamard");
  const LayerCalibration one_head = calibration_of(64, 32, 1);
  expect_refused(resolve("k=t4,v=t4,vx=calibrated", kShape, &one_head), Code::kMismatch,
                 "has keys of 1 KV heads");
  const LayerCalibration wide = calibration_of(64, 64, 2);
  expect_refused(resolve("k=t4,v=t4", kShape, &wide), Code::kMismatch, "vx=calibrated");
}

TEST(LayerScheme, RefusesShapesAndNamesTheNearest) {
  const auto shape = [](int query_heads, int kv_heads, int key_dim, int value_dim) {
    return LayerShape{query_heads, kv_heads, key_dim, value_dim};
  };
  expect_refused(resolve("exact", shape(4, 2, 16, 64)), Code::kUnsupported, "nearest is 32");
  expect_refused(resolve("exact", shape(4, 2, 64, 300)), Code::kUnsupported, "nearest is 256");
  expect_refused(resolve("exact", shape(4, 2, 61, 64)), Code::kUnsupported, "nearest is 64");
  expect_refused(resolve("exact", shape(5, 2, 64, 64)), Code::kUnsupported, "5 query heads");
  expect_refused(resolve("exact", shape(0, 1, 64, 64)), Code::kUnsupported, "0 query heads");
  expect_refused(resolve("exact", shape(257, 1, 64, 64)), Code::kUnsupported, "256 query heads");
  // Four bands of values need 16 channels each.
  EXPECT_FALSE(resolve("k=t4,v=t6-4-3-3", kShape).ok());
  EXPECT_NE(resolve("k=t4,v=t6-4-3-3", kShape).status().message().find("v=t6-4-3-3"), std::string::npos);
}

}  // namespace
}  // namespace kvant

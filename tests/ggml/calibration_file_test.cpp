// What calibration learned comes back from its file.
#include "kvant/calibration_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace kvant::ggml {
namespace {

std::shared_ptr<const CalibratedBasis> basis(int dim, float seed, bool centred, bool with_errors) {
  auto made = std::make_shared<CalibratedBasis>();
  made->dim = dim;
  for (int i = 0; i < dim * dim; ++i) {
    // Multiples of 1/8 below 256 are binary16.
    made->forward.push_back(static_cast<float>((i * 7 + static_cast<int>(8 * seed)) % 255) / 8);
  }
  for (int i = 0; centred && i < dim; ++i) made->centre.push_back(seed + 0.1f * static_cast<float>(i));
  if (!with_errors) return made;
  for (int i = 0; i < dim; ++i) made->error.spectrum.push_back(seed / static_cast<float>(i + 1));
  made->error.excess = 1.0f + seed;
  made->error.rotated = 30.0f * seed;
  made->error.per_channel = 3.0f * seed;
  made->error.largest = 60.0f + seed;
  return made;
}

void expect_equal(const CalibratedBasis& a, const CalibratedBasis& b) {
  EXPECT_EQ(a.dim, b.dim);
  EXPECT_EQ(a.forward, b.forward);
  EXPECT_EQ(a.centre, b.centre);
  EXPECT_EQ(a.error.spectrum, b.error.spectrum);
  EXPECT_EQ(a.error.excess, b.error.excess);
  EXPECT_EQ(a.error.rotated, b.error.rotated);
  EXPECT_EQ(a.error.per_channel, b.error.per_channel);
  EXPECT_EQ(a.error.largest, b.error.largest);
}

class CalibrationFile : public ::testing::TestWithParam<bool> {};

// Also without expected errors, as files of earlier builds are.
TEST_P(CalibrationFile, RoundTrip) {
  const bool with_errors = GetParam();
  Calibration made;
  made.fingerprint = 0x1234567890abcdefu;
  made.model = "a model";
  made.text_hash = 42;
  made.tokens = 8192;
  for (const int layer : {0, 3}) {
    LayerCalibration& c = made.layers[layer];
    for (int h = 0; h < 2; ++h) {
      const float seed = 1.0f + static_cast<float>(layer) + 0.5f * static_cast<float>(h);
      c.key.push_back(basis(64, seed, true, with_errors));
      c.value.push_back(basis(32, seed, false, with_errors));
    }
  }
  const std::string path = ::testing::TempDir() + (with_errors ? "with" : "without") + "-errors.gguf";
  const Status saved = save_calibration(made, path);
  ASSERT_TRUE(saved.ok()) << saved.message();
  const Result<Calibration> loaded = load_calibration(path, made.fingerprint);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded.value().model, made.model);
  EXPECT_EQ(loaded.value().tokens, made.tokens);
  ASSERT_EQ(loaded.value().layers.size(), 2u);
  for (const auto& [layer, c] : made.layers) {
    const LayerCalibration& back = loaded.value().layers.at(layer);
    ASSERT_EQ(back.key.size(), 2u);
    ASSERT_EQ(back.value.size(), 2u);
    for (int h = 0; h < 2; ++h) {
      expect_equal(*back.key[h], *c.key[h]);
      expect_equal(*back.value[h], *c.value[h]);
    }
  }
  EXPECT_EQ(load_calibration(path, 7).status().code(), Code::kMismatch);
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Errors, CalibrationFile, ::testing::Bool());

}  // namespace
}  // namespace kvant::ggml

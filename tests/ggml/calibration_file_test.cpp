// What calibration learned comes back from its file.
#include "kvant/calibration_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
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

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Data, names, numbers, type tags: nothing that a flipped bit changes is taken for a calibration of this
// model.
TEST(CalibrationDamage, EveryFlippedByteIsRefused) {
  Calibration made;
  made.fingerprint = 0x1234567890abcdefu;
  made.model = "a model";
  made.layers[0].key.push_back(basis(32, 1.5f, true, true));
  made.layers[0].value.push_back(basis(32, 2.0f, false, true));
  const std::string path = ::testing::TempDir() + "damaged.gguf";
  ASSERT_TRUE(save_calibration(made, path).ok());
  const std::string whole = bytes_of(path);
  const size_t data = whole.size() - 3 * 1024;  // both matrices and all that is before them
  int refused = 0, corrupt = 0, read = 0;
  for (size_t at = 0; at < whole.size(); at += at < whole.size() - data ? 1 : 61) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x04);
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const Result<Calibration> loaded = load_calibration(path, made.fingerprint);
    if (loaded.ok()) {
      ++read;
      expect_equal(*loaded.value().layers.at(0).key.at(0), *made.layers[0].key[0]);
      expect_equal(*loaded.value().layers.at(0).value.at(0), *made.layers[0].value[0]);
    } else {
      ++refused;
      corrupt += loaded.status().code() == Code::kCorrupt ? 1 : 0;
    }
  }
  // Padding, and the name of the checksum itself: files without one are read.
  EXPECT_LT(read, refused / 4);
  EXPECT_GT(corrupt, 50);
  std::filesystem::remove(path);
}

TEST(CalibrationDamage, ValuesThatAreNotFiniteAreRefused) {
  Calibration made;
  auto bad = std::make_shared<CalibratedBasis>(*basis(32, 1.5f, true, true));
  bad->centre[7] = std::numeric_limits<float>::quiet_NaN();
  made.layers[0].key.push_back(bad);
  const std::string path = ::testing::TempDir() + "not-finite.gguf";
  ASSERT_TRUE(save_calibration(made, path).ok());
  EXPECT_EQ(load_calibration(path, 0).status().code(), Code::kCorrupt);
  std::filesystem::remove(path);
}

TEST(CalibrationDamage, OtherFilesAreNotCalibrations) {
  const std::string path = ::testing::TempDir() + "other.gguf";
  for (const char* text : {"", "GGUF", "not a model"}) {
    std::ofstream(path) << text;
    EXPECT_EQ(load_calibration(path, 1).status().code(), Code::kIo) << text;
  }
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Errors, CalibrationFile, ::testing::Bool());

}  // namespace
}  // namespace kvant::ggml

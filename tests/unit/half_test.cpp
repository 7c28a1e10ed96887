#include "kvant/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kvant {
namespace {

double half_value(uint16_t h) {  // independent of the code under test
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Half, EveryWordDecodesToItsValueAndBack) {
  for (uint32_t word = 0; word < 0x10000; ++word) {
    const auto h = static_cast<uint16_t>(word);
    const float x = half_to_float(h);
    if ((h & 0x7c00) == 0x7c00) {
      if ((h & 0x3ff) == 0) {
        EXPECT_TRUE(std::isinf(x));
        EXPECT_EQ(float_to_half(x), h);
      } else {
        EXPECT_TRUE(std::isnan(x));
        EXPECT_EQ(float_to_half(x), h | 0x200);
      }
      continue;
    }
    ASSERT_EQ(static_cast<double>(x), half_value(h)) << word;
    ASSERT_EQ(float_to_half(x), h) << word;
  }
}

TEST(Half, RoundsToNearestEven) {
  for (uint16_t h = 0; h < 0x7bff; ++h) {
    const double low = half_value(h), high = half_value(static_cast<uint16_t>(h + 1));
    const auto middle = static_cast<float>((low + high) / 2);  // exact in binary32
    ASSERT_EQ(float_to_half(middle), (h & 1) != 0 ? h + 1 : h) << h;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 0.0f)), h) << h;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 1e9f)), h + 1) << h;
    ASSERT_EQ(float_to_half(-middle), (((h & 1) != 0 ? h + 1 : h) | 0x8000)) << h;
  }
}

TEST(Half, BeyondTheRangeIsInfinity) {
  EXPECT_EQ(float_to_half(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_half(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(-1e30f), 0xfc00);
  EXPECT_EQ(float_to_half(0x1p-25f), 0);
  EXPECT_EQ(float_to_half(std::nextafter(0x1p-25f, 1.0f)), 1);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  for (uint32_t word = 0; word < 0x10000; ++word) {
    const auto h = static_cast<uint16_t>(word);
    const float x = bf16_to_float(h);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(x))));
      continue;
    }
    ASSERT_EQ(float_to_bf16(x), h);
    if (std::isinf(x)) continue;
    const float middle = std::bit_cast<float>((word << 16) | 0x8000u);
    ASSERT_EQ(float_to_bf16(middle), (h & 1) != 0 ? h + 1 : h);
  }
  const float quiet = std::bit_cast<float>(0x7f800001u);  // payload only in the lower half
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(quiet))));
}

TEST(Scale, EveryWordDecodesToItsValueAndBack) {
  EXPECT_EQ(scale_to_float(0), 0.0f);
  for (uint32_t word = 1; word < 0x10000; ++word) {
    const auto w = static_cast<uint16_t>(word);
    const double value = std::ldexp(1024 + (w & 1023), (w >> 10) - 51);
    ASSERT_EQ(static_cast<double>(scale_to_float(w)), value) << word;
    ASSERT_EQ(float_to_scale(scale_to_float(w)), w) << word;
    if (word == 1 || word == 0xffff) continue;
    const auto middle = static_cast<float>((value + static_cast<double>(scale_to_float(w + 1))) / 2);
    ASSERT_EQ(float_to_scale(middle), (w & 1) != 0 ? w + 1 : w) << word;
    ASSERT_EQ(float_to_scale(std::nextafter(middle, 0.0f)), w) << word;
  }
}

TEST(Scale, EndsOfTheRange) {
  EXPECT_EQ(scale_to_float(1), kScaleMin);
  EXPECT_EQ(scale_to_float(0xffff), kScaleMax);
  EXPECT_EQ(float_to_scale(kScaleMin / 2), 1);
  EXPECT_EQ(float_to_scale(std::nextafter(kScaleMin / 2, 0.0f)), 0);
  EXPECT_EQ(float_to_scale(0x1p-41f), 1);
  EXPECT_EQ(float_to_scale(0.0f), 0);
  EXPECT_EQ(float_to_scale(-1.0f), 0);
  EXPECT_EQ(float_to_scale(-0.0f), 0);
  EXPECT_EQ(float_to_scale(std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(float_to_scale(std::numeric_limits<float>::infinity()), 0xffff);
  EXPECT_EQ(float_to_scale(1e9f), 0xffff);
  EXPECT_EQ(float_to_scale(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Scale, RelativeErrorIsAtMostTwoToTheMinusEleven) {
  for (float x = 1e-12f; x < 8e6f; x *= 1.000123f) {
    const float y = scale_to_float(float_to_scale(x));
    ASSERT_LE(std::fabs(y - x), x * 0x1p-11f) << x;
  }
}

}  // namespace
}  // namespace kvant

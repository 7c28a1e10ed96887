// Conversions between float and the 16-bit types that the cache stores. Rounding is to nearest even and is
// done in integer arithmetic, so the bytes do not depend on the ISA, the compiler or flush-to-zero.
#pragma once

#include <bit>
#include <cstdint>

namespace kvant {

// IEEE binary16. Values beyond 65504 become infinity, NaN stays NaN.
uint16_t float_to_half(float x);
float half_to_float(uint16_t h);

// bfloat16: the upper half of a binary32.
uint16_t float_to_bf16(float x);
inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

// Unsigned scale type "e6m10": 6 exponent bits, 10 mantissa bits, no sign, no subnormals, no infinity.
// Word 0 is exactly zero; word w != 0 is 2^(e - 41) * (1 + m / 1024) with e = w >> 10, m = w & 1023.
// Range 2^-41 .. 2^23, relative error at most 2^-11: wide enough for every scale between 1e-12 and 8e6,
// where binary16 turns small scales into 0 and large ones into infinity.
inline constexpr float kScaleMin = 0x1.004p-41f;
inline constexpr float kScaleMax = 0x1.ffcp+22f;
// Rounds to nearest even; 0, NaN and anything below kScaleMin / 2 give 0; above kScaleMax saturates.
uint16_t float_to_scale(float x);
inline float scale_to_float(uint16_t w) {
  return w == 0 ? 0.0f : std::bit_cast<float>((static_cast<uint32_t>(w) << 13) + (86u << 23));
}

}  // namespace kvant

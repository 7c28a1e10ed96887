// Numbers that every attention target shares, so that integer sums are equal on all of them.
#pragma once

#include <cstdint>

namespace kvant::simd {

// Bands of this many bits or more split q and the weights into two terms, hi * 64 + lo. With 8-bit codes the
// sum of two products in a 16-bit lane (vpmaddubsw) is then at most 2 * 255 * 63 = 32130 and cannot saturate.
inline constexpr int kTwoTermBits = 7;
// The same for q where keys have channel scales. They are multiplied into q, so that one step of q serves
// channels of any size: with one term its rounding would lose more than codes of 5 and 6 bits do.
inline constexpr int kTwoTermBitsOfScaledChannels = 5;
constexpr int query_terms(bool channel_scale, int bits) {
  return bits >= (channel_scale ? kTwoTermBitsOfScaledChannels : kTwoTermBits) ? 2 : 1;
}

// The middle of the codes, around which products are rounded also where codes start at a low.
constexpr float middle_of(int bits) { return 0.5f * static_cast<float>((1 << bits) - 1); }

// Largest |v| of a quantized query: one term, |v| <= 127; two terms, hi in [-63, 63], lo in [-32, 31].
inline constexpr float kQueryMaxOneTerm = 127.0f;
inline constexpr float kQueryMaxTwoTerms = 4063.0f;
// Largest quantized weight: one unsigned byte, or two 6-bit terms.
inline constexpr float kWeightMaxOneTerm = 255.0f;
inline constexpr float kWeightMaxTwoTerms = 4095.0f;

// Rows (of q, or of scaled weights) whose largest magnitude is below this quantize to all zeros: its
// reciprocal would overflow.
inline constexpr float kQuantizeFloor = 1e-30f;

// Products of two bytes that may be added in a signed 16-bit lane (a lane adds two products per step).
// Keys: 2 * (2^bits - 1) * 127 per step, 63 instead of 127 for two terms.
inline constexpr int kKeyStepsIn16Bits[9] = {0, 0, 32, 16, 8, 4, 2, 2, 1};
// Values: 2 * (2^bits - 1) * 255 per step, 63 instead of 255 for two terms.
inline constexpr int kValueStepsIn16Bits[9] = {0, 0, 16, 8, 4, 2, 1, 2, 1};

constexpr bool steps_fit(const int (&steps)[9], int one_term, int two_term) {
  for (int bits = 2; bits <= 8; ++bits) {
    const int factor = bits >= kTwoTermBits ? two_term : one_term;
    if (steps[bits] * 2 * ((1 << bits) - 1) * factor > 32767) return false;
  }
  return true;
}
static_assert(steps_fit(kKeyStepsIn16Bits, 127, 63));
static_assert(steps_fit(kValueStepsIn16Bits, 255, 63));

// 2^r on [-1/2, 1/2] = 1 + r (c1 + r (c2 + ...)), minimax of degree 5 with relative error 9.2e-8.
inline constexpr float kExp2C1 = 0x1.62e42ap-1f;
inline constexpr float kExp2C2 = 0x1.ebf9bcp-3f;
inline constexpr float kExp2C3 = 0x1.c6b752p-5f;
inline constexpr float kExp2C4 = 0x1.3cea88p-7f;
inline constexpr float kExp2C5 = 0x1.5bba12p-10f;
// Weights below 2^kExp2Floor are zero.
inline constexpr float kExp2Floor = -125.0f;

}  // namespace kvant::simd

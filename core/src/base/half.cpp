#include "kvant/half.h"

namespace kvant {
namespace {

constexpr uint32_t kFloatInfinity = 0x7f800000u;
// Smallest binary32 magnitude that rounds to a normal binary16 (2^-14), and the first that overflows.
constexpr uint32_t kHalfNormalMin = 0x38800000u;
constexpr uint32_t kHalfOverflow = 0x47800000u;  // 65536

}  // namespace

uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kFloatInfinity) {  // NaN: quiet, upper payload bits kept
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  if (magnitude >= kHalfOverflow) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= kHalfNormalMin) {
    // Rebias the exponent by 15 - 127; a carry out of the mantissa moves into the exponent, up to infinity.
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
  }
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return static_cast<uint16_t>(sign);  // below 2^-25: rounds to zero
  // Subnormal result: units of 2^-24.
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126 - exponent;  // 14..24
  const uint32_t floor = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  const uint32_t up = (rest > half || (rest == half && (floor & 1u))) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (floor + up));
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | kFloatInfinity | quiet | (mantissa << 13));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return std::bit_cast<float>(sign);
  const uint32_t shift =
      static_cast<uint32_t>(std::countl_zero(mantissa)) - 21;  // brings the top bit to bit 10
  return std::bit_cast<float>(sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3ffu) << 13));
}

uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > kFloatInfinity) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t float_to_scale(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  constexpr uint32_t kBias = 86u << 23;  // 2^-41
  constexpr uint32_t kHalfOfMin = std::bit_cast<uint32_t>(kScaleMin) - (1u << 23);
  if ((bits >> 31) != 0 || bits > kFloatInfinity || bits < kHalfOfMin) return 0;
  if (bits <= std::bit_cast<uint32_t>(kScaleMin)) return 1;
  if (bits >= std::bit_cast<uint32_t>(kScaleMax)) return 0xffff;
  const uint32_t offset = bits - kBias;
  const uint32_t word = (offset + 0xfffu + ((offset >> 13) & 1u)) >> 13;
  return static_cast<uint16_t>(word > 0xffffu ? 0xffffu : word);
}

}  // namespace kvant

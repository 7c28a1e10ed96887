// Reference of the encode-side kernels: one lane, plain loops.
#include "kvant/half.h"
#include "simd/encode_body.h"

namespace kvant::simd {
namespace {

struct OneLane {
  static constexpr int kLanes = 1;
  using F = float;
  static F load(const float* p) { return *p; }
  static F load_f16(const uint16_t* p) { return half_to_float(*p); }
  static void store(float* p, F a) { *p = a; }
  static F set1(float a) { return a; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  // Exact for every float: beyond 2^23 all are integers.
  static F floor(F a) {
    if (!(a > -8388608.0f && a < 8388608.0f)) return a;
    const float truncated = static_cast<float>(static_cast<int32_t>(a));
    return truncated - static_cast<float>(truncated > a);
  }
  static F less_blend(F a, F b, F x, F y) { return a < b ? x : y; }
  static F load_codes(const uint8_t* p) { return static_cast<float>(*p); }
  static void store_codes(uint8_t* p, F a) { *p = static_cast<uint8_t>(static_cast<int32_t>(a)); }
};

// Where code (token, channel of the band) lies: element, and position in its 64 values (kvant/format.h).
struct QuadPosition {
  int element;
  int index;
};

QuadPosition quad_position(Side side, int token, int channel) {
  if (side == Side::kKey) {
    return {4 * (channel / 4) + token / 16, 4 * (token % 16) + channel % 4};
  }
  return {16 * (channel / 16) + token / 4, 4 * (channel % 16) + token % 4};
}

void pack_band(const BandLayout& band, Side side, const uint8_t* codes, std::byte* tile) {
  int shift = 0;
  for (int p = 0; p < band.n_planes; ++p) {
    const int bits = band.plane_bits[p], per_byte = 8 / bits;
    const unsigned mask = (1u << bits) - 1;
    std::byte* plane = tile + band.plane_offset[p];
    const size_t plane_bytes = static_cast<size_t>(band.stored_channels) * kPageTokens * bits / 8;
    for (size_t i = 0; i < plane_bytes; ++i) plane[i] = std::byte{0};
    for (int t = 0; t < kPageTokens; ++t) {
      for (int c = 0; c < band.stored_channels; ++c) {
        const QuadPosition at = quad_position(side, t, c);
        const unsigned value = (codes[t * band.stored_channels + c] >> shift) & mask;
        plane[64 * (at.element / per_byte) + at.index] |=
            static_cast<std::byte>(value << (bits * (at.element % per_byte)));
      }
    }
    shift += bits;
  }
}

void unpack_band(const BandLayout& band, Side side, const std::byte* tile, uint8_t* codes) {
  for (int t = 0; t < kPageTokens; ++t) {
    for (int c = 0; c < band.stored_channels; ++c) {
      const QuadPosition at = quad_position(side, t, c);
      unsigned code = 0;
      int shift = 0;
      for (int p = 0; p < band.n_planes; ++p) {
        const int bits = band.plane_bits[p], per_byte = 8 / bits;
        const auto byte =
            static_cast<unsigned>(tile[band.plane_offset[p] + 64 * (at.element / per_byte) + at.index]);
        code |= ((byte >> (bits * (at.element % per_byte))) & ((1u << bits) - 1)) << shift;
        shift += bits;
      }
      codes[t * band.stored_channels + c] = static_cast<uint8_t>(code);
    }
  }
}

void transpose(const float* rows, size_t stride, int channels, float* columns) {
  for (int c = 0; c < channels; ++c) {
    for (int t = 0; t < kPageTokens; ++t) columns[c * kPageTokens + t] = rows[t * stride + c];
  }
}

void to_half(const float* x, uint16_t* y, size_t count) {
  for (size_t i = 0; i < count; ++i) y[i] = float_to_half(x[i]);
}

void from_half(const uint16_t* x, float* y, size_t count) {
  for (size_t i = 0; i < count; ++i) y[i] = half_to_float(x[i]);
}

using Body = EncodeBody<OneLane>;
constexpr EncodeKernels kTable = {
    Body::matvec,   Body::hadamard, pack_band,        unpack_band, transpose, Body::search_scale,
    Body::fit_line, Body::quantize, Body::dequantize, to_half,     from_half};

}  // namespace

const EncodeKernels* scalar_encode_kernels() { return &kTable; }

}  // namespace kvant::simd

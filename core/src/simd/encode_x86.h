// Packing, transposition and half conversion for x86-64, shared by the AVX2 and the AVX-512 file. Everything
// is static: each file gets its own copy, compiled for its instruction set.
#pragma once

#include <immintrin.h>

#include "kvant/half.h"
#include "simd/encode.h"

namespace kvant::simd {
namespace {

inline constexpr int kMaxCodes = kPageTokens * kMaxHeadDim;

// Codes in quad order, [elements][64] bytes (kvant/format.h), from token-major rows and back. Keys: four
// codes of a token are one 32-bit word, moved as a whole.
inline void quads_from_rows(Side side, const uint8_t* codes, int stored, uint8_t* quads) {
  if (side == Side::kKey) {
    for (int c = 0; c < stored; c += 4) {
      for (int t = 0; t < kPageTokens; ++t) {
        __builtin_memcpy(quads + c * kPageTokens + 4 * t, codes + t * stored + c, 4);
      }
    }
    return;
  }
  for (int c = 0; c < stored; c += 16) {
    for (int t = 0; t < kPageTokens; t += 4) {
      __m128i row[4];
      for (int i = 0; i < 4; ++i) {
        row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + (t + i) * stored + c));
      }
      const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]), high01 = _mm_unpackhi_epi8(row[0], row[1]);
      const __m128i low23 = _mm_unpacklo_epi8(row[2], row[3]), high23 = _mm_unpackhi_epi8(row[2], row[3]);
      auto* out = reinterpret_cast<__m128i*>(quads + (c + t / 4) * 64);
      _mm_storeu_si128(out + 0, _mm_unpacklo_epi16(low01, low23));
      _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
      _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
      _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
    }
  }
}

inline void rows_from_quads(Side side, const uint8_t* quads, int stored, uint8_t* codes) {
  if (side == Side::kKey) {
    for (int c = 0; c < stored; c += 4) {
      for (int t = 0; t < kPageTokens; ++t) {
        __builtin_memcpy(codes + t * stored + c, quads + c * kPageTokens + 4 * t, 4);
      }
    }
    return;
  }
  // Four bytes per channel: gather byte i of each channel to the front of row i.
  const __m128i split = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int c = 0; c < stored; c += 16) {
    for (int t = 0; t < kPageTokens; t += 4) {
      const auto* in = reinterpret_cast<const __m128i*>(quads + (c + t / 4) * 64);
      __m128i part[4];
      for (int i = 0; i < 4; ++i) part[i] = _mm_shuffle_epi8(_mm_loadu_si128(in + i), split);
      const __m128i low01 = _mm_unpacklo_epi32(part[0], part[1]),
                    high01 = _mm_unpackhi_epi32(part[0], part[1]);
      const __m128i low23 = _mm_unpacklo_epi32(part[2], part[3]),
                    high23 = _mm_unpackhi_epi32(part[2], part[3]);
      const __m128i row[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                              _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
      for (int i = 0; i < 4; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + (t + i) * stored + c), row[i]);
      }
    }
  }
}

// Eight bytes at a time: masked codes never carry into the next byte.
inline void pack_band(const BandLayout& band, Side side, const uint8_t* codes, std::byte* tile) {
  alignas(64) uint8_t quads[kMaxCodes];
  quads_from_rows(side, codes, band.stored_channels, quads);
  int shift = 0;
  for (int p = 0; p < band.n_planes; ++p) {
    const int bits = band.plane_bits[p], per_byte = 8 / bits;
    const uint64_t mask = ((1u << bits) - 1) * 0x0101010101010101u;
    std::byte* plane = tile + band.plane_offset[p];
    for (int e = 0; e < band.stored_channels; e += per_byte, plane += 64) {
      uint64_t packed[8] = {};
      for (int i = 0; i < per_byte; ++i) {
        uint64_t value[8];
        __builtin_memcpy(value, quads + (e + i) * 64, 64);
        for (int w = 0; w < 8; ++w) packed[w] |= ((value[w] >> shift) & mask) << (bits * i);
      }
      __builtin_memcpy(plane, packed, 64);
    }
    shift += bits;
  }
}

inline void unpack_band(const BandLayout& band, Side side, const std::byte* tile, uint8_t* codes) {
  alignas(64) uint8_t quads[kMaxCodes];
  int shift = 0;
  for (int p = 0; p < band.n_planes; ++p) {
    const int bits = band.plane_bits[p], per_byte = 8 / bits;
    const uint64_t mask = ((1u << bits) - 1) * 0x0101010101010101u;
    const std::byte* plane = tile + band.plane_offset[p];
    for (int e = 0; e < band.stored_channels; e += per_byte, plane += 64) {
      uint64_t packed[8];
      __builtin_memcpy(packed, plane, 64);
      for (int i = 0; i < per_byte; ++i) {
        uint64_t value[8] = {};
        if (p > 0) __builtin_memcpy(value, quads + (e + i) * 64, 64);
        for (int w = 0; w < 8; ++w) value[w] |= ((packed[w] >> (bits * i)) & mask) << shift;
        __builtin_memcpy(quads + (e + i) * 64, value, 64);
      }
    }
    shift += bits;
  }
  rows_from_quads(side, quads, band.stored_channels, codes);
}

inline void transpose_8x8(const float* in, size_t in_stride, float* out, size_t out_stride) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * in_stride);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i + 0] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

inline void transpose(const float* rows, size_t stride, int channels, float* columns) {
  for (int c = 0; c < channels; c += 8) {
    for (int t = 0; t < kPageTokens; t += 8) {
      transpose_8x8(rows + t * stride + c, stride, columns + c * kPageTokens + t, kPageTokens);
    }
  }
}

inline void to_half(const float* x, uint16_t* y, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) y[i] = float_to_half(x[i]);
}

inline void from_half(const uint16_t* x, float* y, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  }
  for (; i < count; ++i) y[i] = half_to_float(x[i]);
}

}  // namespace
}  // namespace kvant::simd

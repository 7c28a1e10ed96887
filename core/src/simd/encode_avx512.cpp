// Encode-side kernels for AVX-512 (F, BW, DQ, VL): 16 lanes.
#include "simd/encode.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// g++ 12 reports the undefined vectors inside its own intrinsics (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "simd/encode_body.h"
#include "simd/encode_x86.h"

namespace kvant::simd {
namespace {

// Rows of a Hadamard matrix with each four elements four times in a row: broadcasting four floats from memory
// takes as long as a product.
template <int kFactor>
struct RepeatedRows {
  alignas(64) float at[kFactor * kFactor * 4];
};
template <int kFactor>
consteval RepeatedRows<kFactor> repeat_rows() {
  RepeatedRows<kFactor> rows{};
  const float* h = hadamard_matrix(kFactor);
  for (int j = 0; j < kFactor; ++j) {
    for (int l = 0; l < kFactor * 4; ++l) {
      rows.at[j * kFactor * 4 + l] = h[j * kHadamardStride + l / 16 * 4 + l % 4];
    }
  }
  return rows;
}
template <int kFactor>
constexpr RepeatedRows<kFactor> kRepeatedRows = repeat_rows<kFactor>();

struct SixteenLanes {
  static constexpr int kLanes = 16;
  static constexpr __mmask16 kLower = 0x00ff;
  using F = __m512;
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_f16_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_half(const float* p) { return _mm512_maskz_loadu_ps(kLower, p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static void store_half(float* p, F a) { _mm512_mask_storeu_ps(p, kLower, a); }
  static F lower_half(F a) { return _mm512_maskz_mov_ps(kLower, a); }
  static F set1(float a) { return _mm512_set1_ps(a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F floor(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static F less_blend(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static F load_codes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_codes_half(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static __m128i bytes(F a) { return _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a)); }
  static void store_codes(uint8_t* p, F a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes(a)); }
  static void store_codes_half(uint8_t* p, F a) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes(a)); }
  // Changes the sign of the lanes whose bit kStride is set.
  template <int kStride>
  static F negate_upper(F a) {
    constexpr __mmask16 kUpper = kStride == 1   ? 0xaaaa
                                 : kStride == 2 ? 0xcccc
                                 : kStride == 4 ? 0xf0f0
                                                : 0xff00;
    return _mm512_mask_xor_ps(a, kUpper, a, _mm512_set1_ps(-0.0f));
  }
  template <int kStride>
  static F butterfly(F a) {
    if constexpr (kStride == 1) {
      return add(_mm512_permute_ps(a, 0xb1), negate_upper<1>(a));
    } else if constexpr (kStride == 2) {
      return add(_mm512_permute_ps(a, 0x4e), negate_upper<2>(a));
    } else if constexpr (kStride == 4) {
      return add(_mm512_shuffle_f32x4(a, a, 0xb1), negate_upper<4>(a));
    } else {
      return add(_mm512_shuffle_f32x4(a, a, 0x4e), negate_upper<8>(a));
    }
  }

  // A rotation of kFactor * kColumns channels: EncodeBody's sums and butterflies in the same order, with
  // kColumns columns of 16 / kColumns rows in a vector, so that nothing passes through memory in between.
  // Products with signs are exact: a fused addition rounds as a product and a sum do.
  template <int kFactor, int kColumns>
  static void rotate(float* x, float norm) {
    constexpr int kRows = 16 / kColumns, kVectors = kFactor / kRows;
    F sum[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[v] = set1(0.0f);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i column = _mm512_srli_epi32(lane, log2_of(kRows));
    for (int j = 0; j < kFactor; ++j) {
      const F values = _mm512_permutexvar_ps(column, first_lanes<kColumns>(x + j * kColumns));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = _mm512_fmadd_ps(signs<kFactor, kRows>(j, v), values, sum[v]);
      }
    }
    // Lane row * kColumns + column comes from lane column * kRows + row.
    const __m512i from = _mm512_or_si512(
        _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(kColumns - 1)), log2_of(kRows)),
        _mm512_srli_epi32(lane, log2_of(kColumns)));
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      F a = sum[v];
      if constexpr (kRows <= 1) a = butterfly<1>(a);
      if constexpr (kRows <= 2) a = butterfly<2>(a);
      if constexpr (kRows <= 4) a = butterfly<4>(a);
      a = butterfly<8>(a);
      store(x + 16 * v, mul(_mm512_permutexvar_ps(from, a), set1(norm)));
    }
  }
  static constexpr unsigned log2_of(int n) { return n == 1 ? 0 : n == 2 ? 1 : n == 4 ? 2 : n == 8 ? 3 : 4; }
  // kCount floats in the lowest lanes.
  template <int kCount>
  static F first_lanes(const float* p) {
    if constexpr (kCount == 4) return _mm512_castps128_ps512(_mm_loadu_ps(p));
    if constexpr (kCount == 8) return _mm512_castps256_ps512(_mm256_loadu_ps(p));
    return load(p);
  }
  // Column j of the matrix at kRows rows from kRows * v on, over and over.
  template <int kFactor, int kRows>
  static F signs(int j, int v) {
    if constexpr (kRows == 4) {
      return _mm512_load_ps(kRepeatedRows<kFactor>.at + (j * kFactor / 4 + v) * 16);
    } else {
      const float* h = hadamard_matrix(kFactor) + j * kHadamardStride + v * kRows;
      if constexpr (kRows == 1) return set1(*h);
      return _mm512_castsi512_ps(
          _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(h))));
    }
  }
  // False for sizes that have no such form.
  static bool hadamard_of_factor(float* x, int factor, int columns, float norm) {
    switch (factor * 32 + columns) {
      case 12 * 32 + 4:
        return rotate<12, 4>(x, norm), true;
      case 12 * 32 + 8:
        return rotate<12, 8>(x, norm), true;
      case 12 * 32 + 16:
        return rotate<12, 16>(x, norm), true;
      case 20 * 32 + 4:
        return rotate<20, 4>(x, norm), true;
      case 20 * 32 + 8:
        return rotate<20, 8>(x, norm), true;
      case 28 * 32 + 4:
        return rotate<28, 4>(x, norm), true;
      case 28 * 32 + 8:
        return rotate<28, 8>(x, norm), true;
      default:
        return false;
    }
  }
};

using Body = EncodeBody<SixteenLanes>;
constexpr EncodeKernels kTable = {
    Body::matvec,   Body::hadamard, pack_band,        unpack_band, transpose, Body::search_scale,
    Body::fit_line, Body::quantize, Body::dequantize, to_half,     from_half};

}  // namespace

const EncodeKernels* avx512_encode_kernels() { return &kTable; }

}  // namespace kvant::simd

#else

namespace kvant::simd {
const EncodeKernels* avx512_encode_kernels() { return nullptr; }
}  // namespace kvant::simd

#endif

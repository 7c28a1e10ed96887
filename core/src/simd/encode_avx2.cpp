// Encode-side kernels for AVX2 with F16C: 8 lanes.
#include "simd/encode.h"

#if defined(__AVX2__)

#include "simd/encode_body.h"
#include "simd/encode_x86.h"

namespace kvant::simd {
namespace {

struct EightLanes {
  static constexpr int kLanes = 8;
  using F = __m256;
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F set1(float a) { return _mm256_set1_ps(a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F floor(F a) { return _mm256_floor_ps(a); }
  static F less_blend(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F load_codes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_codes(uint8_t* p, F a) {
    const __m256i words = _mm256_cvttps_epi32(a);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
  }
  template <int kStride>
  static F butterfly(F a) {
    const float m = -0.0f;
    if constexpr (kStride == 1) {
      return add(_mm256_permute_ps(a, 0xb1), _mm256_xor_ps(a, _mm256_setr_ps(0, m, 0, m, 0, m, 0, m)));
    } else if constexpr (kStride == 2) {
      return add(_mm256_permute_ps(a, 0x4e), _mm256_xor_ps(a, _mm256_setr_ps(0, 0, m, m, 0, 0, m, m)));
    } else {
      return add(_mm256_permute2f128_ps(a, a, 1), _mm256_xor_ps(a, _mm256_setr_ps(0, 0, 0, 0, m, m, m, m)));
    }
  }
};

using Body = EncodeBody<EightLanes>;
constexpr EncodeKernels kTable = {
    Body::matvec,   Body::hadamard, pack_band,        unpack_band, transpose, Body::search_scale,
    Body::fit_line, Body::quantize, Body::dequantize, to_half,     from_half};

}  // namespace

const EncodeKernels* avx2_encode_kernels() { return &kTable; }

}  // namespace kvant::simd

#else

namespace kvant::simd {
const EncodeKernels* avx2_encode_kernels() { return nullptr; }
}  // namespace kvant::simd

#endif

// Attention kernels for one SIMD target. An ISA file (attention_avx2.cpp, ...) defines KVANT_TARGET, a
// namespace of its own, and includes this file once; its compile flags choose Highway's static target.
//
// Everything here has internal linkage and calls no inline function of the standard library or of core's
// headers: the linker keeps one copy of an inline function, and it must not be one built for AVX-512.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES
#include <hwy/highway.h>

#include "simd/attention.h"
#include "simd/attention_constants.h"
#include "simd/scale_tables.h"

// Highway has no dot products of bytes; 512-bit targets use VNNI, 256-bit ones vpmaddubsw.
#define KVANT_AVX512 (HWY_TARGET == HWY_AVX3)
#define KVANT_AVX2 (HWY_TARGET == HWY_AVX2)
#if defined(__clang__)
#define KVANT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVANT_UNROLL _Pragma("GCC unroll 16")
#endif

HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<int32_t>;
using DU = hn::ScalableTag<uint32_t>;
using DW = hn::ScalableTag<uint16_t>;
using DS = hn::ScalableTag<int16_t>;
using DB = hn::ScalableTag<uint8_t>;
using F = hn::Vec<DF>;  // one logit, channel or weight per lane
using I = hn::Vec<DI>;  // integer sums of them
using U = hn::Vec<DU>;
using Bytes = hn::Vec<DB>;  // four bytes per lane: the operands of one 4-byte dot product
constexpr DF df;
constexpr DI di;
constexpr DU du;
constexpr DW dw;
constexpr DS ds;
constexpr DB db;

constexpr int kLanes = HWY_LANES(float);
constexpr int kTokenVectors = kPageTokens / kLanes;
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16);

HWY_INLINE F load(const float* p) { return hn::LoadU(df, p); }
// Keeps the compiler from loading v again for each use: a 512-bit load takes as long as a product.
HWY_INLINE F in_register(F v) {
#if KVANT_AVX512
  asm("" : "+v"(v.raw));
#endif
  return v;
}
HWY_INLINE void store(F v, float* p) { hn::StoreU(v, df, p); }
HWY_INLINE F set(float x) { return hn::Set(df, x); }
HWY_INLINE F lanes_from(const float* p, int count) {
  return count >= kLanes ? load(p) : hn::MaskedLoad(hn::FirstN(df, static_cast<size_t>(count)), df, p);
}
HWY_INLINE void lanes_to(F v, float* p, int count) {
  if (count >= kLanes) {
    store(v, p);
  } else {
    hn::BlendedStore(v, hn::FirstN(df, static_cast<size_t>(count)), df, p);
  }
}
HWY_INLINE float sum_of(F v) { return hn::GetLane(hn::SumOfLanes(df, v)); }
HWY_INLINE float max_of(F v) { return hn::GetLane(hn::MaxOfLanes(df, v)); }
HWY_INLINE int32_t sum_of(I v) { return hn::GetLane(hn::SumOfLanes(di, v)); }

// Rounds to nearest even. Highway's NearestInt also saturates, which quantization never needs.
HWY_INLINE I round_to_int(F v) {
#if KVANT_AVX512
  return I{_mm512_cvtps_epi32(v.raw)};
#elif KVANT_AVX2
  return I{_mm256_cvtps_epi32(v.raw)};
#else
  return hn::NearestInt(v);
#endif
}

HWY_INLINE uint16_t load_word(const void* p) {
  uint16_t w = 0;
  memcpy(&w, p, sizeof w);
  return w;
}

// Members of std::array without its (inline) functions.
HWY_INLINE const BandLayout* bands_of(const TileLayout& layout) {
  return reinterpret_cast<const BandLayout*>(&layout.bands);
}
HWY_INLINE uint32_t plane_offset_of(const BandLayout& band, int i) {
  return reinterpret_cast<const uint32_t*>(&band.plane_offset)[i];
}
HWY_INLINE bool has_token_low(const TileLayout& layout) { return layout.asymmetric && !layout.channel_scale; }

// Rows of a call that have live tokens.
struct LiveRows {
  int count = 0;
  uint8_t row[kMaxRows];
};
HWY_INLINE void find_live_rows(const uint64_t* live, int rows, LiveRows* out) {
  out->count = 0;
  for (int r = 0; r < rows; ++r) {
    out->row[out->count] = static_cast<uint8_t>(r);
    out->count += live[r] != 0 ? 1 : 0;
  }
}

// ---- reductions
// --------------------------------------------------------------------------------------------

using D4 = hn::CappedTag<float, 4>;
using F4 = hn::Vec<D4>;

struct AddLanes {
  template <class V>
  static HWY_INLINE V apply(V a, V b) {
    return hn::Add(a, b);
  }
};
struct MaxLanes {
  template <class V>
  static HWY_INLINE V apply(V a, V b) {
    return hn::Max(a, b);
  }
};

// Reduces the lanes of each of four vectors, always by the same tree: halves are combined until four lanes
// are left, then pairs two lanes apart.
template <class Op, class V>
HWY_INLINE F4 reduce_four(V a, V b, V c, V d) {
  using D = hn::DFromV<V>;
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return reduce_four<Op>(Op::apply(hn::LowerHalf(half, a), hn::UpperHalf(half, a)),
                           Op::apply(hn::LowerHalf(half, b), hn::UpperHalf(half, b)),
                           Op::apply(hn::LowerHalf(half, c), hn::UpperHalf(half, c)),
                           Op::apply(hn::LowerHalf(half, d), hn::UpperHalf(half, d)));
  } else {
    const D d4;
    const V ab = Op::apply(hn::InterleaveLower(d4, a, b), hn::InterleaveUpper(d4, a, b));
    const V cd = Op::apply(hn::InterleaveLower(d4, c, d), hn::InterleaveUpper(d4, c, d));
    return Op::apply(hn::ConcatLowerLower(d4, cd, ab), hn::ConcatUpperUpper(d4, cd, ab));
  }
}

// Of one to four rows; unused lanes repeat the first.
template <class Op, int kRows>
HWY_INLINE F4 reduce_rows(const F (&v)[kRows]) {
  return reduce_four<Op>(v[0], v[kRows > 1 ? 1 : 0], v[kRows > 2 ? 2 : 0], v[kRows > 3 ? 3 : 0]);
}

// Quantization of up to four rows whose largest magnitudes are `max`: x ~ scale * round(x * inverse),
// integers up to `largest`; zeros below kQuantizeFloor.
struct RowScales {
  alignas(16) float scale[4];
  alignas(16) float inverse[4];
};
HWY_INLINE RowScales row_scales(F4 max, float largest) {
  const D4 d4;
  const auto usable = hn::Ge(max, hn::Set(d4, kQuantizeFloor));
  RowScales out;
  hn::Store(hn::IfThenElseZero(usable, hn::Div(max, hn::Set(d4, largest))), d4, out.scale);
  hn::Store(hn::IfThenElseZero(usable, hn::Div(hn::Set(d4, largest), max)), d4, out.inverse);
  return out;
}

// ---- stored scales as floats
// -------------------------------------------------------------------------------

HWY_INLINE F words_to_scales(const std::byte* p) {
  const U w = hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, DU>(), reinterpret_cast<const uint16_t*>(p)));
  const U bits = hn::Add(hn::ShiftLeft<13>(w), hn::Set(du, 86u << 23));
  return hn::BitCast(df, hn::IfThenZeroElse(hn::Eq(w, hn::Zero(du)), bits));
}

HWY_INLINE F halves_to_floats(const void* p) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}

HWY_INLINE float scale_word(const std::byte* p) {
  const uint32_t w = load_word(p);
  const uint32_t bits = w == 0 ? 0 : (w << 13) + (86u << 23);
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Steps k -> base * table[(k + 1) % kSteps] * 2^((k + 1) / kSteps - exponent), 0 for k = 0.
template <int kLogSteps>
HWY_INLINE F log_steps(U k, F mantissas) {
  const U next = hn::Add(k, hn::Set(du, 1));
  const U index = hn::And(next, hn::Set(du, (1u << kLogSteps) - 1));
  const F mantissa = hn::TableLookupLanes(mantissas, hn::IndicesFromVec(df, hn::BitCast(di, index)));
  const U exponent = hn::Sub(hn::ShiftRight<kLogSteps>(next), hn::Set(du, kLogSteps == 2 ? 4 : 32));
  const U bits = hn::Add(hn::BitCast(du, mantissa), hn::ShiftLeft<23>(exponent));
  return hn::BitCast(df, hn::IfThenZeroElse(hn::Eq(k, hn::Zero(du)), bits));
}

HWY_INLINE void expand_log4(const std::byte* words, float base, float* out) {
#if KVANT_AVX512
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m512i wide = _mm512_cvtepu8_epi16(packed);
  const __m512i steps =
      _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi16(0x0f0f));
  const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(kLog4Steps), _mm512_set1_ps(base));
  const __m512i k[4] = {_mm512_cvtepu8_epi32(_mm512_castsi512_si128(steps)),
                        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(steps, 1)),
                        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(steps, 2)),
                        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(steps, 3))};
  KVANT_UNROLL
  for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + 16 * i, _mm512_permutexvar_ps(k[i], table));
#else
  const F mantissas = hn::Mul(hn::LoadDup128(df, kQuarterOctave), set(base));
  alignas(64) static constexpr uint32_t kShifts[8] = {0, 4, 8, 12, 16, 20, 24, 28};
  for (int t = 0; t < kPageTokens; t += kLanes) {
    uint32_t chunk = 0;
    memcpy(&chunk, words + t / 8 * 4, sizeof chunk);
    const U shifted = hn::Shr(hn::Set(du, chunk), hn::Load(du, kShifts + t % 8));
    store(log_steps<2>(hn::And(shifted, hn::Set(du, 15)), mantissas), out + t);
  }
#endif
}

HWY_INLINE void expand_log8(const std::byte* words, float base, float* out) {
  if constexpr (kLanes >= 8) {
    alignas(64) float table[16];
    for (int i = 0; i < 16; ++i) table[i] = kEighthOctave[i & 7] * base;
    const F mantissas = hn::Load(df, table);
    for (int t = 0; t < kPageTokens; t += kLanes) {
      const hn::Rebind<uint8_t, DU> d8;
      const U k = hn::PromoteTo(du, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(words + t)));
      store(log_steps<3>(k, mantissas), out + t);
    }
  } else {
    for (int t = 0; t < kPageTokens; ++t) {
      const int k = static_cast<int>(words[t]) + 1;
      uint32_t bits = 0;
      const float mantissa = base * kEighthOctave[k & 7];
      memcpy(&bits, &mantissa, sizeof bits);
      bits = k == 1 ? 0 : bits + (static_cast<uint32_t>((k >> 3) - 32) << 23);
      memcpy(out + t, &bits, sizeof bits);
    }
  }
}

// The 64 token scales of a band.
HWY_INLINE void expand_token_scales(const TileLayout& layout, const BandLayout& band, const std::byte* tile,
                                    float* out) {
  const std::byte* words = tile + band.token_scale_offset;
  switch (layout.token_scale) {
    case ScaleType::kNone:
      for (int t = 0; t < kPageTokens; t += kLanes) store(set(1.0f), out + t);
      return;
    case ScaleType::kE6M10:
      for (int t = 0; t < kPageTokens; t += kLanes) store(words_to_scales(words + 2 * t), out + t);
      return;
    case ScaleType::kLog8:
      return expand_log8(words, scale_word(tile + band.token_base_offset), out);
    case ScaleType::kLog4:
      return expand_log4(words, scale_word(tile + band.token_base_offset), out);
  }
}

HWY_INLINE void expand_token_lows(const BandLayout& band, const std::byte* tile, float* out) {
  for (int t = 0; t < kPageTokens; t += kLanes) {
    store(halves_to_floats(tile + band.token_low_offset + 2 * t), out + t);
  }
}

// Channel scales and centres; `out` has room for kMaxHeadDim + kLanes floats and is 0 beyond the last
// channel. Reading past the last channel stays in the tile: the 16-byte trailer follows.
HWY_INLINE void expand_channel_scales(const TileLayout& layout, const std::byte* tile, float* out) {
  for (int c = 0; c < layout.head_dim; c += kLanes) {
    store(words_to_scales(tile + layout.channel_scale_offset + 2 * c), out + c);
  }
  store(hn::Zero(df), out + layout.head_dim);
}
HWY_INLINE void expand_channel_centres(const TileLayout& layout, const std::byte* tile, float* out) {
  for (int c = 0; c < layout.head_dim; c += kLanes) {
    store(halves_to_floats(tile + layout.channel_centre_offset + 2 * c), out + c);
  }
  store(hn::Zero(df), out + layout.head_dim);
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

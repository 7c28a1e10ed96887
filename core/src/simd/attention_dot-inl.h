// Integer dot products on bit planes: included by the ISA files after attention-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Four-byte dot products of unsigned bytes with signed bytes, summed over steps. With VNNI a Partial is the
// 32-bit sum itself. Without, it is 16-bit sums of two products, good for kKeyStepsIn16Bits or
// kValueStepsIn16Bits steps, which fold() then widens: no step saturates.
#if KVANT_AVX512
constexpr bool kDirectDot = true;
using Partial = I;
HWY_INLINE Partial dot_step(Partial sum, Bytes u, Bytes s) {
  return I{_mm512_dpbusd_epi32(sum.raw, u.raw, s.raw)};
}
HWY_INLINE I fold(I sum, Partial p) { return hn::Add(sum, p); }
#else
constexpr bool kDirectDot = false;
using Partial = hn::Vec<DS>;
#if KVANT_AVX2
HWY_INLINE Partial dot_step(Partial sum, Bytes u, Bytes s) {
  return hn::Add(sum, Partial{_mm256_maddubs_epi16(u.raw, s.raw)});
}
HWY_INLINE I fold(I sum, Partial p) {
  return hn::Add(sum, I{_mm256_madd_epi16(p.raw, _mm256_set1_epi16(1))});
}
#else
HWY_INLINE Partial dot_step(Partial sum, Bytes u, Bytes s) {
  const auto uw = hn::BitCast(dw, u);
  const auto even_u = hn::BitCast(ds, hn::And(uw, hn::Set(dw, 0xff)));
  const auto odd_u = hn::BitCast(ds, hn::ShiftRight<8>(uw));
  const auto sw = hn::BitCast(ds, s);
  const auto even_s = hn::ShiftRight<8>(hn::ShiftLeft<8>(sw));
  const auto odd_s = hn::ShiftRight<8>(sw);
  return hn::Add(sum, hn::Add(hn::Mul(even_u, even_s), hn::Mul(odd_u, odd_s)));
}
HWY_INLINE I fold(I sum, Partial p) {
  const I pairs = hn::BitCast(di, p);
  return hn::Add(sum, hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(pairs)), hn::ShiftRight<16>(pairs)));
}
#endif
#endif

// Broadcasts four bytes to all lanes.
HWY_INLINE Bytes quad(const void* p) {
  int32_t x = 0;
  memcpy(&x, p, sizeof x);
  return hn::BitCast(db, hn::Set(di, x));
}

// Planes of a band, or codes that were unpacked to bytes (kUnpacked, one plane of 8 bits).
constexpr int kUnpacked = 0;
constexpr int stored_bits(int format) { return format == kUnpacked ? 8 : format; }
// Bits of plane i of a width: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1.
constexpr int plane_bits(int width, int i) {
  int left = width == kUnpacked ? 8 : width;
  for (int size = 8; size > 0; size /= 2) {
    if (left < size) continue;
    left -= size;
    if (i-- == 0) return size;
  }
  return 0;
}

struct Planes {
  const uint8_t* p[3];
  ptrdiff_t ahead;  // to the same bytes of the tile that is read next
};

// To the second-level cache: it waits for more lines at a time than the first level does.
HWY_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <int kFormat>
HWY_INLINE void prefetch_octet(const Planes& planes) {
  for (int i = 0; i < plane_bits(kFormat, 0); ++i) prefetch(planes.p[0] + planes.ahead + 64 * i);
  for (int i = 0; i < plane_bits(kFormat, 1); ++i) prefetch(planes.p[1] + planes.ahead + 64 * i);
  for (int i = 0; i < plane_bits(kFormat, 2); ++i) prefetch(planes.p[2] + planes.ahead + 64 * i);
}

// Everything of the next tile behind what the products of this one ask for: scales, lows, centres.
HWY_INLINE void prefetch_metadata(const TileLayout& layout, const std::byte* next, uint32_t next_bytes) {
  uint32_t first = layout.trailer_offset;
  const BandLayout& band = bands_of(layout)[0];
  if (layout.token_scale != ScaleType::kNone) first = band.token_scale_offset;
  if (layout.channel_scale && layout.channel_scale_offset < first) first = layout.channel_scale_offset;
  for (uint32_t at = first & ~63u; at < next_bytes; at += 64) prefetch(next + at);
}

// Of the tiles that follow `count` tasks opened together, before the products of task i: in the first half of
// them, since all are needed when the next tasks are opened.
template <class Task>
HWY_INLINE void prefetch_next_metadata(const Task* tasks, int count, int i) {
  for (int n = 2 * i; n < count && n < 2 * i + 2; ++n) {
    prefetch_metadata(*tasks[n].layout, tasks[n].next, tasks[n].next_bytes);
  }
}

template <int kFormat>
HWY_INLINE Planes advance(Planes planes, int octets) {
  planes.p[0] += octets * 64 * plane_bits(kFormat, 0);
  if constexpr (plane_bits(kFormat, 1) != 0) planes.p[1] += octets * 64 * plane_bits(kFormat, 1);
  if constexpr (plane_bits(kFormat, 2) != 0) planes.p[2] += octets * 64 * plane_bits(kFormat, 2);
  return planes;
}

template <int kFormat>
HWY_INLINE Planes move_bytes(Planes planes, int bytes) {
  planes.p[0] += bytes;
  if constexpr (plane_bits(kFormat, 1) != 0) planes.p[1] += bytes;
  if constexpr (plane_bits(kFormat, 2) != 0) planes.p[2] += bytes;
  return planes;
}

// The field of element kElement (0..7 of an octet of elements) of a plane, moved to bit kPosition; the other
// bits are undefined.
template <int kBits, int kElement, int kPosition>
HWY_INLINE Bytes raw_field(const uint8_t* octet) {
  constexpr int kPerVector = 8 / kBits;
  constexpr int kShift = kBits * (kElement % kPerVector) - kPosition;
  const auto v = hn::BitCast(dw, hn::LoadU(db, octet + kElement / kPerVector * 64));
  if constexpr (kShift > 0) return hn::BitCast(db, hn::ShiftRight<kShift>(v));
  if constexpr (kShift < 0) return hn::BitCast(db, hn::ShiftLeft<-kShift>(v));
  return hn::BitCast(db, v);
}

HWY_INLINE Bytes byte_mask(int mask) { return hn::Set(db, static_cast<uint8_t>(mask)); }

// low where mask is set, else high.
HWY_INLINE Bytes choose(Bytes mask, Bytes low, Bytes high) {
#if KVANT_AVX512
  return Bytes{_mm512_ternarylogic_epi32(mask.raw, low.raw, high.raw, 0xca)};
#else
  return hn::Or(hn::And(mask, low), hn::AndNot(mask, high));
#endif
}

// Codes of element kElement of an octet, one per byte.
template <int kFormat, int kElement>
HWY_INLINE Bytes codes(const Planes& planes) {
  constexpr int kFirst = plane_bits(kFormat, 0), kSecond = plane_bits(kFormat, 1),
                kThird = plane_bits(kFormat, 2);
  const Bytes first = raw_field<kFirst, kElement, 0>(planes.p[0]);
  if constexpr (kFirst == 8) {
    return first;
  } else if constexpr (kSecond == 0) {
    return hn::And(first, byte_mask((1 << kFirst) - 1));
  } else {
    Bytes high = raw_field<kSecond, kElement, kFirst>(planes.p[1]);
    if constexpr (kThird != 0) {
      const Bytes top = raw_field<kThird, kElement, kFirst + kSecond>(planes.p[2]);
      high = choose(byte_mask((1 << (kFirst + kSecond)) - 1), high, top);
    }
    const Bytes all = choose(byte_mask((1 << kFirst) - 1), first, high);
    return hn::And(all, byte_mask((1 << stored_bits(kFormat)) - 1));
  }
}

template <int kFormat, int kElement>
HWY_INLINE void unpack_element(const Planes& planes, uint8_t* out) {
  for (int i = 0; i < 64; i += 4 * kLanes) {
    hn::StoreU(codes<kFormat, kElement>(move_bytes<kFormat>(planes, i)), db, out + kElement * 64 + i);
  }
}

// Unpacks octets of elements to one byte per code, 512 bytes each.
template <int kFormat>
void unpack(Planes planes, int octets, uint8_t* out) {
  for (int o = 0; o < octets; ++o, out += 512) {
    prefetch_octet<kFormat>(planes);
    unpack_element<kFormat, 0>(planes, out);
    unpack_element<kFormat, 1>(planes, out);
    unpack_element<kFormat, 2>(planes, out);
    unpack_element<kFormat, 3>(planes, out);
    unpack_element<kFormat, 4>(planes, out);
    unpack_element<kFormat, 5>(planes, out);
    unpack_element<kFormat, 6>(planes, out);
    unpack_element<kFormat, 7>(planes, out);
    planes = advance<kFormat>(planes, 1);
  }
}

// Written pointer by pointer: a 16-byte copy of 8-byte stores would wait for them to leave the store queue.
HWY_INLINE void planes_of(const BandLayout& band, const std::byte* tile, const std::byte* next, Planes* out) {
  out->ahead = next - tile;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tile);
  out->p[0] = bytes + plane_offset_of(band, 0);
  out->p[1] = bytes + plane_offset_of(band, 1);
  out->p[2] = bytes + plane_offset_of(band, 2);
}

void unpack_band(const BandLayout& band, const std::byte* tile, const std::byte* next, int octets,
                 uint8_t* out) {
  Planes planes;
  planes_of(band, tile, next, &planes);
  switch (band.bits) {
    case 2:
      return unpack<2>(planes, octets, out);
    case 3:
      return unpack<3>(planes, octets, out);
    case 4:
      return unpack<4>(planes, octets, out);
    case 5:
      return unpack<5>(planes, octets, out);
    case 6:
      return unpack<6>(planes, octets, out);
    case 7:
      return unpack<7>(planes, octets, out);
    default:
      return;
  }
}

// Stores the low bytes of integers that fit a byte; `count` is 8 or at least the lanes.
HWY_INLINE void bytes_to(I v, void* out, int count) {
#if KVANT_AVX512
  const __m128i bytes = _mm512_cvtepi32_epi8(v.raw);
  if (count >= 16) {
    _mm_storeu_si128(static_cast<__m128i*>(out), bytes);
  } else {
    _mm_storel_epi64(static_cast<__m128i*>(out), bytes);
  }
#else
  (void)count;
  const auto low = hn::And(v, hn::Set(di, 0xff));
  hn::StoreU(hn::DemoteTo(hn::Rebind<uint8_t, DI>(), low), hn::Rebind<uint8_t, DI>(),
             static_cast<uint8_t*>(out));
#endif
}

// Four vectors of integers in 0..255 as bytes, in order.
HWY_INLINE Bytes pack_unsigned(const I* v) {
#if KVANT_AVX512
  const __m512i low = _mm512_packs_epi32(v[0].raw, v[1].raw), high = _mm512_packs_epi32(v[2].raw, v[3].raw);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return Bytes{_mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high))};
#elif KVANT_AVX2
  const __m256i low = _mm256_packs_epi32(v[0].raw, v[1].raw), high = _mm256_packs_epi32(v[2].raw, v[3].raw);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return Bytes{_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order)};
#else
  const hn::Rebind<int16_t, DI> half_words;
  const hn::Rebind<uint8_t, DS> half_bytes;
  const auto low = hn::Combine(ds, hn::DemoteTo(half_words, v[1]), hn::DemoteTo(half_words, v[0]));
  const auto high = hn::Combine(ds, hn::DemoteTo(half_words, v[3]), hn::DemoteTo(half_words, v[2]));
  return hn::Combine(db, hn::DemoteTo(half_bytes, high), hn::DemoteTo(half_bytes, low));
#endif
}

// The same for integers in -128..127, of which the low bytes are kept.
HWY_INLINE Bytes pack_signed(const I* v) {
#if KVANT_AVX512
  const __m512i low = _mm512_packs_epi32(v[0].raw, v[1].raw), high = _mm512_packs_epi32(v[2].raw, v[3].raw);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return Bytes{_mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high))};
#else
  const I mask = hn::Set(di, 0xff);
  const I low_bytes[4] = {hn::And(v[0], mask), hn::And(v[1], mask), hn::And(v[2], mask), hn::And(v[3], mask)};
  return pack_unsigned(low_bytes);
#endif
}

// Sums of four bytes per lane.
HWY_INLINE I sum_unsigned(Bytes v) {
  const Partial zero = hn::Zero(hn::DFromV<Partial>());
  const Partial sum = dot_step(zero, v, hn::Set(db, 1));
  if constexpr (kDirectDot) return hn::BitCast(di, sum);
  return fold(hn::Zero(di), sum);
}
HWY_INLINE I sum_signed(Bytes v) {
  const Partial zero = hn::Zero(hn::DFromV<Partial>());
  const Partial sum = dot_step(zero, hn::Set(db, 1), v);
  if constexpr (kDirectDot) return hn::BitCast(di, sum);
  return fold(hn::Zero(di), sum);
}

template <class V, int kTermRows, int kVectors>
HWY_INLINE void clear(V (&sum)[kTermRows][kVectors]) {
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) sum[r][i] = hn::Zero(hn::DFromV<V>());
  }
}

template <int kTermRows, int kVectors>
HWY_INLINE void fold_all(const Partial (&sum)[kTermRows][kVectors], I (&total)[kTermRows][kVectors]) {
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) total[r][i] = fold(total[r][i], sum[r][i]);
  }
}

// Rows beyond which a band of several planes is unpacked to bytes once instead of for each block of rows. One
// plane takes a shift and a mask, which cost less beside the products than bytes that have to be stored.
constexpr int kUnpackRows = 4;

// Tasks of up to kFewRows rows whose queries or weights are quantized before the first product: one task's
// wait for its maxima and divisions then hides behind the others. More rows need no such company.
constexpr int kTasksAtOnce = 4;
constexpr int kFewRows = 4;
// Blocks of four rows of queries that are folded with channel scales together.
constexpr int kBlocksAtOnce = 4;

// Rows whose sums 32 registers, or 16, hold beside the codes.
constexpr int kTwoTermRows = kLanes == 16 ? 4 : 2;
HWY_INLINE int rows_per_block(bool two_terms) { return two_terms ? kTwoTermRows : 4; }

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

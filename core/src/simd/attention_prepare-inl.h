// Queries in integers: included by the ISA files after attention_dot-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Up to four rows of queries.
struct QueryRows {
  int count;
  int row[4];
};

// What the channels of a tile do to its queries, by channel of the head; null: nothing. q * scale is rounded,
// and q . low is added to the scores.
struct ChannelFactors {
  const float* scale;
  const float* low;
};
enum class Fold { kNone, kScale, kScaleAndLow };

constexpr int kScaledStride = kMaxHeadDim + kLanes;

// Rounds `channels` floats of kRows rows times their factor to integers, stores their terms and adds them per
// lane.
template <int kRows, int kTerms>
HWY_INLINE void quantize_rows(const float* const (&x)[kRows], int channels, const float* factor,
                              int8_t* const (&out)[kRows], I (&sum)[kRows]) {
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = hn::Zero(di);
  int c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      I v[4], rest[4];
      KVANT_UNROLL
      for (int i = 0; i < 4; ++i) {
        v[i] = round_to_int(hn::Mul(load(x[r] + c + i * kLanes), set(factor[r])));
        if constexpr (kTerms == 2) {
          const I hi = hn::ShiftRight<6>(hn::Add(v[i], hn::Set(di, 32)));
          rest[i] = hn::Sub(v[i], hn::ShiftLeft<6>(hi));
          v[i] = hi;
        }
      }
      const Bytes first = pack_signed(v);
      hn::StoreU(first, db, reinterpret_cast<uint8_t*>(out[r]) + c);
      I added = sum_signed(first);
      if constexpr (kTerms == 2) {
        const Bytes second = pack_signed(rest);
        hn::StoreU(second, db, reinterpret_cast<uint8_t*>(out[r]) + channels + c);
        added = hn::Add(hn::ShiftLeft<6>(added), sum_signed(second));
      }
      sum[r] = hn::Add(sum[r], added);
    }
  }
  for (; c < channels; c += kLanes) {
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const I v = round_to_int(hn::Mul(lanes_from(x[r] + c, channels - c), set(factor[r])));
      sum[r] = hn::Add(sum[r], v);
      if constexpr (kTerms == 2) {
        const I hi = hn::ShiftRight<6>(hn::Add(v, hn::Set(di, 32)));
        bytes_to(hi, out[r] + c, channels - c);
        bytes_to(hn::Sub(v, hn::ShiftLeft<6>(hi)), out[r] + channels + c, channels - c);
      } else {
        bytes_to(v, out[r] + c, channels - c);
      }
    }
  }
}

// Of the magnitudes of a and b.
HWY_INLINE F max_abs(F a, F b) {
#if KVANT_AVX512
  return F{_mm512_range_ps(a.raw, b.raw, 0xb)};
#else
  return hn::Max(a, hn::Abs(b));
#endif
}

// Band b of up to four rows of queries.
struct BandQueries {
  const TileLayout& layout;
  const PreparedQueries& q;
  int b;
  QueryRows rows;
  float* scaled;  // [4][kScaledStride] the rows times channel scales; null where there are none

  const BandLayout& band() const { return bands_of(layout)[b]; }
  const float* floats(int i) const {
    return q.q + static_cast<size_t>(rows.row[i]) * layout.head_dim + band().first_channel;
  }
  float* scaled_floats(int i) const { return scaled + i * kScaledStride + band().first_channel; }
  int8_t* integers(int i) const {
    return q.q8 + q.band_offset[b] + static_cast<size_t>(rows.row[i]) * q.terms[b] * band().channels;
  }
};

// Per lane: the largest magnitudes of kRows rows times the channels' scales, which are kept, and the rows'
// products with the lows. Bands come in the order of their channels, so that lanes past the end of one are
// written again by the next.
template <int kRows, Fold kFold>
HWY_INLINE void scan_rows(const BandQueries& block, const ChannelFactors& factors, F (&amax)[kRows],
                          F (&dot)[kRows]) {
  const int first_channel = block.band().first_channel, channels = block.band().channels;
  const float* x[kRows];
  float* scaled[kRows];
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    x[i] = block.floats(i);
    scaled[i] = kFold == Fold::kNone ? nullptr : block.scaled_floats(i);
    amax[i] = dot[i] = hn::Zero(df);
  }
  const auto step = [&](int c, int count) HWY_ATTR {
    F scale = set(1.0f), low = set(0.0f);
    if constexpr (kFold != Fold::kNone) scale = load(factors.scale + first_channel + c);
    if constexpr (kFold == Fold::kScaleAndLow) low = load(factors.low + first_channel + c);
    KVANT_UNROLL
    for (int i = 0; i < kRows; ++i) {
      F v = in_register(lanes_from(x[i] + c, count));
      if constexpr (kFold == Fold::kScaleAndLow) dot[i] = hn::MulAdd(v, low, dot[i]);
      if constexpr (kFold != Fold::kNone) {
        v = hn::Mul(v, scale);
        store(v, scaled[i] + c);
      }
      amax[i] = max_abs(amax[i], v);
    }
  };
  int c = 0;
  for (; c + kLanes <= channels; c += kLanes) step(c, kLanes);
  if (c < channels) step(c, channels - c);
}

// The steps of kRows rows; start[i], unless null, gets their products with the lows added.
template <int kRows, Fold kFold>
void measure_rows(const BandQueries& block, const ChannelFactors& factors, float* start, RowScales* out) {
  F amax[kRows], dot[kRows];
  scan_rows<kRows, kFold>(block, factors, amax, dot);
  *out = row_scales(reduce_rows<MaxLanes>(amax),
                    block.q.terms[block.b] == 2 ? kQueryMaxTwoTerms : kQueryMaxOneTerm);
  if constexpr (kFold == Fold::kScaleAndLow) {
    alignas(16) float product[4];
    hn::Store(reduce_rows<AddLanes>(dot), D4(), product);
    KVANT_UNROLL
    for (int i = 0; i < kRows; ++i) start[i] += product[i];
  }
}

template <int kRows, int kTerms>
void round_rows(const BandQueries& block, const RowScales& scales) {
  const PreparedQueries& q = block.q;
  const bool scaled = block.scaled != nullptr;
  const float* x[kRows];
  int8_t* out[kRows];
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    x[i] = scaled ? block.scaled_floats(i) : block.floats(i);
    out[i] = block.integers(i);
  }
  I sums[kRows];
  F float_sums[kRows];
  quantize_rows<kRows, kTerms>(x, block.band().channels, scales.inverse, out, sums);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) float_sums[i] = hn::ConvertTo(df, sums[i]);
  // At most 4063 * 256: integers that floats hold exactly.
  const D4 d4;
  const float middle = middle_of(block.band().bits);
  alignas(16) float offset[4];
  hn::Store(
      hn::Mul(hn::Mul(hn::Set(d4, -middle), reduce_rows<AddLanes>(float_sums)), hn::Load(d4, scales.scale)),
      d4, offset);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int at = block.b * q.rows + block.rows.row[i];
    q.scale[at] = scales.scale[i];
    q.offset[at] = offset[i];
    if (!scaled && block.layout.asymmetric) q.offset[at] += middle * q.q_sum[at];
  }
}

template <Fold kFold>
void measure_queries(const BandQueries& block, const ChannelFactors& factors, float* start, RowScales* out) {
  switch (block.rows.count) {
    case 1:
      return measure_rows<1, kFold>(block, factors, start, out);
    case 2:
      return measure_rows<2, kFold>(block, factors, start, out);
    case 3:
      return measure_rows<3, kFold>(block, factors, start, out);
    default:
      return measure_rows<4, kFold>(block, factors, start, out);
  }
}

void round_queries(const BandQueries& block, const RowScales& scales) {
  const bool two_terms = block.q.terms[block.b] == 2;
  switch (block.rows.count) {
    case 1:
      return two_terms ? round_rows<1, 2>(block, scales) : round_rows<1, 1>(block, scales);
    case 2:
      return two_terms ? round_rows<2, 2>(block, scales) : round_rows<2, 1>(block, scales);
    case 3:
      return two_terms ? round_rows<3, 2>(block, scales) : round_rows<3, 1>(block, scales);
    default:
      return two_terms ? round_rows<4, 2>(block, scales) : round_rows<4, 1>(block, scales);
  }
}

void prepare_queries(const TileLayout& layout, const float* q, int rows, PreparedQueries* out) {
  out->rows = rows;
  out->q = q;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = bands_of(layout)[b];
    for (int r = 0; r < rows; ++r) {
      const float* x = q + static_cast<size_t>(r) * layout.head_dim + band.first_channel;
      F sum = hn::Zero(df);
      for (int c = 0; c < band.channels; c += kLanes)
        sum = hn::Add(sum, lanes_from(x + c, band.channels - c));
      out->q_sum[b * rows + r] = sum_of(sum);
    }
    for (int r = 0; !layout.channel_scale && r < rows; r += 4) {
      const BandQueries block = {
          layout, *out, b, {rows - r < 4 ? rows - r : 4, {r, r + 1, r + 2, r + 3}}, nullptr};
      RowScales scales;
      measure_queries<Fold::kNone>(block, {}, nullptr, &scales);
      round_queries(block, scales);
    }
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

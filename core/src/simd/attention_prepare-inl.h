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

template <bool kScaled>
HWY_INLINE F scaled_lanes(const float* x, const float* scale, int count) {
  const F v = lanes_from(x, count);
  if constexpr (kScaled) return hn::Mul(v, load(scale));
  return v;
}

// Rounds `channels` floats times `scale` times `inverse` to integers, stores their terms and returns their
// sum per lane.
template <int kTerms, bool kScaled>
HWY_INLINE I quantize_row(const float* x, const float* scale, int channels, float inverse, int8_t* out) {
  I sum = hn::Zero(di);
  const F factor = set(inverse);
  int c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
    I v[4], rest[4];
    KVANT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int at = c + i * kLanes;
      v[i] = round_to_int(hn::Mul(scaled_lanes<kScaled>(x + at, scale + at, kLanes), factor));
      if constexpr (kTerms == 2) {
        const I hi = hn::ShiftRight<6>(hn::Add(v[i], hn::Set(di, 32)));
        rest[i] = hn::Sub(v[i], hn::ShiftLeft<6>(hi));
        v[i] = hi;
      }
    }
    const Bytes first = pack_signed(v);
    hn::StoreU(first, db, reinterpret_cast<uint8_t*>(out) + c);
    I added = sum_signed(first);
    if constexpr (kTerms == 2) {
      const Bytes second = pack_signed(rest);
      hn::StoreU(second, db, reinterpret_cast<uint8_t*>(out) + channels + c);
      added = hn::Add(hn::ShiftLeft<6>(added), sum_signed(second));
    }
    sum = hn::Add(sum, added);
  }
  for (; c < channels; c += kLanes) {
    const I v = round_to_int(hn::Mul(scaled_lanes<kScaled>(x + c, scale + c, channels - c), factor));
    sum = hn::Add(sum, v);
    if constexpr (kTerms == 2) {
      const I hi = hn::ShiftRight<6>(hn::Add(v, hn::Set(di, 32)));
      bytes_to(hi, out + c, channels - c);
      bytes_to(hn::Sub(v, hn::ShiftLeft<6>(hi)), out + channels + c, channels - c);
    } else {
      bytes_to(v, out + c, channels - c);
    }
  }
  return sum;
}

// Per lane: the largest magnitudes of kRows rows times the channels' scales, and the rows' products with the
// lows.
template <int kRows, Fold kFold>
HWY_INLINE void scan_rows(const float* const (&x)[kRows], const ChannelFactors& factors, int channels,
                          F (&amax)[kRows], F (&dot)[kRows]) {
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) amax[i] = dot[i] = hn::Zero(df);
  const auto step = [&](int c, int count) HWY_ATTR {
    F scale = set(1.0f), low = set(0.0f);
    if constexpr (kFold != Fold::kNone) scale = load(factors.scale + c);
    if constexpr (kFold == Fold::kScaleAndLow) low = load(factors.low + c);
    KVANT_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F v = lanes_from(x[i] + c, count);
      amax[i] = hn::Max(amax[i], hn::Abs(kFold == Fold::kNone ? v : hn::Mul(v, scale)));
      if constexpr (kFold == Fold::kScaleAndLow) dot[i] = hn::MulAdd(v, low, dot[i]);
    }
  };
  int c = 0;
  for (; c + kLanes <= channels; c += kLanes) step(c, kLanes);
  if (c < channels) step(c, channels - c);
}

// Quantizes band b of kRows rows; start[i], unless null, gets their products with the lows added.
template <int kRows, Fold kFold>
void quantize_query_rows(const TileLayout& layout, int b, const int* row, const ChannelFactors& head,
                         const PreparedQueries& q, float* start) {
  constexpr bool kScaled = kFold != Fold::kNone;
  const BandLayout& band = bands_of(layout)[b];
  const int channels = band.channels;
  ChannelFactors factors = head;
  if constexpr (kScaled) factors.scale += band.first_channel;
  if constexpr (kFold == Fold::kScaleAndLow) factors.low += band.first_channel;
  const float* x[kRows];
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    x[i] = q.q + static_cast<size_t>(row[i]) * layout.head_dim + band.first_channel;
  }
  F amax[kRows], dot[kRows], sums[kRows];
  scan_rows<kRows, kFold>(x, factors, channels, amax, dot);
  const bool two_terms = q.terms[b] == 2;
  const RowScales scales =
      row_scales(reduce_rows<MaxLanes>(amax), two_terms ? kQueryMaxTwoTerms : kQueryMaxOneTerm);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int8_t* out = q.q8 + q.band_offset[b] + static_cast<size_t>(row[i]) * q.terms[b] * channels;
    const I sum = two_terms ? quantize_row<2, kScaled>(x[i], factors.scale, channels, scales.inverse[i], out)
                            : quantize_row<1, kScaled>(x[i], factors.scale, channels, scales.inverse[i], out);
    sums[i] = hn::ConvertTo(df, sum);
  }
  // At most 4063 * 256: integers that floats hold exactly.
  alignas(16) float sum[4], product[4];
  hn::Store(reduce_rows<AddLanes>(sums), D4(), sum);
  if constexpr (kFold == Fold::kScaleAndLow) hn::Store(reduce_rows<AddLanes>(dot), D4(), product);
  const float middle = middle_of(band.bits);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int at = b * q.rows + row[i];
    q.scale[at] = scales.scale[i];
    q.offset[at] = -middle * sum[i] * scales.scale[i];
    if constexpr (kFold == Fold::kScaleAndLow) start[i] += product[i];
    if (!kScaled && layout.asymmetric) q.offset[at] += middle * q.q_sum[at];
  }
}

template <Fold kFold>
void quantize_queries(const TileLayout& layout, int b, const QueryRows& rows, const ChannelFactors& head,
                      const PreparedQueries& q, float* start) {
  switch (rows.count) {
    case 1:
      return quantize_query_rows<1, kFold>(layout, b, rows.row, head, q, start);
    case 2:
      return quantize_query_rows<2, kFold>(layout, b, rows.row, head, q, start);
    case 3:
      return quantize_query_rows<3, kFold>(layout, b, rows.row, head, q, start);
    default:
      return quantize_query_rows<4, kFold>(layout, b, rows.row, head, q, start);
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
      const QueryRows block = {rows - r < 4 ? rows - r : 4, {r, r + 1, r + 2, r + 3}};
      quantize_queries<Fold::kNone>(layout, b, block, {}, *out, nullptr);
    }
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

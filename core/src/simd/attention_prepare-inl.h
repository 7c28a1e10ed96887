// Queries in integers: included by the ISA files after attention_dot-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Up to four rows of queries.
struct QueryRows {
  int count;
  int row[4];
};

// Rounds `channels` floats times `inverse` to integers, stores their terms and returns their sum per lane.
template <int kTerms>
HWY_INLINE I quantize_row(const float* x, int channels, float inverse, int8_t* out) {
  I sum = hn::Zero(di);
  const F factor = set(inverse);
  int c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
    I v[4], rest[4];
    KVANT_UNROLL
    for (int i = 0; i < 4; ++i) {
      v[i] = round_to_int(hn::Mul(load(x + c + i * kLanes), factor));
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
    const I v = round_to_int(hn::Mul(load(x + c), factor));
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

// Quantizes band b of kRows rows, times `channel_scale` (of the whole head) unless null.
template <int kRows>
void quantize_query_rows(const TileLayout& layout, int b, const int* row, const float* channel_scale,
                         const PreparedQueries& q) {
  const BandLayout& band = bands_of(layout)[b];
  const int channels = band.channels;
  alignas(64) float scaled[kRows][kMaxHeadDim + kLanes];
  const float* x[kRows];
  F amax[kRows], exact[kRows], sums[kRows];
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    x[i] = q.q + static_cast<size_t>(row[i]) * layout.head_dim + band.first_channel;
    amax[i] = exact[i] = hn::Zero(df);
  }
  for (int c = 0; c < channels; c += kLanes) {
    const F scale = channel_scale != nullptr ? load(channel_scale + band.first_channel + c) : set(1.0f);
    KVANT_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F v = hn::Mul(lanes_from(x[i] + c, channels - c), scale);
      store(v, scaled[i] + c);
      amax[i] = hn::Max(amax[i], hn::Abs(v));
      exact[i] = hn::Add(exact[i], v);
    }
  }
  const bool two_terms = q.terms[b] == 2;
  const RowScales scales =
      row_scales(reduce_rows<MaxLanes>(amax), two_terms ? kQueryMaxTwoTerms : kQueryMaxOneTerm);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int8_t* out = q.q8 + q.band_offset[b] + static_cast<size_t>(row[i]) * q.terms[b] * channels;
    const I sum = two_terms ? quantize_row<2>(scaled[i], channels, scales.inverse[i], out)
                            : quantize_row<1>(scaled[i], channels, scales.inverse[i], out);
    sums[i] = hn::ConvertTo(df, sum);
  }
  // At most 4063 * 256: integers that floats hold exactly.
  alignas(16) float sum[4], exact_sum[4] = {};
  hn::Store(reduce_rows<AddLanes>(sums), D4(), sum);
  if (layout.asymmetric) hn::Store(reduce_rows<AddLanes>(exact), D4(), exact_sum);
  const float middle = middle_of(band.bits);
  KVANT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int at = b * q.rows + row[i];
    q.scale[at] = scales.scale[i];
    q.offset[at] = -middle * sum[i] * scales.scale[i];
    if (layout.asymmetric) q.offset[at] += middle * exact_sum[i];
  }
}

void quantize_queries(const TileLayout& layout, int b, const QueryRows& rows, const float* channel_scale,
                      const PreparedQueries& q) {
  switch (rows.count) {
    case 1:
      return quantize_query_rows<1>(layout, b, rows.row, channel_scale, q);
    case 2:
      return quantize_query_rows<2>(layout, b, rows.row, channel_scale, q);
    case 3:
      return quantize_query_rows<3>(layout, b, rows.row, channel_scale, q);
    default:
      return quantize_query_rows<4>(layout, b, rows.row, channel_scale, q);
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
      quantize_queries(layout, b, block, nullptr, *out);
    }
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

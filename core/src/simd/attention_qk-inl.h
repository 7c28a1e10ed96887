// Scores of quantized keys: included by the ISA files after attention_dot-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Quantizes band.channels floats of one row, times `channel_scale` unless null.
void quantize_query(const TileLayout& layout, int b, int r, const float* x, const float* channel_scale,
                    const PreparedQueries& q) {
  const BandLayout& band = bands_of(layout)[b];
  const int channels = band.channels;
  const bool two_terms = q.terms[b] == 2;
  int8_t* out = q.q8 + q.band_offset[b] + static_cast<size_t>(r) * q.terms[b] * channels;
  float scaled[kMaxHeadDim + kLanes];
  F amax_lanes = hn::Zero(df);
  for (int c = 0; c < channels; c += kLanes) {
    F v = lanes_from(x + c, channels - c);
    if (channel_scale != nullptr) v = hn::Mul(v, lanes_from(channel_scale + c, channels - c));
    store(v, scaled + c);
    amax_lanes = hn::Max(amax_lanes, hn::Abs(v));
  }
  const float amax = max_of(amax_lanes);
  const float largest = two_terms ? kQueryMaxTwoTerms : kQueryMaxOneTerm;
  const bool zero = amax < kQuantizeFloor;
  const F inverse = set(zero ? 0.0f : largest / amax);
  const float scale = zero ? 0.0f : amax / largest;
  I sum = hn::Zero(di);
  for (int c = 0; c < channels; c += kLanes) {
    const I v = hn::NearestInt(hn::Mul(load(scaled + c), inverse));
    sum = hn::Add(sum, v);
    if (two_terms) {
      const I hi = hn::ShiftRight<6>(hn::Add(v, hn::Set(di, 32)));
      bytes_to(hi, out + c, channels - c);
      bytes_to(hn::Sub(v, hn::ShiftLeft<6>(hi)), out + channels + c, channels - c);
    } else {
      bytes_to(v, out + c, channels - c);
    }
  }
  q.scale[b * q.rows + r] = scale;
  q.offset[b * q.rows + r] = -mid_of(layout, band.bits) * static_cast<float>(sum_of(sum)) * scale;
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
      if (!layout.channel_scale) quantize_query(layout, b, r, x, nullptr, *out);
    }
  }
}

// Up to four rows of one band.
struct KeyBlock {
  Planes planes;
  int octets;                // channels / 8
  const float* token_scale;  // [64]
  const float* token_low;    // [64] or null
  const int8_t* q8[4];       // per row; a second term follows `channels` bytes later
  float scale[4];
  float offset[4];
  float q_sum[4];
  float* logits[4];
};

// One channel quad (half kHalf of an octet) of groups kGroup.. of 16 tokens.
template <int kFormat, int kTermRows, int kGroups, int kHalf, int kGroup>
HWY_INLINE void key_quad(const Planes& planes, const int8_t* const* q, int o,
                         Partial (&sum)[kTermRows][kGroups]) {
  Bytes k[kGroups];
  k[0] = codes<kFormat, 4 * kHalf + kGroup>(planes);
  k[1] = codes<kFormat, 4 * kHalf + kGroup + 1>(planes);
  if constexpr (kGroups == 4) {
    k[2] = codes<kFormat, 4 * kHalf + kGroup + 2>(planes);
    k[3] = codes<kFormat, 4 * kHalf + kGroup + 3>(planes);
  }
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    const Bytes b = quad(q[r] + 8 * o + 4 * kHalf);
    KVANT_UNROLL
    for (int g = 0; g < kGroups; ++g) sum[r][g] = dot_step(sum[r][g], k[g], b);
  }
}

// Integer sums over all channels of the band for kGroups vectors of tokens.
template <int kFormat, int kWidth, int kTermRows, int kGroups, int kGroup>
HWY_INLINE void key_sums(Planes planes, int octets, const int8_t* const* q, I (&total)[kTermRows][kGroups]) {
  constexpr int kSteps = kDirectDot ? 1 << 20 : kKeyStepsIn16Bits[kWidth];
  Partial sum[kTermRows][kGroups];
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    KVANT_UNROLL
    for (int g = 0; g < kGroups; ++g) total[r][g] = hn::Zero(di);
  }
  for (int o = 0; o < octets;) {
    const int end = kSteps / 2 >= octets - o ? octets : o + (kSteps > 1 ? kSteps / 2 : 1);
    clear(sum);
    for (; o < end; ++o) {
      key_quad<kFormat, kTermRows, kGroups, 0, kGroup>(planes, q, o, sum);
      if constexpr (kSteps == 1) {
        fold_all(sum, total);
        clear(sum);
      }
      key_quad<kFormat, kTermRows, kGroups, 1, kGroup>(planes, q, o, sum);
      planes = advance<kFormat>(planes, 1);
    }
    fold_all(sum, total);
  }
}

// logits += scales * sums for the tokens of kGroups vectors, the first at token t.
template <int kRows, int kTerms, int kGroups>
HWY_INLINE void add_scores(const KeyBlock& block, int t, const I (&total)[kRows * kTerms][kGroups]) {
  KVANT_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int token = t + 16 * g;
    const F token_scale = load(block.token_scale + token);
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      I sum = total[r * kTerms][g];
      if constexpr (kTerms == 2) sum = hn::Add(hn::ShiftLeft<6>(sum), total[r * kTerms + kTerms - 1][g]);
      const F dot = hn::MulAdd(hn::ConvertTo(df, sum), set(block.scale[r]), set(block.offset[r]));
      F logit = hn::MulAdd(dot, token_scale, load(block.logits[r] + token));
      if (block.token_low != nullptr) {
        logit = hn::MulAdd(set(block.q_sum[r]), load(block.token_low + token), logit);
      }
      store(logit, block.logits[r] + token);
    }
  }
}

template <int kFormat, int kWidth, int kRows, int kGroups, int kGroup>
HWY_INLINE void key_slice(const KeyBlock& block, int byte) {
  constexpr int kTerms = kWidth >= kTwoTermBits ? 2 : 1;
  const int8_t* q[kRows * kTerms];
  for (int i = 0; i < kRows * kTerms; ++i) {
    q[i] = block.q8[i / kTerms] + (i % kTerms) * 8 * block.octets;
  }
  I total[kRows * kTerms][kGroups];
  key_sums<kFormat, kWidth, kRows * kTerms, kGroups, kGroup>(move_bytes<kFormat>(block.planes, byte),
                                                             block.octets, q, total);
  add_scores<kRows, kTerms, kGroups>(block, 16 * kGroup + byte / 4, total);
}

template <int kFormat, int kWidth, int kRows>
void key_block(const KeyBlock& block) {
  if constexpr (kLanes == 16) {
    key_slice<kFormat, kWidth, kRows, 4, 0>(block, 0);
  } else {
    for (int byte = 0; byte < 64; byte += 4 * kLanes) {
      key_slice<kFormat, kWidth, kRows, 2, 0>(block, byte);
      key_slice<kFormat, kWidth, kRows, 2, 2>(block, byte);
    }
  }
}

using KeyBlockFunction = void (*)(const KeyBlock&);

template <int kFormat, int kWidth>
HWY_INLINE KeyBlockFunction key_block_of_rows(int rows) {
  if constexpr (kWidth >= kTwoTermBits) {
    return rows == 1 ? key_block<kFormat, kWidth, 1> : key_block<kFormat, kWidth, 2>;
  } else {
    switch (rows) {
      case 1:
        return key_block<kFormat, kWidth, 1>;
      case 2:
        return key_block<kFormat, kWidth, 2>;
      case 3:
        return key_block<kFormat, kWidth, 3>;
      default:
        return key_block<kFormat, kWidth, 4>;
    }
  }
}

KeyBlockFunction key_block_function(int bits, bool unpacked, int rows) {
  switch (bits) {
    case 2:
      return unpacked ? key_block_of_rows<kUnpacked, 2>(rows) : key_block_of_rows<2, 2>(rows);
    case 3:
      return unpacked ? key_block_of_rows<kUnpacked, 3>(rows) : key_block_of_rows<3, 3>(rows);
    case 4:
      return unpacked ? key_block_of_rows<kUnpacked, 4>(rows) : key_block_of_rows<4, 4>(rows);
    case 5:
      return unpacked ? key_block_of_rows<kUnpacked, 5>(rows) : key_block_of_rows<5, 5>(rows);
    case 6:
      return unpacked ? key_block_of_rows<kUnpacked, 6>(rows) : key_block_of_rows<6, 6>(rows);
    case 7:
      return unpacked ? key_block_of_rows<kUnpacked, 7>(rows) : key_block_of_rows<7, 7>(rows);
    default:
      return key_block_of_rows<kUnpacked, 8>(rows);
  }
}

void qk_band(const TileLayout& layout, int b, const std::byte* tile, const PreparedQueries& q,
             const LiveRows& live, float* logits) {
  const BandLayout& band = bands_of(layout)[b];
  alignas(64) uint8_t unpacked_codes[kMaxHeadDim * kPageTokens];
  alignas(64) float token_scale[kPageTokens];
  alignas(64) float token_low[kPageTokens];
  KeyBlock block;
  block.octets = band.channels / 8;
  block.planes = planes_of(band, tile);
  const bool unpacked = live.count > kUnpackRows && band.bits != 8;
  if (unpacked) {
    unpack_band(band, tile, block.octets, unpacked_codes);
    block.planes.p[0] = unpacked_codes;
  }
  expand_token_scales(layout, band, tile, token_scale);
  block.token_scale = token_scale;
  block.token_low = nullptr;
  if (has_token_low(layout)) {
    expand_token_lows(band, tile, token_low);
    block.token_low = token_low;
  }
  const int per_block = rows_per_block(band.bits);
  for (int first = 0; first < live.count; first += per_block) {
    const int rows = live.count - first < per_block ? live.count - first : per_block;
    for (int i = 0; i < rows; ++i) {
      const int r = live.row[first + i];
      block.q8[i] = q.q8 + q.band_offset[b] + static_cast<size_t>(r) * q.terms[b] * band.channels;
      block.scale[i] = q.scale[b * q.rows + r];
      block.offset[i] = q.offset[b * q.rows + r];
      block.q_sum[i] = q.q_sum[b * q.rows + r];
      block.logits[i] = logits + static_cast<size_t>(r) * kPageTokens;
    }
    key_block_function(band.bits, unpacked, rows)(block);
  }
}

float dot_floats(const float* a, const float* b, int n) {
  F sum = hn::Zero(df);
  for (int c = 0; c < n; c += kLanes)
    sum = hn::MulAdd(lanes_from(a + c, n - c), lanes_from(b + c, n - c), sum);
  return sum_of(sum);
}

void qk_tile(const TileLayout& layout, const std::byte* tile, const PreparedQueries& q, const float* base,
             const uint64_t* live, float* logits) {
  LiveRows live_rows;
  find_live_rows(live, q.rows, &live_rows);
  alignas(64) float channel_scale[kMaxHeadDim + kLanes];
  alignas(64) float channel_centre[kMaxHeadDim + kLanes];
  if (layout.channel_scale) expand_channel_scales(layout, tile, channel_scale);
  if (layout.channel_centre) expand_channel_centres(layout, tile, channel_centre);
  for (int i = 0; i < live_rows.count; ++i) {
    const int r = live_rows.row[i];
    const float* x = q.q + static_cast<size_t>(r) * layout.head_dim;
    float start = base[r];
    if (layout.channel_centre) start += dot_floats(x, channel_centre, layout.head_dim);
    for (int t = 0; t < kPageTokens; t += kLanes) store(set(start), logits + r * kPageTokens + t);
    for (int b = 0; layout.channel_scale && b < layout.n_bands; ++b) {
      const int first = bands_of(layout)[b].first_channel;
      quantize_query(layout, b, r, x + first, channel_scale + first, q);
    }
  }
  for (int b = 0; b < layout.n_bands; ++b) qk_band(layout, b, tile, q, live_rows, logits);
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

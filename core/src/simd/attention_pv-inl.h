// Weighted sums of quantized values: included by the ISA files after attention_dot-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Up to four rows of one band.
struct ValueBlock {
  Planes planes;
  int channels;                 // of the band, padding excluded
  const float* channel_scale;   // [channels] or null
  const float* channel_centre;  // [channels] or null
  const uint8_t* weights[4];    // per row: 64 bytes for each term
  float factor[4];
  float shift[4];
  float weight_sum[4];
  float* acc[4];  // at the band's first channel
};

template <int kWidth>
HWY_INLINE Partial value_dot(Partial sum, Bytes weights, Bytes values) {
  // 8-bit codes fill a byte, so they take the unsigned side and 6-bit weights the signed one.
  if constexpr (kWidth >= kTwoTermBits) return dot_step(sum, values, weights);
  return dot_step(sum, weights, values);
}

// Token quad kElement of an octet, for kVectors vectors of channels `vector_bytes` apart in each plane per
// bit.
template <int kFormat, int kWidth, int kTermRows, int kVectors, int kElement>
HWY_INLINE void value_quad(const Planes (&planes)[kVectors], const uint8_t* const* weights, int o,
                           Partial (&sum)[kTermRows][kVectors], I (&total)[kTermRows][kVectors]) {
  Bytes v[kVectors];
  KVANT_UNROLL
  for (int i = 0; i < kVectors; ++i) v[i] = codes<kFormat, kElement>(planes[i]);
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    const Bytes w = quad(weights[r] + 32 * o + 4 * kElement);
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) sum[r][i] = value_dot<kWidth>(sum[r][i], w, v[i]);
  }
  constexpr int kSteps = kDirectDot ? 1 << 20 : kValueStepsIn16Bits[kWidth];
  if constexpr ((kElement + 1) % kSteps == 0 || (!kDirectDot && kElement == 7)) {
    fold_all(sum, total);
    clear(sum);
  }
}

template <int kFormat, int kWidth, int kTermRows, int kVectors>
HWY_INLINE void value_sums(Planes (&planes)[kVectors], const uint8_t* const* weights,
                           I (&total)[kTermRows][kVectors]) {
  Partial sum[kTermRows][kVectors];
  clear(sum);
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) total[r][i] = hn::Zero(di);
  }
  for (int o = 0; o < 2; ++o) {
    value_quad<kFormat, kWidth, kTermRows, kVectors, 0>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 1>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 2>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 3>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 4>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 5>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 6>(planes, weights, o, sum, total);
    value_quad<kFormat, kWidth, kTermRows, kVectors, 7>(planes, weights, o, sum, total);
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) planes[i] = advance<kFormat>(planes[i], 1);
  }
  if constexpr (kDirectDot) fold_all(sum, total);
}

// acc of row r, channels c.. (`count` of them valid) += what `sum` stands for.
HWY_INLINE void add_values(const ValueBlock& block, int r, int c, int count, I sum) {
  F x = hn::MulAdd(hn::ConvertTo(df, sum), set(block.factor[r]), set(block.shift[r]));
  F acc = lanes_from(block.acc[r] + c, count);
  if (block.channel_centre != nullptr) {
    acc = hn::MulAdd(load(block.channel_centre + c), set(block.weight_sum[r]), acc);
  }
  acc = block.channel_scale != nullptr ? hn::MulAdd(x, load(block.channel_scale + c), acc) : hn::Add(acc, x);
  lanes_to(acc, block.acc[r] + c, count);
}

// kVectors vectors of channels from channel c on.
template <int kFormat, int kWidth, int kRows, int kVectors>
HWY_INLINE void value_vectors(const ValueBlock& block, int c) {
  constexpr int kTerms = kWidth >= kTwoTermBits ? 2 : 1;
  const uint8_t* weights[kRows * kTerms];
  for (int i = 0; i < kRows * kTerms; ++i) weights[i] = block.weights[i / kTerms] + i % kTerms * kPageTokens;
  Planes planes[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const int channel = c + i * kLanes;
    planes[i] = move_bytes<kFormat>(advance<kFormat>(block.planes, channel / 16 * 2), channel % 16 * 4);
  }
  I total[kRows * kTerms][kVectors];
  value_sums<kFormat, kWidth, kRows * kTerms, kVectors>(planes, weights, total);
  KVANT_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int channel = c + i * kLanes;
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      I sum = total[r * kTerms][i];
      if constexpr (kTerms == 2) sum = hn::Add(hn::ShiftLeft<6>(sum), total[r * kTerms + kTerms - 1][i]);
      add_values(block, r, channel, block.channels - channel, sum);
    }
  }
}

template <int kFormat, int kWidth, int kRows>
void value_block(const ValueBlock& block) {
  int c = 0;
  for (; c + kLanes < block.channels; c += 2 * kLanes) value_vectors<kFormat, kWidth, kRows, 2>(block, c);
  if (c < block.channels) value_vectors<kFormat, kWidth, kRows, 1>(block, c);
}

using ValueBlockFunction = void (*)(const ValueBlock&);

template <int kFormat, int kWidth>
HWY_INLINE ValueBlockFunction value_block_of_rows(int rows) {
  if constexpr (kWidth >= kTwoTermBits) {
    return rows == 1 ? value_block<kFormat, kWidth, 1> : value_block<kFormat, kWidth, 2>;
  } else {
    switch (rows) {
      case 1:
        return value_block<kFormat, kWidth, 1>;
      case 2:
        return value_block<kFormat, kWidth, 2>;
      case 3:
        return value_block<kFormat, kWidth, 3>;
      default:
        return value_block<kFormat, kWidth, 4>;
    }
  }
}

ValueBlockFunction value_block_function(int bits, bool unpacked, int rows) {
  switch (bits) {
    case 2:
      return unpacked ? value_block_of_rows<kUnpacked, 2>(rows) : value_block_of_rows<2, 2>(rows);
    case 3:
      return unpacked ? value_block_of_rows<kUnpacked, 3>(rows) : value_block_of_rows<3, 3>(rows);
    case 4:
      return unpacked ? value_block_of_rows<kUnpacked, 4>(rows) : value_block_of_rows<4, 4>(rows);
    case 5:
      return unpacked ? value_block_of_rows<kUnpacked, 5>(rows) : value_block_of_rows<5, 5>(rows);
    case 6:
      return unpacked ? value_block_of_rows<kUnpacked, 6>(rows) : value_block_of_rows<6, 6>(rows);
    case 7:
      return unpacked ? value_block_of_rows<kUnpacked, 7>(rows) : value_block_of_rows<7, 7>(rows);
    default:
      return value_block_of_rows<kUnpacked, 8>(rows);
  }
}

struct WeightScale {
  float factor;  // weight * token scale ~ factor * integer
  float shift;   // -mid * factor * sum of integers
};

// Quantizes 64 weights times token scales into bytes (one term) or two terms of 64 bytes each.
HWY_INLINE WeightScale quantize_weights(const float* w, const float* token_scale, bool two_terms, float mid,
                                        uint8_t* out) {
  F scaled[kTokenVectors];
  F max_lanes = hn::Zero(df);
  KVANT_UNROLL
  for (int i = 0; i < kTokenVectors; ++i) {
    scaled[i] = hn::Mul(load(w + i * kLanes), load(token_scale + i * kLanes));
    max_lanes = hn::Max(max_lanes, scaled[i]);
  }
  const float max = max_of(max_lanes);
  const float largest = two_terms ? kWeightMaxTwoTerms : kWeightMaxOneTerm;
  const bool zero = max < kQuantizeFloor;
  const F inverse = set(zero ? 0.0f : largest / max);
  const float factor = zero ? 0.0f : max / largest;
  I sum = hn::Zero(di);
  KVANT_UNROLL
  for (int i = 0; i < kTokenVectors; ++i) {
    const I v = hn::NearestInt(hn::Mul(scaled[i], inverse));
    sum = hn::Add(sum, v);
    if (two_terms) {
      bytes_to(hn::ShiftRight<6>(v), out + i * kLanes, kLanes);
      bytes_to(hn::And(v, hn::Set(di, 63)), out + kPageTokens + i * kLanes, kLanes);
    } else {
      bytes_to(v, out + i * kLanes, kLanes);
    }
  }
  return {factor, -mid * static_cast<float>(sum_of(sum)) * factor};
}

HWY_INLINE float weighted_lows(const float* w, const float* token_low) {
  F sum = hn::Zero(df);
  for (int i = 0; i < kPageTokens; i += kLanes) sum = hn::MulAdd(load(w + i), load(token_low + i), sum);
  return sum_of(sum);
}

struct ValueBandInput {
  const float* channel_scale;
  const float* channel_centre;
  const float* weights;
  const float* weight_sum;  // per row; valid with channel_centre
  float* acc;
  std::byte* workspace;
};

void pv_band(const TileLayout& layout, int b, const std::byte* tile, const LiveRows& live,
             const ValueBandInput& in) {
  const BandLayout& band = bands_of(layout)[b];
  const bool two_terms = band.bits >= kTwoTermBits;
  const int groups = band.stored_channels / 16;
  ValueBlock block;
  block.channels = band.channels;
  block.planes = planes_of(band, tile);
  block.channel_scale = in.channel_scale == nullptr ? nullptr : in.channel_scale + band.first_channel;
  block.channel_centre = in.channel_centre == nullptr ? nullptr : in.channel_centre + band.first_channel;
  uint8_t* quantized = reinterpret_cast<uint8_t*>(in.workspace);
  const bool unpacked = live.count > kUnpackRows && band.bits != 8;
  if (unpacked) {
    unpack_band(band, tile, groups * 2, quantized);
    block.planes.p[0] = quantized;
    quantized += band.stored_channels * kPageTokens;
  }
  alignas(64) float token_scale[kPageTokens];
  alignas(64) float token_low[kPageTokens];
  expand_token_scales(layout, band, tile, token_scale);
  if (has_token_low(layout)) expand_token_lows(band, tile, token_low);
  const int per_block = rows_per_block(band.bits);
  const float mid = mid_of(layout, band.bits);
  for (int first = 0; first < live.count; first += per_block) {
    const int rows = live.count - first < per_block ? live.count - first : per_block;
    for (int i = 0; i < rows; ++i) {
      const int r = live.row[first + i];
      const float* w = in.weights + static_cast<size_t>(r) * kPageTokens;
      uint8_t* out = quantized + i * 2 * kPageTokens;
      const WeightScale scale = quantize_weights(w, token_scale, two_terms, mid, out);
      block.weights[i] = out;
      block.factor[i] = scale.factor;
      block.shift[i] = scale.shift;
      if (has_token_low(layout)) block.shift[i] += weighted_lows(w, token_low);
      block.weight_sum[i] = in.weight_sum[r];
      block.acc[i] = in.acc + static_cast<size_t>(r) * layout.head_dim + band.first_channel;
    }
    value_block_function(band.bits, unpacked, rows)(block);
  }
}

void pv_tile(const TileLayout& layout, const std::byte* tile, const float* weights, int rows,
             const uint64_t* live, float* acc, std::byte* workspace) {
  LiveRows live_rows;
  find_live_rows(live, rows, &live_rows);
  alignas(64) float channel_scale[kMaxHeadDim + kLanes];
  alignas(64) float channel_centre[kMaxHeadDim + kLanes];
  float weight_sum[kMaxRows];
  ValueBandInput in = {nullptr, nullptr, weights, weight_sum, acc, workspace};
  if (layout.channel_scale) {
    expand_channel_scales(layout, tile, channel_scale);
    in.channel_scale = channel_scale;
  }
  if (layout.channel_centre) {
    expand_channel_centres(layout, tile, channel_centre);
    in.channel_centre = channel_centre;
  }
  for (int i = 0; i < live_rows.count; ++i) {
    const int r = live_rows.row[i];
    weight_sum[r] = 0.0f;
    if (!layout.channel_centre) continue;
    F sum = hn::Zero(df);
    for (int t = 0; t < kPageTokens; t += kLanes) sum = hn::Add(sum, load(weights + r * kPageTokens + t));
    weight_sum[r] = sum_of(sum);
  }
  for (int b = 0; b < layout.n_bands; ++b) pv_band(layout, b, tile, live_rows, in);
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

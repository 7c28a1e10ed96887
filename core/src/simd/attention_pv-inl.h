// Products of weights with quantized values: included by the ISA files after attention_dot-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Up to four rows of one band.
struct ValueBlock {
  const Planes* planes;
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

// Codes of token quads kElement.. of an octet, for kVectors vectors of channels.
template <int kFormat, int kVectors, int kElement, int kQuads, int kQuad = 0>
HWY_INLINE void value_codes(const Planes (&planes)[kVectors], Bytes (&v)[kQuads][kVectors]) {
  KVANT_UNROLL
  for (int i = 0; i < kVectors; ++i) v[kQuad][i] = codes<kFormat, kElement + kQuad>(planes[i]);
  if constexpr (kQuad + 1 < kQuads) value_codes<kFormat, kVectors, kElement, kQuads, kQuad + 1>(planes, v);
}

// Token quads whose products one partial sum holds.
template <int kWidth>
constexpr int value_run() {
  if (kDirectDot) return 1;
  return kValueStepsIn16Bits[kWidth] < 8 ? kValueStepsIn16Bits[kWidth] : 8;
}

// An octet of token quads from kElement on.
template <int kFormat, int kWidth, int kTermRows, int kVectors, int kElement = 0>
HWY_INLINE void value_octet(const Planes (&planes)[kVectors], const uint8_t* const* weights, int o,
                            I (&total)[kTermRows][kVectors]) {
  constexpr int kRun = value_run<kWidth>();
  Bytes v[kRun][kVectors];
  value_codes<kFormat, kVectors, kElement, kRun>(planes, v);
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    const uint8_t* w = weights[r] + 32 * o + 4 * kElement;
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kDirectDot) {
        total[r][i] = value_dot<kWidth>(total[r][i], quad(w), v[0][i]);
      } else {
        Partial sum = hn::Zero(hn::DFromV<Partial>());
        KVANT_UNROLL
        for (int s = 0; s < kRun; ++s) sum = value_dot<kWidth>(sum, quad(w + 4 * s), v[s][i]);
        total[r][i] = fold(total[r][i], sum);
      }
    }
  }
  if constexpr (kElement + kRun < 8) {
    value_octet<kFormat, kWidth, kTermRows, kVectors, kElement + kRun>(planes, weights, o, total);
  }
}

template <int kFormat, int kWidth, int kTermRows, int kVectors>
HWY_INLINE void value_sums(Planes (&planes)[kVectors], const uint8_t* const* weights,
                           I (&total)[kTermRows][kVectors]) {
  clear(total);
  for (int o = 0; o < 2; ++o) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) prefetch_octet<kFormat>(planes[i]);
    value_octet<kFormat, kWidth, kTermRows, kVectors>(planes, weights, o, total);
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) planes[i] = advance<kFormat>(planes[i], 1);
  }
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
    planes[i] = move_bytes<kFormat>(advance<kFormat>(*block.planes, channel / 16 * 2), channel % 16 * 4);
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
  // Two vectors share the broadcast weights. With 16 registers, long runs of codes leave room for one.
  int c = 0;
  if constexpr (value_run<kWidth>() <= 2) {
    for (; c + kLanes < block.channels; c += 2 * kLanes) value_vectors<kFormat, kWidth, kRows, 2>(block, c);
  }
  for (; c < block.channels; c += kLanes) value_vectors<kFormat, kWidth, kRows, 1>(block, c);
}

using ValueBlockFunction = void (*)(const ValueBlock&);

template <int kFormat, int kWidth>
HWY_INLINE ValueBlockFunction value_block_of_rows(int rows) {
  if constexpr (kWidth >= kTwoTermBits && kTwoTermRows == 2) {
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

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

// Attention over rows of floats, binary16 or bfloat16: included by the ISA files after attention-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Element types of rows. `load_lanes` reads `count` >= 8 channels of a vector, the rest is 0.
struct FloatRows {
  using Element = float;
  static HWY_INLINE F load_lanes(const float* p, int count) { return lanes_from(p, count); }
};
struct HalfRows {
  using Element = uint16_t;
  static HWY_INLINE F load_lanes(const uint16_t* p, int count) {
#if KVANT_AVX512
    if (count < kLanes)
      return F{_mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#else
    (void)count;
#endif
    return halves_to_floats(p);
  }
};
struct Bf16Rows {
  using Element = uint16_t;
  static HWY_INLINE F load_lanes(const uint16_t* p, int count) {
#if KVANT_AVX512
    if (count < kLanes) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return F{
          _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_zextsi128_si256(half)), 16))};
    }
#else
    (void)count;
#endif
    const U w = hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, DU>(), p));
    return hn::BitCast(df, hn::ShiftLeft<16>(w));
  }
};

// Rows from which a page is converted to floats once, instead of for each block of rows.
constexpr int kConvertRows = 16;

template <class Rows>
void convert_page(const typename Rows::Element* x, size_t stride, int count, int dim, float* out) {
  for (int t = 0; t < count; ++t) {
    for (int c = 0; c < dim; c += kLanes) {
      lanes_to(Rows::load_lanes(x + t * stride + c, dim - c), out + static_cast<size_t>(t) * dim + c,
               dim - c);
    }
  }
}

// Scores of four tokens for kRows rows: lanes are channels.
template <class Rows, int kRows>
HWY_INLINE void four_scores(const typename Rows::Element* const* k, const float* const* q, int dim,
                            float* const* logits, int t) {
  F sum[kRows][4];
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(df);
  }
  const auto step = [&](int c, int count) HWY_ATTR {
    F x[4];
    KVANT_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = Rows::load_lanes(k[i] + c, count);
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F y = lanes_from(q[r] + c, count);
      KVANT_UNROLL
      for (int i = 0; i < 4; ++i) sum[r][i] = hn::MulAdd(x[i], y, sum[r][i]);
    }
  };
  int c = 0;
  for (; c + kLanes <= dim; c += kLanes) step(c, kLanes);
  if (c < dim) step(c, dim - c);
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(reduce_four<AddLanes>(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), D4(), logits[r] + t);
  }
}

// The lines of a row of 16-bit words.
HWY_INLINE void prefetch_row(const uint16_t* row, int dim) {
  for (int c = 0; c < dim; c += 32) prefetch(row + c);
}
HWY_INLINE void prefetch_row(const float*, int) {}

// ahead: distance to the rows that will be read soon, 0: none.
template <class Rows, int kRows>
void score_rows(const typename Rows::Element* k, ptrdiff_t ahead, size_t stride, int count, int dim,
                const float* const* q, float* const* logits) {
  for (int t = 0; t < count; t += 4) {
    const typename Rows::Element* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = k + static_cast<size_t>(t + i < count ? t + i : count - 1) * stride;
    for (int i = 0; ahead != 0 && i < 4; ++i) prefetch_row(rows[i] + ahead, dim);
    four_scores<Rows, kRows>(rows, q, dim, logits, t);
  }
}

// 32 vector registers hold the sums of 4 rows x 4 tokens, 16 hold 2 x 4.
constexpr int kScoreRows = kLanes == 16 ? 4 : 2;

template <class Rows>
void qk_any(const typename Rows::Element* k, ptrdiff_t ahead, size_t stride, int count, int dim,
            const float* q, const LiveRows& live, float* logits) {
  for (int first = 0; first < live.count; first += kScoreRows) {
    const int rows = live.count - first < kScoreRows ? live.count - first : kScoreRows;
    const float* query[4];
    float* out[4];
    for (int i = 0; i < rows; ++i) {
      query[i] = q + static_cast<size_t>(live.row[first + i]) * dim;
      out[i] = logits + static_cast<size_t>(live.row[first + i]) * kPageTokens;
    }
    switch (rows) {
      case 1:
        score_rows<Rows, 1>(k, first == 0 ? ahead : 0, stride, count, dim, query, out);
        break;
      case 2:
        score_rows<Rows, 2>(k, first == 0 ? ahead : 0, stride, count, dim, query, out);
        break;
      case 3:
        score_rows<Rows, 3>(k, first == 0 ? ahead : 0, stride, count, dim, query, out);
        break;
      default:
        score_rows<Rows, 4>(k, first == 0 ? ahead : 0, stride, count, dim, query, out);
        break;
    }
  }
}

template <class Rows>
void qk_words(const uint16_t* k, ptrdiff_t ahead, size_t stride, int count, int dim, const float* q,
              const LiveRows& live, float* logits) {
  if (live.count < kConvertRows) return qk_any<Rows>(k, ahead, stride, count, dim, q, live, logits);
  alignas(64) float page[kPageTokens * kMaxHeadDim];
  convert_page<Rows>(k, stride, count, dim, page);
  qk_any<FloatRows>(page, 0, static_cast<size_t>(dim), count, dim, q, live, logits);
}

void qk_rows(const uint16_t* k, const uint16_t* next, size_t stride, int count, bool bf16, int head_dim,
             const float* q, int rows, const uint64_t* live, float* logits) {
  LiveRows live_rows;
  find_live_rows(live, rows, &live_rows);
  if (bf16) {
    qk_words<Bf16Rows>(k, next - k, stride, count, head_dim, q, live_rows, logits);
  } else {
    qk_words<HalfRows>(k, next - k, stride, count, head_dim, q, live_rows, logits);
  }
}

void qk_floats(const float* k, int count, int head_dim, const float* q, int rows, const uint64_t* live,
               float* logits) {
  LiveRows live_rows;
  find_live_rows(live, rows, &live_rows);
  qk_any<FloatRows>(k, 0, static_cast<size_t>(head_dim), count, head_dim, q, live_rows, logits);
}

// Tokens that some row sees. The others may hold anything, NaN included.
struct LiveTokens {
  int count = 0;
  uint8_t token[kPageTokens];
};
HWY_INLINE void find_live_tokens(const uint64_t* live, const LiveRows& rows, int count, LiveTokens* out) {
  uint64_t any = 0;
  for (int i = 0; i < rows.count; ++i) any |= live[rows.row[i]];
  out->count = 0;
  for (int t = 0; t < count; ++t) {
    if ((any >> t & 1) != 0) out->token[out->count++] = static_cast<uint8_t>(t);
  }
}

// kVectors vectors of channels from c on, of which `count` channels exist, for kRows rows: tokens are added
// one after the other.
template <class Rows, int kRows, int kVectors>
HWY_INLINE void add_tokens(const typename Rows::Element* v, ptrdiff_t ahead, size_t stride,
                           const LiveTokens& tokens, int c, int count, const float* const* weights,
                           float* const* acc) {
  F sum[kRows][kVectors];
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) sum[r][i] = lanes_from(acc[r] + c + i * kLanes, count - i * kLanes);
  }
  for (int n = 0; n < tokens.count; ++n) {
    const int t = tokens.token[n];
    if (ahead != 0) prefetch_row(v + static_cast<size_t>(t) * stride + c + ahead, kVectors * kLanes);
    F x[kVectors];
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      x[i] = Rows::load_lanes(v + static_cast<size_t>(t) * stride + c + i * kLanes, count - i * kLanes);
    }
    KVANT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F w = set(weights[r][t]);
      KVANT_UNROLL
      for (int i = 0; i < kVectors; ++i) sum[r][i] = hn::MulAdd(w, x[i], sum[r][i]);
    }
  }
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVANT_UNROLL
    for (int i = 0; i < kVectors; ++i) lanes_to(sum[r][i], acc[r] + c + i * kLanes, count - i * kLanes);
  }
}

template <class Rows, int kRows>
void value_rows(const typename Rows::Element* v, ptrdiff_t ahead, size_t stride, const LiveTokens& tokens,
                int dim, const float* const* weights, float* const* acc) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  int c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) {
    add_tokens<Rows, kRows, kVectors>(v, ahead, stride, tokens, c, kVectors * kLanes, weights, acc);
  }
  for (; c + kLanes <= dim; c += kLanes) {
    add_tokens<Rows, kRows, 1>(v, ahead, stride, tokens, c, kLanes, weights, acc);
  }
  if (c < dim) add_tokens<Rows, kRows, 1>(v, ahead, stride, tokens, c, dim - c, weights, acc);
}

template <class Rows>
void pv_any(const typename Rows::Element* v, ptrdiff_t ahead, size_t stride, const LiveTokens& tokens,
            int dim, const float* weights, const LiveRows& live, float* acc) {
  for (int first = 0; first < live.count; first += 4) {
    const int rows = live.count - first < 4 ? live.count - first : 4;
    const float* w[4];
    float* out[4];
    for (int i = 0; i < rows; ++i) {
      w[i] = weights + static_cast<size_t>(live.row[first + i]) * kPageTokens;
      out[i] = acc + static_cast<size_t>(live.row[first + i]) * dim;
    }
    switch (rows) {
      case 1:
        value_rows<Rows, 1>(v, first == 0 ? ahead : 0, stride, tokens, dim, w, out);
        break;
      case 2:
        value_rows<Rows, 2>(v, first == 0 ? ahead : 0, stride, tokens, dim, w, out);
        break;
      case 3:
        value_rows<Rows, 3>(v, first == 0 ? ahead : 0, stride, tokens, dim, w, out);
        break;
      default:
        value_rows<Rows, 4>(v, first == 0 ? ahead : 0, stride, tokens, dim, w, out);
        break;
    }
  }
}

template <class Rows>
void pv_words(const uint16_t* v, ptrdiff_t ahead, size_t stride, int count, const LiveTokens& tokens, int dim,
              const float* weights, const LiveRows& live, float* acc) {
  if (live.count < kConvertRows) return pv_any<Rows>(v, ahead, stride, tokens, dim, weights, live, acc);
  alignas(64) float page[kPageTokens * kMaxHeadDim];
  convert_page<Rows>(v, stride, count, dim, page);
  pv_any<FloatRows>(page, 0, static_cast<size_t>(dim), tokens, dim, weights, live, acc);
}

void pv_rows(const uint16_t* v, const uint16_t* next, size_t stride, int count, bool bf16, int value_dim,
             const float* weights, int rows, const uint64_t* live, float* acc) {
  LiveRows live_rows;
  find_live_rows(live, rows, &live_rows);
  LiveTokens tokens;
  find_live_tokens(live, live_rows, count, &tokens);
  if (bf16) {
    pv_words<Bf16Rows>(v, next - v, stride, count, tokens, value_dim, weights, live_rows, acc);
  } else {
    pv_words<HalfRows>(v, next - v, stride, count, tokens, value_dim, weights, live_rows, acc);
  }
}

void pv_floats(const float* v, int count, int value_dim, const float* weights, int rows, const uint64_t* live,
               float* acc) {
  LiveRows live_rows;
  find_live_rows(live, rows, &live_rows);
  LiveTokens tokens;
  find_live_tokens(live, live_rows, count, &tokens);
  pv_any<FloatRows>(v, 0, static_cast<size_t>(value_dim), tokens, value_dim, weights, live_rows, acc);
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

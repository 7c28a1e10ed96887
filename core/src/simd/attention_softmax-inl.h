// Online softmax and what it does to accumulators: included by the ISA files after attention-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// 2^(x - max) for x <= max, relative error below 3e-7; 0 below 2^kExp2Floor. max is an integer and x is cut
// into integer and rest before max is subtracted, so that another max gives the same bits times a power of
// two.
HWY_INLINE F exp2_below(F x, F max) {
  const F n = hn::Round(x);
  const F r = hn::Sub(x, n);
  F p = hn::MulAdd(set(kExp2C5), r, set(kExp2C4));
  p = hn::MulAdd(p, r, set(kExp2C3));
  p = hn::MulAdd(p, r, set(kExp2C2));
  p = hn::MulAdd(p, r, set(kExp2C1));
  p = hn::MulAdd(p, r, set(1.0f));
  const F exponent = hn::Sub(n, max);
#if KVANT_AVX512
  // The bits of a scalef, which takes twice the time of other instructions.
  const __mmask16 visible = _mm512_cmp_ps_mask(exponent.raw, _mm512_set1_ps(kExp2Floor), _CMP_GE_OQ);
  const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(exponent.raw), 23);
  return F{_mm512_castsi512_ps(_mm512_maskz_add_epi32(visible, _mm512_castps_si512(p.raw), shift))};
#else
  const auto visible = hn::Ge(exponent, set(kExp2Floor));
  const I shift = hn::ShiftLeft<23>(round_to_int(hn::IfThenElseZero(visible, exponent)));
  return hn::IfThenElseZero(visible, hn::BitCast(df, hn::Add(hn::BitCast(di, p), shift)));
#endif
}

HWY_INLINE hn::Mask<DF> live_lanes(uint64_t live, int first_token) {
  uint8_t bits[8];
  const uint64_t shifted = live >> first_token;
  memcpy(bits, &shifted, sizeof bits);
  return hn::LoadMaskBits(df, bits);
}

// The largest logits, per lane, that the row sees of 64; hidden ones are overwritten with -inf.
HWY_INLINE F hide_and_max(float* x, uint64_t live) {
  F max = set(-__builtin_huge_valf());
  if (live == ~uint64_t{0}) {
    KVANT_UNROLL
    for (int i = 0; i < kTokenVectors; ++i) max = hn::Max(max, load(x + i * kLanes));
    return max;
  }
  const F hidden = max;
  for (int i = 0; i < kTokenVectors; ++i) {
    const F logit = hn::IfThenElse(live_lanes(live, i * kLanes), load(x + i * kLanes), hidden);
    store(logit, x + i * kLanes);
    max = hn::Max(max, logit);
  }
  return max;
}

// The weights of one page, and their sum per lane.
HWY_INLINE F weigh_page(float* x, F max) {
  F sum = hn::Zero(df);
  KVANT_UNROLL
  for (int i = 0; i < kTokenVectors; ++i) {
    const F w = exp2_below(load(x + i * kLanes), max);
    store(w, x + i * kLanes);
    sum = hn::Add(sum, w);
  }
  return sum;
}

HWY_INLINE void clear_page(float* x) {
  for (int t = 0; t < kPageTokens; t += kLanes) store(hn::Zero(df), x + t);
}

// Four vectors at a time reduced to one float each.
template <class Op>
HWY_INLINE void reduce_pages(const F* v, int pages, float* out) {
  for (int i = 0; i < pages; i += 4) {
    hn::StoreU(reduce_four<Op>(v[i], v[i + 1], v[i + 2], v[i + 3]), D4(), out + i);
  }
}

void softmax_row(const LogitStrip& strip, int r, RowState* state, float* rescale) {
  constexpr float kNothing = -__builtin_huge_valf();
  const uint64_t* live = strip.live + r;
  float* x = strip.logits + static_cast<size_t>(r) * kPageTokens;
  F lanes[kMaxStripPages + 3];
  for (int i = 0; i < strip.pages + 3; ++i) {
    const bool seen = i < strip.pages && live[i * strip.live_stride] != 0;
    lanes[i] = seen ? hide_and_max(x + i * strip.page_stride, live[i * strip.live_stride]) : set(kNothing);
  }
  float page_max[kMaxStripPages + 3];
  reduce_pages<MaxLanes>(lanes, strip.pages, page_max);
  const float old_max = state->max;
  float max = old_max;
  bool used[kMaxStripPages];
  for (int i = 0; i < strip.pages; ++i) {
    const float m = hn::GetLane(hn::Ceil(set(page_max[i])));
    max = m > max ? m : max;
    used[i] = m > kNothing && m >= max - strip.skip_below;
  }
  *rescale = 1.0f;
  if (max != old_max) *rescale = hn::GetLane(exp2_below(set(old_max), set(max)));
  const F top = set(max);
  for (int i = 0; i < strip.pages + 3; ++i) {
    lanes[i] = hn::Zero(df);
    if (i >= strip.pages || live[i * strip.live_stride] == 0) continue;
    if (used[i]) {
      lanes[i] = weigh_page(x + i * strip.page_stride, top);
    } else {
      clear_page(x + i * strip.page_stride);
    }
  }
  float sums[kMaxStripPages + 3];
  reduce_pages<AddLanes>(lanes, strip.pages, sums);
  state->max = max;
  state->sum *= *rescale;
  for (int i = 0; i < strip.pages; ++i) {
    state->sum += sums[i];
    strip.sums[i * strip.sum_stride + r] = sums[i];
  }
}

void softmax(const LogitStrip& strip, RowState* state, float* rescale) {
  for (int r = 0; r < strip.rows; ++r) softmax_row(strip, r, state + r, rescale + r);
}

void rescale_rows(float* acc, int value_dim, int rows, const float* factor) {
  for (int r = 0; r < rows; ++r) {
    if (factor[r] == 1.0f) continue;
    float* row = acc + static_cast<size_t>(r) * value_dim;
    for (int c = 0; c < value_dim; c += kLanes) {
      const int count = value_dim - c;
      lanes_to(hn::Mul(lanes_from(row + c, count), set(factor[r])), row + c, count);
    }
  }
}

void combine(float* acc, const float* from, int count, float keep, float add) {
  const F kept = set(keep), added = set(add);
  for (int c = 0; c < count; c += kLanes) {
    const F sum =
        hn::MulAdd(lanes_from(from + c, count - c), added, hn::Mul(lanes_from(acc + c, count - c), kept));
    lanes_to(sum, acc + c, count - c);
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

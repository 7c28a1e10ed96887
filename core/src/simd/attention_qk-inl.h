// Scores of quantized keys: included by the ISA files after attention_prepare_fold-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

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
  const float* start;  // [4]: what the logits start with; null: they hold the sums of earlier bands
};

// Keys of one channel quad (half kHalf of an octet) for groups kGroup.. of 16 tokens.
template <int kFormat, int kGroups, int kHalf, int kGroup>
HWY_INLINE void key_codes(const Planes& planes, Bytes (&k)[kGroups]) {
  k[0] = codes<kFormat, 4 * kHalf + kGroup>(planes);
  k[1] = codes<kFormat, 4 * kHalf + kGroup + 1>(planes);
  if constexpr (kGroups == 4) {
    k[2] = codes<kFormat, 4 * kHalf + kGroup + 2>(planes);
    k[3] = codes<kFormat, 4 * kHalf + kGroup + 3>(planes);
  }
}

template <int kFormat, int kTermRows, int kGroups, int kHalf, int kGroup>
HWY_INLINE void key_quad(const Planes& planes, const int8_t* const* q, int o,
                         Partial (&sum)[kTermRows][kGroups]) {
  Bytes k[kGroups];
  key_codes<kFormat, kGroups, kHalf, kGroup>(planes, k);
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    const Bytes b = quad(q[r] + 8 * o + 4 * kHalf);
    KVANT_UNROLL
    for (int g = 0; g < kGroups; ++g) sum[r][g] = dot_step(sum[r][g], k[g], b);
  }
}

// An octet for widths of which 16 bits hold one or two steps: folded right away, so that no partial sums
// wait.
template <int kFormat, int kSteps, int kTermRows, int kGroups, int kGroup>
HWY_INLINE void folded_key_octet(const Planes& planes, const int8_t* const* q, int o,
                                 I (&total)[kTermRows][kGroups]) {
  Bytes k[2][kGroups];
  key_codes<kFormat, kGroups, 0, kGroup>(planes, k[0]);
  key_codes<kFormat, kGroups, 1, kGroup>(planes, k[1]);
  KVANT_UNROLL
  for (int r = 0; r < kTermRows; ++r) {
    const Bytes b0 = quad(q[r] + 8 * o), b1 = quad(q[r] + 8 * o + 4);
    KVANT_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const auto zero = hn::Zero(hn::DFromV<Partial>());
      if constexpr (kSteps == 1) {
        total[r][g] = fold(fold(total[r][g], dot_step(zero, k[0][g], b0)), dot_step(zero, k[1][g], b1));
      } else {
        total[r][g] = fold(total[r][g], dot_step(dot_step(zero, k[0][g], b0), k[1][g], b1));
      }
    }
  }
}

// Integer sums over all channels of the band for kGroups vectors of tokens.
template <int kFormat, int kWidth, int kTermRows, int kGroups, int kGroup>
HWY_INLINE void key_sums(Planes planes, int octets, const int8_t* const* q, I (&total)[kTermRows][kGroups]) {
  constexpr int kSteps = kKeyStepsIn16Bits[kWidth];
  clear(total);
  if constexpr (kDirectDot) {
    for (int o = 0; o < octets; ++o) {
      prefetch_octet<kFormat>(planes);
      key_quad<kFormat, kTermRows, kGroups, 0, kGroup>(planes, q, o, total);
      key_quad<kFormat, kTermRows, kGroups, 1, kGroup>(planes, q, o, total);
      planes = advance<kFormat>(planes, 1);
    }
  } else if constexpr (kSteps <= 2) {
    for (int o = 0; o < octets; ++o) {
      prefetch_octet<kFormat>(planes);
      folded_key_octet<kFormat, kSteps, kTermRows, kGroups, kGroup>(planes, q, o, total);
      planes = advance<kFormat>(planes, 1);
    }
  } else {
    for (int o = 0; o < octets;) {
      const int end = kSteps / 2 < octets - o ? o + kSteps / 2 : octets;
      Partial sum[kTermRows][kGroups];
      clear(sum);
      for (; o < end; ++o) {
        prefetch_octet<kFormat>(planes);
        key_quad<kFormat, kTermRows, kGroups, 0, kGroup>(planes, q, o, sum);
        key_quad<kFormat, kTermRows, kGroups, 1, kGroup>(planes, q, o, sum);
        planes = advance<kFormat>(planes, 1);
      }
      fold_all(sum, total);
    }
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
      const F before = block.start != nullptr ? set(block.start[r]) : load(block.logits[r] + token);
      F logit = hn::MulAdd(dot, token_scale, before);
      if (block.token_low != nullptr) {
        logit = hn::MulAdd(set(block.q_sum[r]), load(block.token_low + token), logit);
      }
      store(logit, block.logits[r] + token);
    }
  }
}

template <int kFormat, int kWidth, int kTerms, int kRows, int kGroups, int kGroup>
HWY_INLINE void key_slice(const KeyBlock& block, int byte) {
  const int8_t* q[kRows * kTerms];
  for (int i = 0; i < kRows * kTerms; ++i) {
    q[i] = block.q8[i / kTerms] + (i % kTerms) * 8 * block.octets;
  }
  I total[kRows * kTerms][kGroups];
  key_sums<kFormat, kWidth, kRows * kTerms, kGroups, kGroup>(move_bytes<kFormat>(block.planes, byte),
                                                             block.octets, q, total);
  add_scores<kRows, kTerms, kGroups>(block, 16 * kGroup + byte / 4, total);
}

template <int kFormat, int kWidth, int kTerms, int kRows>
void key_block(const KeyBlock& block) {
  if constexpr (kLanes == 16 && kTerms * kRows <= 4) {
    key_slice<kFormat, kWidth, kTerms, kRows, 4, 0>(block, 0);
  } else {
    for (int byte = 0; byte < 64; byte += 4 * kLanes) {
      key_slice<kFormat, kWidth, kTerms, kRows, 2, 0>(block, byte);
      key_slice<kFormat, kWidth, kTerms, kRows, 2, 2>(block, byte);
    }
  }
}

using KeyBlockFunction = void (*)(const KeyBlock&);

template <int kFormat, int kWidth>
HWY_INLINE KeyBlockFunction two_term_key_block(int rows) {
  if constexpr (kTwoTermRows == 4) {
    if (rows == 3) return key_block<kFormat, kWidth, 2, 3>;
    if (rows == 4) return key_block<kFormat, kWidth, 2, 4>;
  }
  return rows == 1 ? key_block<kFormat, kWidth, 2, 1> : key_block<kFormat, kWidth, 2, 2>;
}

template <int kFormat, int kWidth>
HWY_INLINE KeyBlockFunction key_block_of_rows(int terms, int rows) {
  if constexpr (kWidth >= kTwoTermBitsOfScaledChannels) {
    if (kWidth >= kTwoTermBits || terms == 2) return two_term_key_block<kFormat, kWidth>(rows);
  }
  if constexpr (kWidth < kTwoTermBits) {
    switch (rows) {
      case 1:
        return key_block<kFormat, kWidth, 1, 1>;
      case 2:
        return key_block<kFormat, kWidth, 1, 2>;
      case 3:
        return key_block<kFormat, kWidth, 1, 3>;
      default:
        return key_block<kFormat, kWidth, 1, 4>;
    }
  }
}

template <int kWidth>
HWY_INLINE KeyBlockFunction key_block_of_width(bool unpacked, int terms, int rows) {
  return unpacked ? key_block_of_rows<kUnpacked, kWidth>(terms, rows)
                  : key_block_of_rows<kWidth, kWidth>(terms, rows);
}

KeyBlockFunction key_block_function(int bits, bool unpacked, int terms, int rows) {
  switch (bits) {
    case 2:
      return key_block_of_width<2>(unpacked, terms, rows);
    case 3:
      return key_block_of_width<3>(unpacked, terms, rows);
    case 4:
      return key_block_of_width<4>(unpacked, terms, rows);
    case 5:
      return key_block_of_width<5>(unpacked, terms, rows);
    case 6:
      return key_block_of_width<6>(unpacked, terms, rows);
    case 7:
      return key_block_of_width<7>(unpacked, terms, rows);
    default:
      return key_block_of_rows<kUnpacked, 8>(terms, rows);
  }
}

void qk_band(const KeyTask& task, const OpenKeyTask& open, int b) {
  const TileLayout& layout = *task.layout;
  const PreparedQueries& q = open.queries;
  const LiveRows& live = open.live;
  const BandLayout& band = bands_of(layout)[b];
  alignas(64) uint8_t unpacked_codes[kMaxHeadDim * kPageTokens];
  alignas(64) float token_scale[kPageTokens];
  alignas(64) float token_low[kPageTokens];
  KeyBlock block;
  block.octets = band.channels / 8;
  planes_of(band, task.tile, task.next, &block.planes);
  const bool unpacked = live.count > kUnpackRows && band.n_planes > 1;
  if (unpacked) {
    unpack_band(band, task.tile, task.next, block.octets, unpacked_codes);
    block.planes.p[0] = unpacked_codes;
    block.planes.ahead = 0;
  }
  expand_token_scales(layout, band, task.tile, token_scale);
  block.token_scale = token_scale;
  block.token_low = nullptr;
  if (has_token_low(layout)) {
    expand_token_lows(band, task.tile, token_low);
    block.token_low = token_low;
  }
  const int per_block = rows_per_block(q.terms[b] == 2);
  for (int first = 0; first < live.count; first += per_block) {
    const int rows = live.count - first < per_block ? live.count - first : per_block;
    block.start = b == 0 ? open.start + first : nullptr;
    for (int i = 0; i < rows; ++i) {
      const int r = live.row[first + i];
      block.q8[i] = q.q8 + q.band_offset[b] + static_cast<size_t>(r) * q.terms[b] * band.channels;
      block.scale[i] = q.scale[b * q.rows + r];
      block.offset[i] = q.offset[b * q.rows + r];
      block.q_sum[i] = q.q_sum[b * q.rows + r];
      block.logits[i] = task.logits + static_cast<size_t>(r) * kPageTokens;
    }
    key_block_function(band.bits, unpacked, q.terms[b], rows)(block);
    block.planes.ahead = 0;  // asked for already
  }
}

void qk_tiles(const KeyTask* tasks, int count) {
  OpenKeyTask open[kTasksAtOnce];
  for (int first = 0; first < count;) {
    const bool few = tasks[first].queries->rows <= kFewRows;
    int n = 0;
    do {
      open_key_task(tasks[first + n], open + n);
      ++n;
    } while (few && n < kTasksAtOnce && first + n < count && tasks[first + n].queries->rows <= kFewRows);
    fold_channels(tasks + first, n, open);
    for (int i = 0; i < n; ++i) {
      const KeyTask& task = tasks[first + i];
      prefetch_next_metadata(tasks + first, n, i);
      for (int b = 0; b < task.layout->n_bands; ++b) qk_band(task, open[i], b);
    }
    first += n;
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

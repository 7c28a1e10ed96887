// Weighted sums of quantized values: included by the ISA files after attention_pv-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// Weights of up to four rows for one band.
struct BandWeights {
  alignas(64) uint8_t bytes[4][2 * kPageTokens];
  float factor[4];  // weight * token scale ~ factor * integer
  float shift[4];   // what all channels of the band get: -middle * factor * sum of integers, and lows
};

// Rounds four vectors of scaled weights, stores their terms and returns their sum per lane.
template <int kTerms>
HWY_INLINE I quantize_four(const F (&scaled)[4], F inverse, uint8_t* out) {
  I v[4], low[4];
  KVANT_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = round_to_int(hn::Mul(scaled[i], inverse));
    if constexpr (kTerms == 2) {
      low[i] = hn::And(v[i], hn::Set(di, 63));
      v[i] = hn::ShiftRight<6>(v[i]);
    }
  }
  const Bytes first = pack_unsigned(v);
  hn::StoreU(first, db, out);
  I sum = sum_unsigned(first);
  if constexpr (kTerms == 2) {
    const Bytes second = pack_unsigned(low);
    hn::StoreU(second, db, out + kPageTokens);
    sum = hn::Add(hn::ShiftLeft<6>(sum), sum_unsigned(second));
  }
  return sum;
}

// Four vectors of weights times token scales, from token t on.
HWY_INLINE void scale_four(const float* w, const float* token_scale, int t, F (&out)[4]) {
  KVANT_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = hn::Mul(load(w + t + i * kLanes), load(token_scale + t + i * kLanes));
}

template <int kRows, int kTerms>
void quantize_weight_rows(const float* const* w, const float* token_scale, float middle, BandWeights* out) {
  constexpr int kFours = kTokenVectors / 4;
  // 512-bit registers hold the products of all rows; with shorter ones it is cheaper to multiply twice.
  constexpr bool kKeep = kFours == 1;
  F scaled[kRows][4], max[kRows], sums[kRows];
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    max[r] = hn::Zero(df);
    KVANT_UNROLL
    for (int n = 0; n < kFours; ++n) {
      scale_four(w[r], token_scale, 4 * n * kLanes, scaled[r]);
      max[r] =
          hn::Max(max[r], hn::Max(hn::Max(scaled[r][0], scaled[r][1]), hn::Max(scaled[r][2], scaled[r][3])));
    }
  }
  const RowScales scales =
      row_scales(reduce_rows<MaxLanes>(max), kTerms == 2 ? kWeightMaxTwoTerms : kWeightMaxOneTerm);
  KVANT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const F inverse = set(scales.inverse[r]);
    I sum = hn::Zero(di);
    KVANT_UNROLL
    for (int n = 0; n < kFours; ++n) {
      if constexpr (!kKeep) scale_four(w[r], token_scale, 4 * n * kLanes, scaled[r]);
      sum = hn::Add(sum, quantize_four<kTerms>(scaled[r], inverse, out->bytes[r] + 4 * n * kLanes));
    }
    sums[r] = hn::ConvertTo(df, sum);
  }
  // Integers up to 4095 * 64, which floats hold exactly.
  const D4 d4;
  const F4 factor = hn::Load(d4, scales.scale);
  hn::StoreU(factor, d4, out->factor);
  hn::StoreU(hn::Mul(hn::Mul(hn::Set(d4, -middle), reduce_rows<AddLanes>(sums)), factor), d4, out->shift);
}

using QuantizeWeights = void (*)(const float* const* w, const float* token_scale, float middle,
                                 BandWeights* out);

HWY_INLINE QuantizeWeights quantize_weights_function(int rows, bool two_terms) {
  switch (rows) {
    case 1:
      return two_terms ? quantize_weight_rows<1, 2> : quantize_weight_rows<1, 1>;
    case 2:
      return two_terms ? quantize_weight_rows<2, 2> : quantize_weight_rows<2, 1>;
    case 3:
      return two_terms ? quantize_weight_rows<3, 2> : quantize_weight_rows<3, 1>;
    default:
      return two_terms ? quantize_weight_rows<4, 2> : quantize_weight_rows<4, 1>;
  }
}

// Sum over tokens of weight times a value of the token.
HWY_INLINE float weighted_sum(const float* w, const float* token_value) {
  F sum = hn::Zero(df);
  for (int i = 0; i < kPageTokens; i += kLanes) sum = hn::MulAdd(load(w + i), load(token_value + i), sum);
  return sum_of(sum);
}

HWY_INLINE float sum_of_weights(const float* w) {
  F sum = hn::Zero(df);
  for (int t = 0; t < kPageTokens; t += kLanes) sum = hn::Add(sum, load(w + t));
  return sum_of(sum);
}

// What all rows of a call share for one band.
struct ValueBand {
  int bits;
  int first_channel;
  int channels;
  bool unpacked;
  float middle;
  Planes planes;
  alignas(64) float token_scale[kPageTokens];
  alignas(64) float token_low[kPageTokens];
};

struct OpenValueTask {
  int n_bands;
  int head_dim;
  bool asymmetric;
  bool token_lows;
  LiveRows live;
  const float* channel_scale;   // [head_dim] or null
  const float* channel_centre;  // [head_dim] or null
  alignas(64) float scale_memory[kMaxHeadDim + kLanes];
  alignas(64) float centre_memory[kMaxHeadDim + kLanes];
  ValueBand bands[kMaxBands];
};

// Up to four rows of a task: their weights for every band.
struct WeightRows {
  int count;
  const float* w[4];
  float* acc[4];
  float sum[4];
  BandWeights band[kMaxBands];
};

void open_bands(const TileLayout& layout, const std::byte* tile, const std::byte* next, bool unpack,
                std::byte* workspace, OpenValueTask* out) {
  uint8_t* unpacked = reinterpret_cast<uint8_t*>(workspace);
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = bands_of(layout)[b];
    ValueBand& shared = out->bands[b];
    shared.bits = band.bits;
    shared.first_channel = band.first_channel;
    shared.channels = band.channels;
    shared.middle = middle_of(band.bits);
    planes_of(band, tile, next, &shared.planes);
    shared.unpacked = unpack && band.n_planes > 1;
    if (shared.unpacked) {
      unpack_band(band, tile, next, band.stored_channels / 8, unpacked);
      shared.planes.p[0] = unpacked;
      shared.planes.ahead = 0;
      unpacked += band.stored_channels * kPageTokens;
    }
    expand_token_scales(layout, band, tile, shared.token_scale);
    if (out->token_lows) expand_token_lows(band, tile, shared.token_low);
  }
}

void open_value_task(const ValueTask& task, std::byte* workspace, OpenValueTask* open) {
  const TileLayout& layout = *task.layout;
  find_live_rows(task.live, task.rows, &open->live);
  if (open->live.count == 0) return;
  open->n_bands = layout.n_bands;
  open->head_dim = layout.head_dim;
  open->asymmetric = layout.asymmetric;
  open->token_lows = has_token_low(layout);
  open->channel_scale = layout.channel_scale ? open->scale_memory : nullptr;
  open->channel_centre = layout.channel_centre ? open->centre_memory : nullptr;
  if (layout.channel_scale) expand_channel_scales(layout, task.tile, open->scale_memory);
  if (layout.channel_centre) expand_channel_centres(layout, task.tile, open->centre_memory);
  open_bands(layout, task.tile, task.next, open->live.count > kUnpackRows, workspace, open);
}

// Quantizes the weights of up to four live rows from index `first` on.
void open_weight_rows(const ValueTask& task, const OpenValueTask& open, int first, WeightRows* rows) {
  rows->count = open.live.count - first < 4 ? open.live.count - first : 4;
  for (int i = 0; i < rows->count; ++i) {
    const size_t r = open.live.row[first + i];
    rows->w[i] = task.weights + r * kPageTokens;
    rows->acc[i] = task.acc + r * open.head_dim;
    rows->sum[i] = open.channel_centre != nullptr ? sum_of_weights(rows->w[i]) : 0.0f;
  }
  for (int b = 0; b < open.n_bands; ++b) {
    const ValueBand& band = open.bands[b];
    BandWeights* out = &rows->band[b];
    quantize_weights_function(rows->count, band.bits >= kTwoTermBits)(rows->w, band.token_scale, band.middle,
                                                                      out);
    for (int i = 0; open.asymmetric && i < rows->count; ++i) {
      out->shift[i] += band.middle * weighted_sum(rows->w[i], band.token_scale);
      if (open.token_lows) out->shift[i] += weighted_sum(rows->w[i], band.token_low);
    }
  }
}

void add_weight_rows(const OpenValueTask& open, const WeightRows& rows) {
  for (int b = 0; b < open.n_bands; ++b) {
    const ValueBand& band = open.bands[b];
    const BandWeights& weights = rows.band[b];
    ValueBlock block;
    block.channels = band.channels;
    block.planes = &band.planes;
    block.channel_scale = open.channel_scale == nullptr ? nullptr : open.channel_scale + band.first_channel;
    block.channel_centre =
        open.channel_centre == nullptr ? nullptr : open.channel_centre + band.first_channel;
    const int per_block = rows_per_block(band.bits >= kTwoTermBits);
    for (int first = 0; first < rows.count; first += per_block) {
      const int count = rows.count - first < per_block ? rows.count - first : per_block;
      for (int i = 0; i < count; ++i) {
        block.weights[i] = weights.bytes[first + i];
        block.factor[i] = weights.factor[first + i];
        block.shift[i] = weights.shift[first + i];
        block.weight_sum[i] = rows.sum[first + i];
        block.acc[i] = rows.acc[first + i] + band.first_channel;
      }
      value_block_function(band.bits, band.unpacked, count)(block);
    }
  }
}

// Few rows: the weights of several tasks are quantized before the first product, so that one task's wait for
// its maxima and divisions hides behind the others.
void pv_few_rows(const ValueTask* tasks, int count) {
  OpenValueTask open[kTasksAtOnce];
  WeightRows rows[kTasksAtOnce];
  for (int i = 0; i < count; ++i) {
    open_value_task(tasks[i], nullptr, open + i);
    if (open[i].live.count != 0) open_weight_rows(tasks[i], open[i], 0, rows + i);
  }
  for (int i = 0; i < count; ++i) {
    prefetch_next_metadata(tasks, count, i);
    if (open[i].live.count == 0) continue;
    add_weight_rows(open[i], rows[i]);
  }
}

// Many rows: the weights of up to 16 are quantized before the first product, for the same reason.
void pv_many_rows(const ValueTask& task, std::byte* workspace) {
  OpenValueTask open;
  open_value_task(task, workspace, &open);
  prefetch_metadata(*task.layout, task.next, task.next_bytes);
  WeightRows rows[kTasksAtOnce];
  for (int first = 0; first < open.live.count;) {
    int n = 0;
    for (; n < kTasksAtOnce && first < open.live.count; ++n, first += 4) {
      open_weight_rows(task, open, first, rows + n);
    }
    for (int i = 0; i < n; ++i) {
      add_weight_rows(open, rows[i]);
      for (int b = 0; b < open.n_bands; ++b) open.bands[b].planes.ahead = 0;  // asked for already
    }
  }
}

void pv_tiles(const ValueTask* tasks, int count, std::byte* workspace) {
  for (int first = 0; first < count;) {
    int few = 0;
    while (few < kTasksAtOnce && first + few < count && tasks[first + few].rows <= kFewRows) ++few;
    if (few != 0) {
      pv_few_rows(tasks + first, few);
      first += few;
    } else {
      pv_many_rows(tasks[first++], workspace);
    }
  }
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

// Attention kernels without SIMD: the reference that the other targets are tested against, written to be
// read.
#include <cmath>
#include <cstring>

#include "kvant/half.h"
#include "simd/attention.h"
#include "simd/attention_constants.h"
#include "simd/scale_tables.h"

namespace kvant::simd {
namespace {

uint16_t load_word(const std::byte* p) {
  uint16_t w = 0;
  std::memcpy(&w, p, sizeof w);
  return w;
}

// Places of one value in the planes of a band: element e, byte j of it.
int read_code(const BandLayout& band, const std::byte* tile, int e, int j) {
  int code = 0, shift = 0;
  for (int i = 0; i < band.n_planes; ++i) {
    const int bits = band.plane_bits[i], per_vector = 8 / bits;
    const std::byte* vector = tile + band.plane_offset[i] + static_cast<size_t>(e / per_vector) * 64;
    const int field = (static_cast<int>(vector[j]) >> (bits * (e % per_vector))) & ((1 << bits) - 1);
    code |= field << shift;
    shift += bits;
  }
  return code;
}

int key_code(const BandLayout& band, const std::byte* tile, int t, int c) {
  return read_code(band, tile, 4 * (c / 4) + t / 16, 4 * (t % 16) + c % 4);
}

int value_code(const BandLayout& band, const std::byte* tile, int t, int c) {
  return read_code(band, tile, 16 * (c / 16) + t / 4, 4 * (c % 16) + t % 4);
}

float token_scale(const TileLayout& layout, const BandLayout& band, const std::byte* tile, int t) {
  const std::byte* words = tile + band.token_scale_offset;
  switch (layout.token_scale) {
    case ScaleType::kNone:
      return 1.0f;
    case ScaleType::kE6M10:
      return scale_to_float(load_word(words + 2 * t));
    case ScaleType::kLog8: {
      const int k = static_cast<int>(words[t]);
      if (k == 0) return 0.0f;
      const float base = scale_to_float(load_word(tile + band.token_base_offset));
      return std::ldexp(base * kEighthOctave[(k + 1) & 7], ((k + 1) >> 3) - 32);
    }
    case ScaleType::kLog4: {
      const int k = (static_cast<int>(words[t / 2]) >> (4 * (t % 2))) & 15;
      return scale_to_float(load_word(tile + band.token_base_offset)) * kLog4Steps[k];
    }
  }
  return 0.0f;
}

bool has_token_low(const TileLayout& layout) { return layout.asymmetric && !layout.channel_scale; }

float token_low(const BandLayout& band, const std::byte* tile, int t) {
  return half_to_float(load_word(tile + band.token_low_offset + 2 * t));
}

float channel_scale(const TileLayout& layout, const std::byte* tile, int c) {
  return layout.channel_scale ? scale_to_float(load_word(tile + layout.channel_scale_offset + 2 * c)) : 1.0f;
}

float channel_centre(const TileLayout& layout, const std::byte* tile, int c) {
  return layout.channel_centre ? half_to_float(load_word(tile + layout.channel_centre_offset + 2 * c)) : 0.0f;
}

// Quantizes one row of one band; x has band.channels floats.
void quantize_row(const TileLayout& layout, int b, int r, const float* x, const PreparedQueries& q) {
  const int channels = layout.bands[b].channels, terms = q.terms[b];
  int8_t* out = q.q8 + q.band_offset[b] + static_cast<size_t>(r) * terms * channels;
  const float largest = terms == 2 ? kQueryMaxTwoTerms : kQueryMaxOneTerm;
  float amax = 0.0f;
  for (int c = 0; c < channels; ++c) amax = std::fmax(amax, std::fabs(x[c]));
  const bool zero = amax < kQuantizeFloor;
  const float inverse = zero ? 0.0f : largest / amax;
  const float scale = zero ? 0.0f : amax / largest;
  int sum = 0;
  float exact = 0.0f;
  for (int c = 0; c < channels; ++c) {
    const int v = static_cast<int>(std::nearbyint(x[c] * inverse));
    sum += v;
    exact += x[c];
    if (terms == 2) {
      const int hi = (v + 32) >> 6;
      out[c] = static_cast<int8_t>(hi);
      out[channels + c] = static_cast<int8_t>(v - 64 * hi);
    } else {
      out[c] = static_cast<int8_t>(v);
    }
  }
  q.scale[b * q.rows + r] = scale;
  const float middle = middle_of(layout.bands[b].bits);
  q.offset[b * q.rows + r] = -middle * static_cast<float>(sum) * scale;
  if (layout.asymmetric) q.offset[b * q.rows + r] += middle * exact;
}

void prepare_queries(const TileLayout& layout, const float* q, int rows, PreparedQueries* out) {
  out->rows = rows;
  out->q = q;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    for (int r = 0; r < rows; ++r) {
      const float* x = q + static_cast<size_t>(r) * layout.head_dim + band.first_channel;
      float sum = 0.0f;
      for (int c = 0; c < band.channels; ++c) sum += x[c];
      out->q_sum[b * rows + r] = sum;
      if (!layout.channel_scale) quantize_row(layout, b, r, x, *out);
    }
  }
}

void fold_channel_scales(const TileLayout& layout, const std::byte* tile, int r, const PreparedQueries& q) {
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    float x[kMaxHeadDim] = {};
    for (int c = 0; c < band.channels; ++c) {
      x[c] = q.q[static_cast<size_t>(r) * layout.head_dim + band.first_channel + c] *
             channel_scale(layout, tile, band.first_channel + c);
    }
    quantize_row(layout, b, r, x, q);
  }
}

void qk_tile(const TileLayout& layout, const std::byte* tile, const PreparedQueries& q, const float* base,
             const uint64_t* live, float* logits) {
  for (int r = 0; r < q.rows; ++r) {
    if (live[r] == 0) continue;
    if (layout.channel_scale) fold_channel_scales(layout, tile, r, q);
    float start = base[r];
    if (layout.channel_centre) {
      float dot = 0.0f;
      for (int c = 0; c < layout.head_dim; ++c) {
        dot += q.q[static_cast<size_t>(r) * layout.head_dim + c] * channel_centre(layout, tile, c);
      }
      start += dot;
    }
    for (int t = 0; t < kPageTokens; ++t) {
      float logit = start;
      for (int b = 0; b < layout.n_bands; ++b) {
        const BandLayout& band = layout.bands[b];
        const int8_t* q8 = q.q8 + q.band_offset[b] + static_cast<size_t>(r) * q.terms[b] * band.channels;
        int sum = 0;
        for (int c = 0; c < band.channels; ++c) {
          const int v = q.terms[b] == 2 ? 64 * q8[c] + q8[band.channels + c] : q8[c];
          sum += v * key_code(band, tile, t, c);
        }
        const float dot = static_cast<float>(sum) * q.scale[b * q.rows + r] + q.offset[b * q.rows + r];
        logit += dot * token_scale(layout, band, tile, t);
        if (has_token_low(layout)) logit += q.q_sum[b * q.rows + r] * token_low(band, tile, t);
      }
      logits[r * kPageTokens + t] = logit;
    }
  }
}

float word_to_float(uint16_t w, bool bf16) { return bf16 ? bf16_to_float(w) : half_to_float(w); }

void qk_rows(const uint16_t* k, const uint16_t*, size_t stride, int count, bool bf16, int head_dim,
             const float* q, int rows, const uint64_t* live, float* logits) {
  for (int r = 0; r < rows; ++r) {
    if (live[r] == 0) continue;
    for (int t = 0; t < count; ++t) {
      float sum = 0.0f;
      for (int c = 0; c < head_dim; ++c) {
        sum += q[static_cast<size_t>(r) * head_dim + c] * word_to_float(k[t * stride + c], bf16);
      }
      logits[r * kPageTokens + t] = sum;
    }
  }
}

void qk_floats(const float* k, int count, int head_dim, const float* q, int rows, const uint64_t* live,
               float* logits) {
  for (int r = 0; r < rows; ++r) {
    if (live[r] == 0) continue;
    for (int t = 0; t < count; ++t) {
      float sum = 0.0f;
      for (int c = 0; c < head_dim; ++c) {
        sum += q[static_cast<size_t>(r) * head_dim + c] * k[static_cast<size_t>(t) * head_dim + c];
      }
      logits[r * kPageTokens + t] = sum;
    }
  }
}

// 2^(x - max) for an integer max, which scales the result exactly.
float exp2_below(float x, float max) {
  const float n = std::nearbyint(x);
  const float exponent = n - max;
  if (!(exponent >= kExp2Floor)) return 0.0f;
  const float r = x - n;
  float p = kExp2C5;
  p = p * r + kExp2C4;
  p = p * r + kExp2C3;
  p = p * r + kExp2C2;
  p = p * r + kExp2C1;
  p = p * r + 1.0f;
  return std::ldexp(p, static_cast<int>(exponent));
}

void softmax_row(const LogitStrip& strip, int r, RowState* state, float* rescale) {
  float max = state->max;
  bool used[kMaxStripPages];
  for (int i = 0; i < strip.pages; ++i) {
    const uint64_t live = strip.live[i * strip.live_stride + r];
    const float* x = strip.logits + i * strip.page_stride + static_cast<size_t>(r) * kPageTokens;
    float largest = -HUGE_VALF;
    for (int t = 0; t < kPageTokens; ++t) {
      if ((live >> t & 1) != 0) largest = std::fmax(largest, std::ceil(x[t]));
    }
    max = std::fmax(max, largest);
    used[i] = largest > -HUGE_VALF && largest >= max - strip.skip_below;
  }
  *rescale = max == state->max ? 1.0f : exp2_below(state->max, max);
  state->max = max;
  state->sum *= *rescale;
  for (int i = 0; i < strip.pages; ++i) {
    const uint64_t live = strip.live[i * strip.live_stride + r];
    float* x = strip.logits + i * strip.page_stride + static_cast<size_t>(r) * kPageTokens;
    float sum = 0.0f;
    for (int t = 0; t < kPageTokens; ++t) {
      x[t] = (live >> t & 1) != 0 && used[i] ? exp2_below(x[t], max) : 0.0f;
      sum += x[t];
    }
    state->sum += sum;
    strip.sums[i * strip.sum_stride + r] = sum;
  }
}

void softmax(const LogitStrip& strip, RowState* state, float* rescale) {
  for (int r = 0; r < strip.rows; ++r) softmax_row(strip, r, state + r, rescale + r);
}

void combine(float* acc, const float* from, int count, float keep, float add) {
  for (int c = 0; c < count; ++c) acc[c] = acc[c] * keep + from[c] * add;
}

void rescale_rows(float* acc, int value_dim, int rows, const float* factor) {
  for (int r = 0; r < rows; ++r) {
    if (factor[r] == 1.0f) continue;
    for (int c = 0; c < value_dim; ++c) acc[static_cast<size_t>(r) * value_dim + c] *= factor[r];
  }
}

// The weights of one row times the token scales of one band, in integers: w * scale ~ factor * v.
struct QuantizedWeights {
  int v[kPageTokens];
  int sum = 0;
  float factor = 0.0f;
};

QuantizedWeights quantize_weights(const TileLayout& layout, const BandLayout& band, const std::byte* tile,
                                  const float* w) {
  QuantizedWeights out;
  const float largest = band.bits >= kTwoTermBits ? kWeightMaxTwoTerms : kWeightMaxOneTerm;
  float scaled[kPageTokens], max = 0.0f;
  for (int t = 0; t < kPageTokens; ++t) {
    scaled[t] = w[t] * token_scale(layout, band, tile, t);
    max = std::fmax(max, scaled[t]);
  }
  const bool zero = max < kQuantizeFloor;
  const float inverse = zero ? 0.0f : largest / max;
  out.factor = zero ? 0.0f : max / largest;
  for (int t = 0; t < kPageTokens; ++t) {
    out.v[t] = static_cast<int>(std::nearbyint(scaled[t] * inverse));
    out.sum += out.v[t];
  }
  return out;
}

void pv_tile(const TileLayout& layout, const std::byte* tile, const float* weights, int rows,
             const uint64_t* live, float* acc) {
  for (int r = 0; r < rows; ++r) {
    if (live[r] == 0) continue;
    const float* w = weights + static_cast<size_t>(r) * kPageTokens;
    float weight_sum = 0.0f;
    for (int t = 0; t < kPageTokens; ++t) weight_sum += w[t];
    for (int b = 0; b < layout.n_bands; ++b) {
      const BandLayout& band = layout.bands[b];
      const QuantizedWeights quantized = quantize_weights(layout, band, tile, w);
      const float middle = middle_of(band.bits);
      float shift = -middle * static_cast<float>(quantized.sum) * quantized.factor;
      for (int t = 0; layout.asymmetric && t < kPageTokens; ++t) {
        shift += middle * w[t] * token_scale(layout, band, tile, t);
      }
      if (has_token_low(layout)) {
        for (int t = 0; t < kPageTokens; ++t) shift += w[t] * token_low(band, tile, t);
      }
      for (int c = 0; c < band.channels; ++c) {
        int sum = 0;
        for (int t = 0; t < kPageTokens; ++t) sum += quantized.v[t] * value_code(band, tile, t, c);
        const int channel = band.first_channel + c;
        float& out = acc[static_cast<size_t>(r) * layout.head_dim + channel];
        out += channel_centre(layout, tile, channel) * weight_sum;
        out += channel_scale(layout, tile, channel) * (static_cast<float>(sum) * quantized.factor + shift);
      }
    }
  }
}

void pv_rows(const uint16_t* v, const uint16_t*, size_t stride, int count, bool bf16, int value_dim,
             const float* weights, int rows, const uint64_t* live, float* acc) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < count; ++t) {
      if ((live[r] >> t & 1) == 0) continue;
      const float w = weights[r * kPageTokens + t];
      for (int c = 0; c < value_dim; ++c) {
        acc[static_cast<size_t>(r) * value_dim + c] += w * word_to_float(v[t * stride + c], bf16);
      }
    }
  }
}

void pv_floats(const float* v, int count, int value_dim, const float* weights, int rows, const uint64_t* live,
               float* acc) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < count; ++t) {
      if ((live[r] >> t & 1) == 0) continue;
      const float w = weights[r * kPageTokens + t];
      for (int c = 0; c < value_dim; ++c) {
        acc[static_cast<size_t>(r) * value_dim + c] += w * v[static_cast<size_t>(t) * value_dim + c];
      }
    }
  }
}

void qk_tiles(const KeyTask* tasks, int count) {
  for (int i = 0; i < count; ++i) {
    const KeyTask& t = tasks[i];
    qk_tile(*t.layout, t.tile, *t.queries, t.base, t.live, t.logits);
  }
}

void pv_tiles(const ValueTask* tasks, int count, std::byte*) {
  for (int i = 0; i < count; ++i) {
    const ValueTask& t = tasks[i];
    pv_tile(*t.layout, t.tile, t.weights, t.rows, t.live, t.acc);
  }
}

constexpr AttentionKernels kKernels = {prepare_queries, qk_tiles, qk_rows,  qk_floats, softmax,
                                       rescale_rows,    combine,  pv_tiles, pv_rows,   pv_floats};

}  // namespace

const AttentionKernels* scalar_attention_kernels() { return &kKernels; }

}  // namespace kvant::simd

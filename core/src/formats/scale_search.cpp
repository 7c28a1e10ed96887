#include "formats/scale_search.h"

#include <algorithm>
#include <bit>

#include "formats/layout.h"
#include "kvant/half.h"
#include "simd/encode.h"
#include "simd/kernels.h"
#include "simd/scale_tables.h"

namespace kvant {
namespace {

using Lanes = float[kPageTokens];

// One band while its scales are chosen; lanes are tokens.
struct BandChoice {
  simd::ScaleSearch search;
  alignas(64) Lanes centre;  // of the values' range, 0 for symmetric grids
  alignas(64) Lanes anchor;  // step that clips nothing; 0 where there is nothing to scale
  alignas(64) Lanes trial_anchor;
  alignas(64) Lanes inverse_anchor;
  alignas(64) uint8_t best[kPageTokens];
};

constexpr int kManyTrialEighths[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 20, 24, 28};
constexpr int kFewTrialEighths[8] = {0, 1, 2, 3, 4, 6, 8, 12};

const int* trial_eighths(int trials) { return trials == 16 ? kManyTrialEighths : kFewTrialEighths; }

// 2^(-e / 8)
float power_of_two_eighths(int e) { return log8_scale(1.0f, 255 - e); }

void find_anchors(const BandLayout& band, bool asymmetric, const float* columns, BandChoice* choice) {
  alignas(64) Lanes low, high;
  const float* x = columns + static_cast<size_t>(band.first_channel) * kPageTokens;
  std::copy_n(x, kPageTokens, low);
  std::copy_n(x, kPageTokens, high);
  for (int c = 1; c < band.channels; ++c) {
    x += kPageTokens;
    for (int t = 0; t < kPageTokens; ++t) {
      low[t] = x[t] < low[t] ? x[t] : low[t];
      high[t] = x[t] > high[t] ? x[t] : high[t];
    }
  }
  const float top_level = outermost_level(band.bits);
  for (int t = 0; t < kPageTokens; ++t) {
    const float radius = asymmetric ? 0.5f * (high[t] - low[t]) : std::max(high[t], -low[t]);
    choice->centre[t] = asymmetric ? 0.5f * (high[t] + low[t]) : 0.0f;
    const float anchor = std::min(radius / top_level, kScaleMax);
    choice->anchor[t] = anchor < 0.5f * kScaleMin ? 0.0f : anchor;
  }
}

void set_trial_anchors(BandChoice* choice) {
  for (int t = 0; t < kPageTokens; ++t) choice->inverse_anchor[t] = inverse_scale(choice->trial_anchor[t]);
}

// Writes kE6M10 words; returns decoded scales in `scale`.
void choose_e6m10(BandChoice* choice, std::byte* words, float* scale) {
  fill_trial_ratios(&choice->search);
  std::copy_n(choice->anchor, kPageTokens, choice->trial_anchor);
  set_trial_anchors(choice);
  simd::kernels().encode->search_scale(choice->search, choice->best);
  for (int t = 0; t < kPageTokens; ++t) {
    const int best = choice->best[t];
    const float wanted =
        best == choice->search.trials ? 0.0f : choice->anchor[t] * choice->search.ratio[best];
    const uint16_t word = float_to_scale(wanted);
    store_word(words + 2 * t, word);
    scale[t] = scale_to_float(word);
  }
}

uint16_t largest_anchor_word(const BandChoice& choice) {
  return float_to_scale(*std::max_element(choice.anchor, choice.anchor + kPageTokens));
}

// Smallest k in 1..255 with base * 2^((k - 255) / 8) >= anchor; 255 when there is none.
int log8_word_above(float base, float anchor) {
  const auto exponent = [](float x) { return static_cast<int>(std::bit_cast<uint32_t>(x) >> 23); };
  // From a word that is certainly below (or 1) upwards: at most 16 steps.
  int k = std::clamp(255 + 8 * (exponent(anchor) - exponent(base) - 1), 1, 255);
  while (k < 255 && log8_scale(base, k) < anchor) ++k;
  return k;
}

void choose_log8(BandChoice* choice, std::byte* words, std::byte* base_word, float* scale) {
  const uint16_t word = largest_anchor_word(*choice);
  const float base = scale_to_float(word);
  store_word(base_word, word);
  fill_trial_ratios(&choice->search);
  int first[kPageTokens];
  for (int t = 0; t < kPageTokens; ++t) {
    const bool used = choice->anchor[t] > 0.0f;
    first[t] = used ? log8_word_above(base, choice->anchor[t]) : 0;
    choice->trial_anchor[t] = log8_scale(base, first[t]);
  }
  set_trial_anchors(choice);
  simd::kernels().encode->search_scale(choice->search, choice->best);
  for (int t = 0; t < kPageTokens; ++t) {
    const int best = choice->best[t];
    const bool zero = first[t] == 0 || best == choice->search.trials;
    const int k = zero ? 0 : std::max(first[t] - trial_eighths(choice->search.trials)[best], 1);
    words[t] = static_cast<std::byte>(k);
    scale[t] = log8_scale(base, k);
  }
}

// Tries words of one base, from the smallest that is not below the token's anchor downwards, and returns the
// largest one that a token took.
int search_log4(float base, BandChoice* choice, int* words) {
  for (int j = 0; j < choice->search.trials; ++j) {
    choice->search.ratio[j] = power_of_two_eighths(2 * j);
    choice->search.inverse_ratio[j] = 1.0f / choice->search.ratio[j];
  }
  int first[kPageTokens];
  for (int t = 0; t < kPageTokens; ++t) {
    first[t] = choice->anchor[t] > 0.0f ? 15 : 0;
    while (first[t] > 1 && base * simd::kLog4Steps[first[t] - 1] >= choice->anchor[t]) --first[t];
    choice->trial_anchor[t] = base * simd::kLog4Steps[first[t]];
  }
  set_trial_anchors(choice);
  simd::kernels().encode->search_scale(choice->search, choice->best);
  int largest = 0;
  for (int t = 0; t < kPageTokens; ++t) {
    const bool zero = first[t] == 0 || choice->best[t] == choice->search.trials;
    words[t] = zero ? 0 : std::max(first[t] - choice->best[t], 1);
    largest = std::max(largest, words[t]);
  }
  return largest;
}

void choose_log4(BandChoice* choice, std::byte* nibbles, std::byte* base_word, float* scale) {
  uint16_t word = largest_anchor_word(*choice);
  int words[kPageTokens];
  const int largest = search_log4(scale_to_float(word), choice, words);
  bool starved = false;
  for (int t = 0; t < kPageTokens; ++t) starved = starved || (choice->anchor[t] > 0.0f && words[t] <= 1);
  if (starved && largest > 0 && largest < 15) {
    const uint16_t lower = float_to_scale(scale_to_float(word) * simd::kLog4Steps[largest]);
    if (lower != 0) {
      word = lower;
      search_log4(scale_to_float(word), choice, words);
    }
  }
  store_word(base_word, word);
  for (int t = 0; t < kPageTokens; ++t) {
    store_nibble(nibbles, t, words[t]);
    scale[t] = scale_to_float(word) * simd::kLog4Steps[words[t]];
  }
}

constexpr int kMostGainBits = 4;
constexpr float kMostGain[kMostGainBits + 1] = {1.0f, 1.0f, 1.25f, 1.1f, 1.05f};

// Sums of x^2 and x * decoded over a band, lanes are tokens.
float projection_gain(const BandLayout& band, const float* columns, const float* scale) {
  alignas(64) Lanes inverse, squares = {}, products = {};
  for (int t = 0; t < kPageTokens; ++t) inverse[t] = inverse_scale(scale[t]);
  const auto top = static_cast<float>((1 << band.bits) - 1);
  const float mid = 0.5f * top;
  for (int c = 0; c < band.channels; ++c) {
    const float* x = columns + static_cast<size_t>(band.first_channel + c) * kPageTokens;
    for (int t = 0; t < kPageTokens; ++t) {
      const float level = std::min(std::max(x[t] * inverse[t] + (mid + 0.5f), 0.0f), top);
      const float decoded = scale[t] * (static_cast<float>(static_cast<int>(level)) - mid);
      squares[t] = squares[t] + x[t] * x[t];
      products[t] = products[t] + x[t] * decoded;
    }
  }
  double signal = 0, projection = 0;
  for (int t = 0; t < kPageTokens; ++t) {
    signal += static_cast<double>(squares[t]);
    projection += static_cast<double>(products[t]);
  }
  if (!(projection > 0)) return 1.0f;
  return std::clamp(static_cast<float>(signal / projection), 1.0f, kMostGain[band.bits]);
}

}  // namespace

void fill_trial_ratios(simd::ScaleSearch* search) {
  const int* eighths = trial_eighths(search->trials);
  for (int j = 0; j < search->trials; ++j) {
    search->ratio[j] = power_of_two_eighths(eighths[j]);
    search->inverse_ratio[j] = 1.0f / search->ratio[j];
  }
}

uint16_t clamped_half(float x) { return float_to_half(std::clamp(x, -kLargestHalf, kLargestHalf)); }

void choose_token_scales(const TileLayout& layout, const float* columns, const float* weight,
                         float* code_gain, std::byte* tile) {
  BandChoice choice;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    choice.search = {.x = columns + static_cast<size_t>(band.first_channel) * kPageTokens,
                     .stride = kPageTokens,
                     .steps = band.channels,
                     .lanes = kPageTokens,
                     .bits = band.bits,
                     .weight = weight != nullptr ? weight + band.first_channel : nullptr,
                     .centre = choice.centre,
                     .anchor = choice.trial_anchor,
                     .inverse_anchor = choice.inverse_anchor,
                     .trials = scale_trials(band.bits)};
    find_anchors(band, layout.asymmetric, columns, &choice);
    float scale[kPageTokens];
    std::byte* words = tile + band.token_scale_offset;
    std::byte* base = tile + band.token_base_offset;
    switch (layout.token_scale) {
      case ScaleType::kE6M10:
        choose_e6m10(&choice, words, scale);
        break;
      case ScaleType::kLog8:
        choose_log8(&choice, words, base, scale);
        break;
      case ScaleType::kLog4:
        choose_log4(&choice, words, base, scale);
        break;
      case ScaleType::kNone:
        return;
    }
    if (!layout.asymmetric) {
      const bool one_base = layout.token_scale != ScaleType::kE6M10;
      if (code_gain == nullptr || !one_base || band.bits > kMostGainBits) continue;
      code_gain[b] = projection_gain(band, columns, scale);
      store_word(base, float_to_scale(std::min(scale_to_float(load_word(base)) * code_gain[b], kScaleMax)));
      continue;
    }
    const float reach = outermost_level(band.bits);
    for (int t = 0; t < kPageTokens; ++t) {
      store_word(tile + band.token_low_offset + 2 * t, clamped_half(choice.centre[t] - scale[t] * reach));
    }
  }
}

void choose_token_metadata(const EncodeContext& context, float* code_gain, std::byte* tile) {
  alignas(64) float columns[kMaxHeadDim * kPageTokens];
  simd::kernels().encode->transpose(context.rows, context.row_stride, context.layout.head_dim, columns);
  choose_token_scales(context.layout, columns, context.channel_weight, code_gain, tile);
}

}  // namespace kvant

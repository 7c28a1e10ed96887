// Family "c": one scale per channel over the page, around the page mean (symmetric) or from a low
// (asymmetric; searched, then fitted to the codes). Mean and low are stored as centre.
#include <algorithm>

#include "formats/channel_statistics.h"
#include "formats/family.h"
#include "formats/layout.h"
#include "formats/scale_search.h"
#include "kvant/half.h"
#include "simd/kernels.h"

namespace kvant {
namespace {

Status configure(const FormatSpec& spec, TileLayout* layout) {
  layout->asymmetric = spec.asymmetric;
  layout->channel_scale = true;
  layout->channel_centre = true;
  return split_bands(spec, layout);
}

struct ChannelLanes {
  alignas(64) float centre[kMaxHeadDim];
  alignas(64) float anchor[kMaxHeadDim];
  alignas(64) float inverse_anchor[kMaxHeadDim];
  alignas(64) float scale[kMaxHeadDim];
  alignas(64) float low[kMaxHeadDim];
  alignas(64) uint8_t best[kMaxHeadDim];
};

// Symmetric: the stored mean, and the largest distance from it. Asymmetric: middle and half of the range.
void find_anchors(const ChannelStatistics& statistics, bool asymmetric, float top_level, int lanes,
                  ChannelLanes* out) {
  for (int c = 0; c < lanes; ++c) {
    const float low = statistics.low[c], high = statistics.high[c];
    const float centre = asymmetric ? 0.5f * (low + high) : half_to_float(clamped_half(statistics.mean[c]));
    const float radius = asymmetric ? 0.5f * (high - low) : std::max(high - centre, centre - low);
    const float anchor = std::min(radius / top_level, kScaleMax);
    out->centre[c] = centre;
    out->anchor[c] = anchor < 0.5f * kScaleMin ? 0.0f : anchor;
    out->inverse_anchor[c] = inverse_scale(out->anchor[c]);
  }
}

void choose_metadata(const EncodeContext& context, std::byte* tile) {
  const TileLayout& layout = context.layout;
  const ChannelStatistics statistics(context);
  if (statistics.live_tokens == 0) return;
  const int bits = layout.bands[0].bits;
  const float top_level = outermost_level(bits);
  const int lanes = static_cast<int>(context.row_stride);
  ChannelLanes channels;
  find_anchors(statistics, layout.asymmetric, top_level, lanes, &channels);
  simd::ScaleSearch search = {.x = statistics.rows,
                              .stride = context.row_stride,
                              .steps = statistics.live_tokens,
                              .lanes = lanes,
                              .bits = bits,
                              .centre = channels.centre,
                              .anchor = channels.anchor,
                              .inverse_anchor = channels.inverse_anchor,
                              .trials = scale_trials(bits)};
  fill_trial_ratios(&search);
  simd::kernels().encode->search_scale(search, channels.best);
  for (int c = 0; c < lanes; ++c) {
    const int best = channels.best[c];
    channels.scale[c] = best == search.trials ? 0.0f : channels.anchor[c] * search.ratio[best];
    channels.low[c] = channels.centre[c] - channels.scale[c] * top_level;
  }
  if (layout.asymmetric) {
    simd::kernels().encode->fit_line({.x = statistics.rows,
                                      .stride = context.row_stride,
                                      .steps = statistics.live_tokens,
                                      .lanes = lanes,
                                      .bits = bits,
                                      .scale = channels.scale,
                                      .low = channels.low});
  }
  for (int c = 0; c < layout.head_dim; ++c) {
    const uint16_t word = float_to_scale(channels.scale[c]);
    // The middle of the grid stays where it is when the scale is rounded.
    const float low = channels.low[c] + (channels.scale[c] - scale_to_float(word)) * top_level;
    store_word(tile + layout.channel_scale_offset + 2 * c, word);
    store_word(tile + layout.channel_centre_offset + 2 * c,
               clamped_half(layout.asymmetric ? low : channels.centre[c]));
  }
}

constexpr std::string_view kExamples[] = {"c8", "c7", "c6", "c5", "c4", "c3", "c2", "c8a", "c4a", "c2a"};

}  // namespace

extern const FormatFamily kChannelFamily;

const FormatFamily kChannelFamily = {
    .id = 4,
    .prefix = "c",
    .summary = "integer codes around the page mean or from a low, one scale per channel",
    .scale_axis = "channel x page",
    .examples = kExamples,
    .max_widths = 1,
    .may_be_asymmetric = true,
    .configure = configure,
    .choose_metadata = choose_metadata,
};

}  // namespace kvant

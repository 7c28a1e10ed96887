// Family "ct": channels are brought to equal size (page mean removed, divided by their root mean square over
// the page), then one scale per token and band, chosen for the least error of the values themselves.
#include <algorithm>
#include <cmath>

#include "formats/channel_statistics.h"
#include "formats/family.h"
#include "formats/layout.h"
#include "formats/scale_search.h"
#include "kvant/half.h"

namespace kvant {
namespace {

Status configure(const FormatSpec& spec, TileLayout* layout) {
  layout->token_scale = spec.scale;
  layout->channel_scale = true;
  layout->channel_centre = true;
  return split_bands(spec, layout);
}

void choose_metadata(const EncodeContext& context, std::byte* tile) {
  const TileLayout& layout = context.layout;
  const ChannelStatistics statistics(context);
  if (statistics.live_tokens == 0) return;
  alignas(64) float columns[kMaxHeadDim * kPageTokens];
  float weight[kMaxHeadDim];
  double weight_sum = 0;
  for (int c = 0; c < layout.head_dim; ++c) {
    const uint16_t centre_word = clamped_half(statistics.mean[c]);
    const float centre = half_to_float(centre_word);
    float squares = 0;
    for (int i = 0; i < statistics.live_tokens; ++i) {
      const float d = statistics.rows[i * context.row_stride + c] - centre;
      squares = squares + d * d;
    }
    const uint16_t scale_word =
        float_to_scale(std::sqrt(squares / static_cast<float>(statistics.live_tokens)));
    store_word(tile + layout.channel_centre_offset + 2 * c, centre_word);
    store_word(tile + layout.channel_scale_offset + 2 * c, scale_word);
    const float scale = scale_to_float(scale_word), inverse = inverse_scale(scale);
    for (int t = 0; t < kPageTokens; ++t) {
      const bool live = ((context.live >> t) & 1) != 0;
      columns[c * kPageTokens + t] =
          live ? (context.rows[t * context.row_stride + c] - centre) * inverse : 0.0f;
    }
    weight[c] = scale * scale * (context.channel_weight != nullptr ? context.channel_weight[c] : 1.0f);
    weight_sum += weight[c];
  }
  if (weight_sum <= 0) return;
  const auto norm = static_cast<float>(layout.head_dim / weight_sum);
  for (int c = 0; c < layout.head_dim; ++c) weight[c] = weight[c] * norm;
  choose_token_scales(layout, columns, weight, context.code_gain, tile);
}

constexpr std::string_view kExamples[] = {"ct8", "ct4", "ct3", "ct2", "ct5-3", "ct4-3", "ct4:s8", "ct4:s16"};

}  // namespace

extern const FormatFamily kChannelTokenFamily;

const FormatFamily kChannelTokenFamily = {
    .id = 6,
    .prefix = "ct",
    .summary = "channels brought to equal size over the page, then one scale per token and band",
    .scale_axis = "channel x page, token x band",
    .examples = kExamples,
    .max_widths = kMaxWidths,
    .default_scale = ScaleType::kLog4,
    .configure = configure,
    .choose_metadata = choose_metadata,
};

}  // namespace kvant

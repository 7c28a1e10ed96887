// Families "s" and "st": one scale for all values of a head, or of a layer's side, fixed before anything is
// written. For comparison: what one number for everything costs. The scale is EncodeInput::static_scale,
// which comes from calibration (the largest magnitude it saw); without one a tile takes that of its own
// largest value. It is stored as the base of the 4-bit token scales, whose words are 15, or 0 for tokens of
// zeros.
#include <algorithm>
#include <cmath>

#include "formats/family.h"
#include "formats/layout.h"
#include "kvant/half.h"

namespace kvant {
namespace {

Status configure(StaticScale scope, const FormatSpec& spec, TileLayout* layout) {
  layout->token_scale = spec.scale;
  layout->static_scale = scope;
  return split_bands(spec, layout);
}

void choose_metadata(const EncodeContext& context, std::byte* tile) {
  const TileLayout& layout = context.layout;
  const BandLayout& band = layout.bands[0];
  float largest = 0;
  for (int t = 0; t < kPageTokens; ++t) {
    const float* row = context.rows + static_cast<size_t>(t) * context.row_stride;
    float token = 0;
    for (int c = 0; c < layout.head_dim; ++c) token = std::max(token, std::fabs(row[c]));
    largest = std::max(largest, token);
    store_nibble(tile + band.token_scale_offset, t, token > 0 ? 15 : 0);
  }
  const float own = largest / outermost_level(band.bits);
  const float scale = context.static_scale > 0 ? context.static_scale : own;
  store_word(tile + band.token_base_offset, float_to_scale(std::min(scale, kScaleMax)));
}

constexpr std::string_view kHeadExamples[] = {"s8"};
constexpr std::string_view kTensorExamples[] = {"st8"};

}  // namespace

extern const FormatFamily kStaticHeadFamily, kStaticTensorFamily;

const FormatFamily kStaticHeadFamily = {
    .id = 7,
    .prefix = "s",
    .summary = "one fixed scale per head, from calibration",
    .scale_axis = "head",
    .examples = kHeadExamples,
    .comparison = true,
    .max_widths = 1,
    .default_scale = ScaleType::kLog4,
    .configure = [](const FormatSpec& spec,
                    TileLayout* layout) { return configure(StaticScale::kHead, spec, layout); },
    .choose_metadata = choose_metadata,
};

const FormatFamily kStaticTensorFamily = {
    .id = 8,
    .prefix = "st",
    .summary = "one fixed scale per layer and side, from calibration",
    .scale_axis = "tensor",
    .examples = kTensorExamples,
    .comparison = true,
    .max_widths = 1,
    .default_scale = ScaleType::kLog4,
    .configure = [](const FormatSpec& spec,
                    TileLayout* layout) { return configure(StaticScale::kTensor, spec, layout); },
    .choose_metadata = choose_metadata,
};

}  // namespace kvant

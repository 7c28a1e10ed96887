// Family "g": one scale (and low) per token and group of 32 channels.
#include "formats/family.h"
#include "formats/layout.h"
#include "formats/scale_search.h"

namespace kvant {
namespace {

constexpr int kGroupChannels = 32;
static_assert(kMaxHeadDim / kGroupChannels <= kMaxBands);

Status configure(const FormatSpec& spec, TileLayout* layout) {
  layout->token_scale = spec.scale;
  layout->asymmetric = spec.asymmetric;
  split_groups(spec, kGroupChannels, layout);
  return Status();
}

constexpr std::string_view kExamples[] = {"g8", "g5", "g4", "g3", "g2", "g8a", "g4a", "g4:s4", "g4a:s8"};

}  // namespace

extern const FormatFamily kGroupFamily;

const FormatFamily kGroupFamily = {
    .id = 5,
    .prefix = "g",
    .summary = "integer codes, one scale per token and 32 channels",
    .scale_axis = "token x 32 channels",
    .examples = kExamples,
    .comparison = true,
    .max_widths = 1,
    .may_be_asymmetric = true,
    .default_scale = ScaleType::kE6M10,
    .configure = configure,
    .choose_metadata = [](const EncodeContext& context,
                          std::byte* tile) { choose_token_metadata(context, nullptr, tile); },
};

}  // namespace kvant

// Family "t": one scale (and low, when asymmetric) per token and band.
#include "formats/family.h"
#include "formats/layout.h"
#include "formats/scale_search.h"

namespace kvant {
namespace {

Status configure(const FormatSpec& spec, TileLayout* layout) {
  layout->token_scale = spec.scale;
  layout->asymmetric = spec.asymmetric;
  return split_bands(spec, layout);
}

constexpr std::string_view kExamples[] = {
    "t8",       "t7",       "t6",       "t5",       "t4",       "t3",       "t2",
    "t7-5",     "t6-4",     "t5-3",     "t4-3",     "t4-2",     "t4-3-2",   "t6-4-3-3",
    "t4-4-3-3", "t5-3-2-2", "t3-3-2-2", "t8-6-5-5", "t7-5-4-4", "t5-3-3-3", "t4-2-2-2",
    "t2-2",     "t8a",      "t4a",      "t4:s8",    "t4:s16",   "t4a:s16",  "t5-3a:s8"};

}  // namespace

extern const FormatFamily kTokenFamily;

const FormatFamily kTokenFamily = {
    .id = 3,
    .prefix = "t",
    .summary = "integer codes, one scale per token and band",
    .scale_axis = "token x band",
    .examples = kExamples,
    .max_widths = kMaxWidths,
    .may_be_asymmetric = true,
    .default_scale = ScaleType::kLog4,
    .configure = configure,
    .choose_metadata = [](const EncodeContext& context,
                          std::byte* tile) { choose_token_metadata(context, context.code_gain, tile); },
};

}  // namespace kvant

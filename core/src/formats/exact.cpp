// Exact formats: rows of 16-bit floats. Magnitudes beyond 65504 are clamped by f16.
#include "formats/family.h"

namespace kvant {
namespace {

Status configure_exact(bool bf16, TileLayout* layout) {
  layout->exact = true;
  layout->exact_bf16 = bf16;
  return Status();
}

constexpr std::string_view kF16Examples[] = {"f16"};
constexpr std::string_view kBf16Examples[] = {"bf16"};

}  // namespace

extern const FormatFamily kF16Family, kBf16Family;

const FormatFamily kF16Family = {
    .id = 1,
    .prefix = "f16",
    .summary = "exact: IEEE binary16",
    .scale_axis = "none",
    .examples = kF16Examples,
    .exact = true,
    .configure = [](const FormatSpec&, TileLayout* layout) { return configure_exact(false, layout); },
};

const FormatFamily kBf16Family = {
    .id = 2,
    .prefix = "bf16",
    .summary = "exact: bfloat16",
    .scale_axis = "none",
    .examples = kBf16Examples,
    .exact = true,
    .configure = [](const FormatSpec&, TileLayout* layout) { return configure_exact(true, layout); },
};

}  // namespace kvant

// The one list of format families. Ids are permanent: they stand in stored tiles.
#include <vector>

#include "formats/family.h"

namespace kvant {

// A new family adds one line here.
#define KVANT_FORMAT_FAMILIES(FAMILY) \
  FAMILY(kF16Family)                  \
  FAMILY(kBf16Family)                 \
  FAMILY(kTokenFamily)                \
  FAMILY(kChannelFamily)              \
  FAMILY(kGroupFamily)                \
  FAMILY(kChannelTokenFamily)         \
  FAMILY(kStaticHeadFamily)           \
  FAMILY(kStaticTensorFamily)

#define KVANT_DECLARE_FAMILY(name) extern const FormatFamily name;
KVANT_FORMAT_FAMILIES(KVANT_DECLARE_FAMILY)
#undef KVANT_DECLARE_FAMILY

namespace {

#define KVANT_LIST_FAMILY(name) &name,
constexpr const FormatFamily* kFamilies[] = {KVANT_FORMAT_FAMILIES(KVANT_LIST_FAMILY)};
#undef KVANT_LIST_FAMILY

}  // namespace

std::span<const FormatFamily* const> all_families() { return kFamilies; }

std::vector<FamilyInfo> format_families() {
  std::vector<FamilyInfo> families;
  for (const FormatFamily* family : kFamilies) {
    families.push_back(
        {family->prefix, family->summary, family->scale_axis, family->examples, family->comparison});
  }
  return families;
}

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const FormatFamily* family : kFamilies) {
    for (std::string_view example : family->examples) names.emplace_back(example);
  }
  return names;
}

}  // namespace kvant

// A format name taken apart, without head size or side.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvant/format.h"

namespace kvant {

inline constexpr int kMaxWidths = 4;
inline constexpr int kMinBits = 2;
inline constexpr int kMaxBits = 8;

struct FormatSpec {
  const struct FormatFamily* family = nullptr;
  int n_widths = 0;  // 0 for exact formats
  std::array<uint8_t, kMaxWidths> widths{};
  bool asymmetric = false;
  ScaleType scale = ScaleType::kNone;  // of tokens; kNone where the family has no token scales
};

// Checks everything that does not depend on head size and side.
Result<FormatSpec> parse_format_spec(std::string_view name);
// The name with defaults left out: what Format::name() gives.
std::string format_spec_name(const FormatSpec& spec);

// Permanent id:
//   bits  0..15  widths, 4 bits each, first band lowest, 0 = none
//   bits 16..19  ScaleType of the token scales
//   bit  20      asymmetric
//   bits 21..23  0
//   bits 24..31  family
uint32_t format_spec_id(const FormatSpec& spec);
Result<FormatSpec> format_spec_from_id(uint32_t id);

}  // namespace kvant

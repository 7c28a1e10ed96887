#include "formats/spec.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "formats/family.h"
#include "kvant/edit_distance.h"

namespace kvant {
namespace {

struct ScaleName {
  std::string_view suffix;
  ScaleType type;
};
constexpr ScaleName kScaleNames[] = {
    {":s4", ScaleType::kLog4}, {":s8", ScaleType::kLog8}, {":s16", ScaleType::kE6M10}};

std::string nearest_name(std::string_view name) {
  std::vector<std::string_view> examples;
  for (const FormatFamily* family : all_families()) {
    examples.insert(examples.end(), family->examples.begin(), family->examples.end());
  }
  return nearest(name, examples);
}

// What a message may quote of a name that came from outside.
std::string quoted(std::string_view name) {
  std::string text = "'";
  for (char c : name.substr(0, 40)) text += (c >= 32 && c < 127) ? c : '?';
  return text + (name.size() > 40 ? "...'" : "'");
}

Status bad_name(std::string_view name, const std::string& why, const std::string& nearest) {
  return Status(Code::kInvalidArgument,
                "format " + quoted(name) + ": " + why + "; nearest: '" + nearest + "'");
}

const FormatFamily* find_family(std::string_view prefix) {
  for (const FormatFamily* family : all_families()) {
    if (family->prefix == prefix) return family;
  }
  return nullptr;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Reads "6-4-3-3" from the front of `rest` without a limit on the number of widths.
bool take_widths(std::string_view* rest, std::vector<int>* widths) {
  for (;;) {
    int width = 0;
    const auto [end, error] = std::from_chars(rest->data(), rest->data() + rest->size(), width);
    if (error != std::errc() || rest->empty() || !is_digit(rest->front())) return false;
    widths->push_back(width);
    rest->remove_prefix(static_cast<size_t>(end - rest->data()));
    if (rest->empty() || rest->front() != '-') return true;
    rest->remove_prefix(1);
  }
}

// Checks widths against the family and keeps the legal part in `spec`; false with `why` when they are not
// all.
bool keep_widths(const std::vector<int>& widths, FormatSpec* spec, std::string* why) {
  const auto max_widths = static_cast<size_t>(spec->family->max_widths);
  spec->n_widths = static_cast<int>(std::min(widths.size(), max_widths));
  for (int i = 0; i < spec->n_widths; ++i) {
    spec->widths[i] = static_cast<uint8_t>(std::clamp(widths[i], kMinBits, kMaxBits));
    if (spec->widths[i] != widths[i] && why->empty()) {
      *why = "width " + std::to_string(widths[i]) + " is not in 2..8";
    }
  }
  if (widths.size() > max_widths && why->empty()) {
    *why = std::to_string(widths.size()) + " widths, at most " + std::to_string(max_widths);
  }
  return why->empty();
}

// Reads what may follow the widths: "a", then ":sN".
bool take_suffix(std::string_view* rest, FormatSpec* spec, std::string* why) {
  if (!rest->empty() && rest->front() == 'a') {
    if (!spec->family->may_be_asymmetric) {
      *why = "family '" + std::string(spec->family->prefix) + "' has no asymmetric grid";
      return false;
    }
    spec->asymmetric = true;
    rest->remove_prefix(1);
  }
  for (const ScaleName& scale : kScaleNames) {
    if (*rest != scale.suffix) continue;
    if (spec->family->default_scale == ScaleType::kNone) {
      *why = "family '" + std::string(spec->family->prefix) + "' has no token scales";
      return false;
    }
    spec->scale = scale.type;
    rest->remove_prefix(rest->size());
  }
  if (!rest->empty()) *why = quoted(*rest) + " is not understood (a, :s4, :s8 or :s16 may follow the widths)";
  return rest->empty();
}

}  // namespace

Result<FormatSpec> parse_format_spec(std::string_view name) {
  FormatSpec spec;
  spec.family = find_family(name);
  if (spec.family != nullptr && spec.family->exact) return spec;

  size_t letters = 0;
  while (letters < name.size() && !is_digit(name[letters])) ++letters;
  spec.family = find_family(name.substr(0, letters));
  std::string_view rest = name.substr(letters);
  std::vector<int> widths;
  if (spec.family == nullptr || spec.family->exact || !take_widths(&rest, &widths)) {
    return bad_name(name, "not a known format", nearest_name(name));
  }
  spec.scale = spec.family->default_scale;
  std::string why;
  if (!keep_widths(widths, &spec, &why)) return bad_name(name, why, format_spec_name(spec));
  if (!take_suffix(&rest, &spec, &why)) return bad_name(name, why, format_spec_name(spec));
  return spec;
}

std::string format_spec_name(const FormatSpec& spec) {
  std::string name(spec.family->prefix);
  for (int i = 0; i < spec.n_widths; ++i) {
    if (i > 0) name += '-';
    name += std::to_string(spec.widths[i]);
  }
  if (spec.asymmetric) name += 'a';
  for (const ScaleName& scale : kScaleNames) {
    if (spec.scale == scale.type && spec.scale != spec.family->default_scale) name += scale.suffix;
  }
  return name;
}

uint32_t format_spec_id(const FormatSpec& spec) {
  uint32_t id = static_cast<uint32_t>(spec.family->id) << 24;
  for (int i = 0; i < spec.n_widths; ++i) id |= static_cast<uint32_t>(spec.widths[i]) << (4 * i);
  id |= static_cast<uint32_t>(spec.scale) << 16;
  if (spec.asymmetric) id |= 1u << 20;
  return id;
}

Result<FormatSpec> format_spec_from_id(uint32_t id) {
  FormatSpec spec;
  for (const FormatFamily* family : all_families()) {
    if (family->id == id >> 24) spec.family = family;
  }
  const Status unknown(Code::kMismatch, "format id " + std::to_string(id) + " is not known to this version");
  if (spec.family == nullptr) return unknown;
  for (int i = 0; i < spec.family->max_widths && !spec.family->exact; ++i) {
    const uint32_t width = (id >> (4 * i)) & 15u;
    if (width == 0) break;
    if (width < kMinBits || width > kMaxBits) return unknown;
    spec.widths[i] = static_cast<uint8_t>(width);
    spec.n_widths = i + 1;
  }
  const uint32_t scale = (id >> 16) & 15u;
  if (scale > static_cast<uint32_t>(ScaleType::kLog4)) return unknown;
  spec.scale = static_cast<ScaleType>(scale);
  spec.asymmetric = ((id >> 20) & 1u) != 0;
  const bool scaled = spec.scale != ScaleType::kNone;
  const bool possible = spec.family->exact == (spec.n_widths == 0) &&
                        scaled == (spec.family->default_scale != ScaleType::kNone) &&
                        (!spec.asymmetric || spec.family->may_be_asymmetric);
  if (!possible || format_spec_id(spec) != id) return unknown;
  return spec;
}

}  // namespace kvant

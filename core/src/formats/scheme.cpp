#include "kvant/scheme.h"

#include <algorithm>
#include <charconv>

#include "formats/spec.h"
#include "kvant/edit_distance.h"

namespace kvant {
namespace {

constexpr int kMaxWindow = 4096;
constexpr int kMaxSinks = 256;

// Text of one transform choice, by value.
constexpr std::string_view kTransformNames[] = {"auto", "none", "hadamard", "calibrated"};

constexpr std::string_view kFields = "k, v, w, s, kx, vx, fit";

Status bad_scheme(std::string_view text, const std::string& why) {
  std::string shown;
  for (char c : text.substr(0, 80)) shown += (c >= 32 && c < 127) ? c : '?';
  return Status(Code::kInvalidArgument, "scheme '" + shown + "': " + why);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Canonical name of a tile format; bare widths get the prefix "t".
Result<std::string> read_format(std::string_view value) {
  const bool bare = !value.empty() && is_digit(value.front());
  Result<FormatSpec> spec = parse_format_spec(bare ? "t" + std::string(value) : std::string(value));
  if (!spec.ok()) return spec.status();
  return format_spec_name(spec.value());
}

Status read_count(std::string_view field, std::string_view value, int most, int* out) {
  long long number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole =
      !value.empty() && end == value.data() + value.size() && error != std::errc::invalid_argument;
  if (whole && error == std::errc() && number >= 0 && number <= most) {
    *out = static_cast<int>(number);
    return Status();
  }
  std::string message = std::string(field) + "= takes 0.." + std::to_string(most);
  if (whole) message += "; nearest: " + std::to_string(value.front() == '-' ? 0 : most);
  return Status(Code::kInvalidArgument, message);
}

Status read_transform(std::string_view field, std::string_view value, TransformChoice* out) {
  for (size_t i = 0; i < std::size(kTransformNames); ++i) {
    if (value == kTransformNames[i]) {
      *out = static_cast<TransformChoice>(i);
      return Status();
    }
  }
  return Status(Code::kInvalidArgument, std::string(field) + "= takes auto, none, hadamard or calibrated");
}

Status read_field(std::string_view field, std::string_view value, Scheme* scheme) {
  if (field == "k" || field == "v") {
    Result<std::string> name = read_format(value);
    if (!name.ok()) return name.status();
    (field == "k" ? scheme->key_format : scheme->value_format) = name.value();
    return Status();
  }
  if (field == "w") return read_count(field, value, kMaxWindow, &scheme->window);
  if (field == "s") return read_count(field, value, kMaxSinks, &scheme->sinks);
  if (field == "kx") return read_transform(field, value, &scheme->key_transform);
  if (field == "vx") return read_transform(field, value, &scheme->value_transform);
  if (field == "fit") {
    if (value != "0" && value != "1") return Status(Code::kInvalidArgument, "fit= takes 0 or 1");
    scheme->fit = value == "1";
    return Status();
  }
  return Status(Code::kInvalidArgument, "'" + std::string(field.substr(0, 20)) +
                                            "' is not a field; fields are " + std::string(kFields));
}

std::string_view take_item(std::string_view* rest) {
  const size_t comma = std::min(rest->find(','), rest->size());
  const std::string_view item = rest->substr(0, comma);
  rest->remove_prefix(std::min(comma + 1, rest->size()));
  return item;
}

// Comma separated fields, each at most once. Keys that are given stay as they are unless fit= is given too.
Status read_fields(std::string_view text, Scheme* scheme) {
  std::vector<std::string_view> seen;
  bool more = !text.empty();
  while (more) {
    more = text.find(',') != std::string_view::npos;
    const std::string_view item = take_item(&text);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      return Status(Code::kInvalidArgument, "'" + std::string(item.substr(0, 40)) +
                                                "' is neither a registered scheme nor FIELD=VALUE");
    }
    const std::string_view field = item.substr(0, equals);
    if (std::find(seen.begin(), seen.end(), field) != seen.end()) {
      return Status(Code::kInvalidArgument, std::string(field.substr(0, 20)) + "= is given twice");
    }
    seen.push_back(field);
    KVANT_RETURN_IF_ERROR(read_field(field, item.substr(equals + 1), scheme));
    if (field == "k" && std::find(seen.begin(), seen.end(), "fit") == seen.end()) scheme->fit = false;
  }
  return Status();
}

const RegisteredScheme* find_registered(std::string_view name) {
  for (const RegisteredScheme& scheme : registered_schemes()) {
    if (scheme.name == name) return &scheme;
  }
  return nullptr;
}

std::string nearest_registered(std::string_view name) {
  std::vector<std::string_view> names;
  for (const RegisteredScheme& scheme : registered_schemes()) names.push_back(scheme.name);
  return nearest(name, names);
}

std::string registered_names() {
  std::string names;
  for (const RegisteredScheme& scheme : registered_schemes()) {
    if (!scheme.comparison) names += (names.empty() ? "" : ", ") + std::string(scheme.name);
  }
  return names;
}

}  // namespace

const std::vector<RegisteredScheme>& registered_schemes() {
  // Without calibration keys go per channel: a plain rotation of keys fails on models
  // whose keys have large constant parts.
  static const std::vector<RegisteredScheme> kSchemes = {
      {"exact", "k=f16,v=f16", "", "all rows stay in f16"},
      {"kv8", "k=c8a,v=t7,w=128,s=16", "k=t8,v=t8,w=128,s=16", "8 bits, next to exact"},
      {"kv6", "k=c6a,v=t6,w=128,s=16", "k=t8-6-5-5,v=t6,w=128,s=16,fit=1", "6 bits"},
      {"kv5", "k=c5a,v=t5,w=128,s=16", "k=t7-5-4-4,v=t5,w=128,s=16,fit=1", "5 bits"},
      {"kv4", "k=c4a,v=t4,w=128,s=16", "k=t6-4-3-3,v=t4,w=128,s=16,fit=1", "4 bits"},
      {"kv3", "k=c3a,v=t3,w=128,s=16", "k=t5-3-3-3,v=t3,w=128,s=16,fit=1", "3 bits, visible loss"},
      {"kv2", "k=c2a,v=t2,w=128,s=16", "k=t4-2-2-2,v=t2-2,w=128,s=16,fit=1", "2 bits, large loss"},
      {"cmp-static-tensor", "k=st8,v=st8,w=0,s=0", "", "8 bits, one fixed scale per layer and side", true},
      {"cmp-static-head", "k=s8,v=s8,w=0,s=0", "", "8 bits, one fixed scale per head", true},
      {"cmp-kivi4", "k=c4a,v=g4a,w=128,s=0,kx=none,vx=none", "",
       "KIVI's layout: keys per channel and page, values per token and 32 channels", true},
      {"cmp-kivi2", "k=c2a,v=g2a,w=128,s=0,kx=none,vx=none", "", "the same with 2 bits", true},
      {"cmp-groups8", "k=g8,v=g8,w=0,s=0,kx=hadamard,vx=hadamard", "",
       "groups of 32 channels after a rotation, as llama.cpp's q8_0", true},
      {"cmp-groups4", "k=g4,v=g4,w=0,s=0,kx=hadamard,vx=hadamard", "",
       "groups of 32 channels after a rotation, as llama.cpp's q4_0", true},
  };
  return kSchemes;
}

Result<Scheme> parse_scheme(std::string_view text, bool calibrated) {
  Scheme scheme;
  scheme.name = std::string(text);
  if (text.empty()) {
    return bad_scheme(text,
                      "empty; take one of " + registered_names() + ", or fields " + std::string(kFields));
  }
  std::string_view rest = text;
  const std::string_view first = take_item(&rest);
  const RegisteredScheme* registered = find_registered(first);
  if (registered != nullptr) {
    const bool use_calibrated = calibrated && !registered->calibrated.empty();
    KVANT_RETURN_IF_ERROR(read_fields(use_calibrated ? registered->calibrated : registered->plain, &scheme));
    if (first.size() == text.size()) return scheme;
    if (rest.empty()) return bad_scheme(text, "ends in a comma");
  } else if (first.find('=') == std::string_view::npos) {
    return bad_scheme(text, "not known; take one of " + registered_names() + ", or fields " +
                                std::string(kFields) + "; nearest is " + nearest_registered(first));
  } else {
    rest = text;
  }
  const Status status = read_fields(rest, &scheme);
  if (!status.ok()) return bad_scheme(text, status.message());
  return scheme;
}

std::string to_string(const Scheme& scheme) {
  const auto transform = [](TransformChoice choice) {
    return std::string(kTransformNames[static_cast<size_t>(choice)]);
  };
  return "k=" + scheme.key_format + ",v=" + scheme.value_format + ",w=" + std::to_string(scheme.window) +
         ",s=" + std::to_string(scheme.sinks) + ",kx=" + transform(scheme.key_transform) +
         ",vx=" + transform(scheme.value_transform) + ",fit=" + (scheme.fit ? "1" : "0");
}

}  // namespace kvant

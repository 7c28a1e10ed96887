// Schemes: what a user picks. For one layer and KV head: key and value format, transforms, window, sinks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvant/status.h"

namespace kvant {

enum class TransformChoice : uint8_t { kAuto = 0, kIdentity, kHadamard, kCalibrated };

// Grammar (docs/formats.md): a registered name ("exact", "kv8", "kv4", ...), or fields separated by commas:
//   k=FORMAT v=FORMAT   tile formats; bare widths "5-3" mean "t5-3"; f16/bf16 keep a side exact
//   w=N                 exact recent window in tokens, 0..4096
//   s=N                 exact first tokens of a sequence, 0..256
//   kx=, vx=            transform: auto | none | hadamard | calibrated
//   fit=1               bits move between the key bands of all heads, to where the model's calibration
//   expects
//                       errors to cost most, at no more bytes than k= says; fit=0 not, the default beside k=
// A registered name may be followed by fields that override it: "kv4,w=256".
struct Scheme {
  std::string name;  // as the user wrote it
  std::string key_format = "f16";
  std::string value_format = "f16";
  TransformChoice key_transform = TransformChoice::kAuto;
  TransformChoice value_transform = TransformChoice::kAuto;
  int window = 128;
  int sinks = 16;
  bool fit = false;

  // Nothing is ever sealed: all rows stay f16.
  bool exact() const { return key_format == "f16" && value_format == "f16"; }
};

struct RegisteredScheme {
  std::string_view name;
  std::string_view plain;       // definition without calibration
  std::string_view calibrated;  // definition when the model's calibration is at hand; empty: same
  std::string_view summary;
  bool comparison = false;  // shows what others do, never a default
};
const std::vector<RegisteredScheme>& registered_schemes();

// `calibrated`: whether a calibration of the model is at hand (decides which definition a name gets).
Result<Scheme> parse_scheme(std::string_view text, bool calibrated = false);
// Canonical text with all fields, accepted by parse_scheme.
std::string to_string(const Scheme& scheme);

}  // namespace kvant

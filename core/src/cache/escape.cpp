#include "cache/escape.h"

#include <algorithm>
#include <cstdio>

#include "formats/spec.h"

namespace kvant {
namespace {

// Squared error over square of normal data at 2 to 8 bits with searched scales (docs/formats.md).
constexpr double kRelativeError[kMaxBits + 1] = {1, 1, .113, .034, .0099, .0027, .0007, .0002, .00005};

// One bit more in every band; false when there is none to add.
bool widen(Format* format) {
  Result<FormatSpec> spec = format_spec_from_id(format->id());
  if (!spec.ok()) return false;
  bool wider = false;
  for (int i = 0; i < spec.value().n_widths; ++i) {
    uint8_t& width = spec.value().widths[i];
    wider = wider || width < kMaxBits;
    width = static_cast<uint8_t>(std::min<int>(width + 1, kMaxBits));
  }
  if (!wider) return false;
  Result<Format> made =
      Format::parse(format_spec_name(spec.value()), format->layout().side, format->layout().head_dim);
  if (!made.ok()) return false;
  *format = std::move(made.value());
  return true;
}

}  // namespace

double expected_error(const ErrorModel& model, const Format& format, TransformKind transform) {
  if (format.exact() || model.spectrum.empty()) return 0.0;
  const TileLayout& layout = format.layout();
  const bool per_channel = layout.channel_scale || layout.channel_centre;
  double sum = 0;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    double weight = static_cast<double>(per_channel ? model.per_channel : model.rotated) * band.channels /
                    layout.head_dim;
    if (transform == TransformKind::kDense && !per_channel) {
      weight = 0;
      for (int c = band.first_channel; c < band.first_channel + band.channels; ++c) {
        if (c < static_cast<int>(model.spectrum.size())) weight += static_cast<double>(model.spectrum[c]);
      }
    }
    sum += kRelativeError[band.bits] * weight;
  }
  return sum * std::max(1.0, static_cast<double>(model.excess));
}

std::string widen_until(double limit, const ErrorModel& model, TransformKind transform, Side side, int head,
                        Format* format) {
  const double asked = expected_error(model, *format, transform);
  if (asked <= limit) return "";
  const std::string before = format->name();
  while (expected_error(model, *format, transform) > limit && widen(format)) {
  }
  if (format->name() == before) return "";
  char text[192];
  std::snprintf(text, sizeof text, "%s of KV head %d: expected error %.3g at %s is above %.3g, %s has %.3g",
                side == Side::kKey ? "keys" : "values", head, asked, before.c_str(), limit,
                format->name().c_str(), expected_error(model, *format, transform));
  return text;
}

}  // namespace kvant

#include "cache/escape.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "formats/spec.h"

namespace kvant {
namespace {

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

double measured_over_expected(const ErrorModel& model) {
  return std::max(1.0, static_cast<double>(model.excess));
}

}  // namespace

double relative_error(int bits) { return kRelativeError[bits]; }

double band_cost(const ErrorModel& model, int first_channel, int channels) {
  const int end = std::min(first_channel + channels, static_cast<int>(model.spectrum.size()));
  double sum = 0;
  for (int c = first_channel; c < end; ++c) sum += static_cast<double>(model.spectrum[c]);
  return sum * measured_over_expected(model);
}

double expected_error(const ErrorModel& model, const Format& format, TransformKind transform) {
  if (format.exact() || model.spectrum.empty()) return 0.0;
  const TileLayout& layout = format.layout();
  const bool per_channel = layout.channel_scale || layout.channel_centre;
  const bool calibrated = transform == TransformKind::kDense && !per_channel;
  const double flat = static_cast<double>(per_channel ? model.per_channel : model.rotated) *
                      measured_over_expected(model) / layout.head_dim;
  double sum = 0;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    const double cost =
        calibrated ? band_cost(model, band.first_channel, band.channels) : flat * band.channels;
    sum += relative_error(band.bits) * cost;
  }
  return sum;
}

std::string widen_until(double limit, const ErrorModel& model, TransformKind transform, Side side, int head,
                        Format* format) {
  const double asked = expected_error(model, *format, transform);
  if (asked <= limit) return "";
  const std::string before = format->name();
  const std::string whose =
      (side == Side::kKey ? "keys of KV head " : "values of KV head ") + std::to_string(head);
  if (std::isnan(asked)) {
    return whose + ": expected error is not a number at " + before +
           ", the calibration cannot tell whether it holds";
  }
  while (expected_error(model, *format, transform) > limit && widen(format)) {
  }
  if (format->name() == before) return "";
  char text[192];
  std::snprintf(text, sizeof text, "%s: expected error %.3g at %s is above %.3g, %s has %.3g", whose.c_str(),
                asked, before.c_str(), limit, format->name().c_str(),
                expected_error(model, *format, transform));
  return text;
}

}  // namespace kvant

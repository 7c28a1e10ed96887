#include "cache/fit.h"

#include <algorithm>
#include <cmath>
#include <queue>

#include "cache/escape.h"
#include "formats/family.h"
#include "formats/spec.h"
#include "kvant/format.h"

namespace kvant {
namespace {

struct Band {
  size_t layer = 0, head = 0;
  int index = 0;
  int channels = 0;
  double cost = 0;  // band_cost
  int bits = 0;

  // Error that one more bit takes away, per bit of storage.
  double gain() const { return cost * (relative_error(bits) - relative_error(bits + 1)) / channels; }
};

// A cost that is not a number has no place in an order of gains.
bool orders_bands(const ErrorModel& model) {
  return std::isfinite(model.excess) && std::all_of(model.spectrum.begin(), model.spectrum.end(),
                                                    [](float x) { return std::isfinite(x) && x >= 0; });
}

// Why the keys of this layer cannot be fitted; empty when they can. resolve_layers has counted the heads.
std::string why_not(const LayerRequest& layer) {
  const char* none = "fit=1: there is no calibration to fit the keys to";
  if (layer.calibration == nullptr || layer.calibration->key.empty()) return none;
  for (size_t h = 0; h < layer.calibration->key.size(); ++h) {
    const auto& key = layer.calibration->key[h];
    const std::string head = ": KV head " + std::to_string(h);
    if (key == nullptr) return none + head + " has none";
    if (key->error.spectrum.empty()) return none + head + " has no costs";
    if (!orders_bands(key->error)) return none + head + " has costs that are not finite or below zero";
  }
  return "";
}

Status check_fit(const Scheme& scheme, const FormatSpec& spec) {
  const bool calibrated =
      scheme.key_transform == TransformChoice::kAuto || scheme.key_transform == TransformChoice::kCalibrated;
  if (spec.family->prefix == "t" && !spec.asymmetric && calibrated) return {};
  return {Code::kUnsupported,
          "fit=1 takes symmetric keys of family t in their calibrated basis, not k=" + scheme.key_format +
              " with kx=" + (calibrated ? "calibrated" : "none or hadamard") +
              "; leave fit=1 out, or take k=t6-4-3-3"};
}

// Greedy is optimal: what another bit takes away falls with every bit that a band already has.
void spend(double bits, std::vector<Band>* bands) {
  const auto less = [&](size_t a, size_t b) {
    const double x = (*bands)[a].gain(), y = (*bands)[b].gain();
    return x != y ? x < y : a > b;
  };
  std::priority_queue<size_t, std::vector<size_t>, decltype(less)> next(less);
  for (size_t i = 0; i < bands->size(); ++i) {
    if ((*bands)[i].bits < kMaxBits) next.push(i);
  }
  while (!next.empty()) {
    const size_t best = next.top();
    next.pop();
    Band& band = (*bands)[best];
    if (band.channels > bits) continue;
    bits -= band.channels;
    ++band.bits;
    if (band.bits < kMaxBits) next.push(best);
  }
}

}  // namespace

Result<std::vector<FittedKeys>> fit_key_formats(const Scheme& scheme,
                                                const std::vector<LayerRequest>& layers) {
  const Result<FormatSpec> spec = parse_format_spec(scheme.key_format);
  if (!spec.ok()) return spec.status();
  KVANT_RETURN_IF_ERROR(check_fit(scheme, spec.value()));
  std::vector<FittedKeys> fitted(layers.size());
  std::vector<std::vector<FormatSpec>> specs(layers.size());
  std::vector<Band> bands;
  double bits = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    fitted[l].reason = why_not(layers[l]);
    if (!fitted[l].reason.empty()) continue;
    const Result<Format> format = Format::parse(scheme.key_format, Side::kKey, layers[l].shape.key_dim);
    if (!format.ok()) {
      return Status(format.status().code(),
                    of_layer(layers[l]) + "k=" + scheme.key_format + ": " + format.status().message());
    }
    const TileLayout& layout = format.value().layout();
    specs[l].assign(layers[l].shape.n_kv_heads, spec.value());
    int narrowest = kMaxBits;
    for (int b = 0; b < layout.n_bands; ++b) narrowest = std::min<int>(narrowest, layout.bands[b].bits);
    for (size_t h = 0; h < specs[l].size(); ++h) {
      const ErrorModel& model = layers[l].calibration->key[h]->error;
      for (int b = 0; b < layout.n_bands; ++b) {
        const BandLayout& band = layout.bands[b];
        bands.push_back(
            {l, h, b, band.channels, band_cost(model, band.first_channel, band.channels), narrowest});
        bits += static_cast<double>(band.channels) * (band.bits - narrowest);
      }
    }
  }
  spend(bits, &bands);
  for (const Band& band : bands) {
    specs[band.layer][band.head].widths[band.index] = static_cast<uint8_t>(band.bits);
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const FormatSpec& head : specs[l]) fitted[l].formats.push_back(format_spec_name(head));
  }
  return fitted;
}

}  // namespace kvant

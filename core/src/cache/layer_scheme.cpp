#include "kvant/layer_scheme.h"

#include <algorithm>

#include "cache/escape.h"
#include "cache/fit.h"
#include "formats/layout.h"

namespace kvant {
namespace {

const char* kind_name(TransformKind kind) {
  switch (kind) {
    case TransformKind::kIdentity:
      return "none";
    case TransformKind::kHadamard:
      return "hadamard";
    case TransformKind::kDense:
      return "calibrated";
  }
  return "?";
}

double mean_bits(const LayerScheme& layer, Side side) {
  if (layer.exact || layer.heads.empty()) return 16.0;
  double sum = 0;
  for (const HeadScheme& head : layer.heads) {
    sum += format_of(head, side).bits_per_value();
  }
  return sum / static_cast<double>(layer.heads.size());
}

size_t tile_bytes(const LayerScheme& layer, Side side) {
  size_t bytes = 0;
  for (const HeadScheme& head : layer.heads) {
    const Format& format = format_of(head, side);
    if (!format.exact()) bytes += format.tile_bytes();
  }
  return bytes;
}

// Formats whose statistics are per channel lose them under a rotation.
bool per_channel(const Format& format) {
  return format.layout().channel_scale || format.layout().channel_centre;
}

// The calibrated basis, rotated inside each band of the layout.
Result<std::shared_ptr<const Transform>> banded_transform(const CalibratedBasis& basis,
                                                          const TileLayout& layout, Side side) {
  const int dim = basis.dim;
  std::vector<float> forward(basis.forward.size());
  std::vector<float> column, rotated;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    const Result<Transform> rotation = Transform::hadamard(band.channels);
    if (!rotation.ok()) return rotation.status();
    column.resize(band.channels);
    rotated.resize(band.channels);
    for (int j = 0; j < dim; ++j) {
      for (int i = 0; i < band.channels; ++i) {
        column[i] = basis.forward[static_cast<size_t>(band.first_channel + i) * dim + j];
      }
      rotation.value().apply(column.data(), rotated.data(), 1);
      for (int i = 0; i < band.channels; ++i) {
        forward[static_cast<size_t>(band.first_channel + i) * dim + j] = rotated[i];
      }
    }
  }
  Result<Transform> transform = Transform::dense(dim, forward, side);
  if (!transform.ok()) return transform.status();
  transform.value().set_centre(basis.centre);
  return std::make_shared<const Transform>(std::move(transform.value()));
}

Result<std::shared_ptr<const Transform>> choose_transform(
    TransformChoice choice, const Format& format, Side side, int dim,
    const std::vector<std::shared_ptr<const CalibratedBasis>>* calibrated, int head) {
  const bool have =
      calibrated != nullptr && head < static_cast<int>(calibrated->size()) && (*calibrated)[head] != nullptr;
  if (choice == TransformChoice::kAuto) {
    if (format.exact() || per_channel(format) || format.layout().static_scale != StaticScale::kNone) {
      choice = TransformChoice::kIdentity;
    } else {
      choice = have ? TransformChoice::kCalibrated : TransformChoice::kHadamard;
    }
  }
  const std::string option = side == Side::kKey ? "kx" : "vx";
  if (format.exact()) return std::make_shared<const Transform>(Transform::identity(dim));
  switch (choice) {
    case TransformChoice::kIdentity:
      return std::make_shared<const Transform>(Transform::identity(dim));
    case TransformChoice::kHadamard: {
      Result<Transform> transform = Transform::hadamard(dim);
      if (!transform.ok()) return transform.status();
      return std::make_shared<const Transform>(std::move(transform.value()));
    }
    case TransformChoice::kCalibrated:
      if (!have) {
        return Status(Code::kUnsupported, option + "=calibrated: there is no calibration for KV head " +
                                              std::to_string(head) + "; make one or use " + option +
                                              "=hadamard");
      }
      if ((*calibrated)[head]->dim != dim) {
        return Status(Code::kMismatch, option + "=calibrated: the calibration is for head size " +
                                           std::to_string((*calibrated)[head]->dim) + ", the model has " +
                                           std::to_string(dim));
      }
      return banded_transform(*(*calibrated)[head], format.layout(), side);
    case TransformChoice::kAuto:
      break;
  }
  return Status(Code::kInternal, "transform choice");
}

Status check_shape(const LayerShape& shape) {
  for (const int dim : {shape.key_dim, shape.value_dim}) {
    if (dim < kMinHeadDim || dim > kMaxHeadDim || dim % 8 != 0) {
      int nearest = dim < kMinHeadDim ? kMinHeadDim : dim > kMaxHeadDim ? kMaxHeadDim : (dim + 4) / 8 * 8;
      return {Code::kUnsupported, "head size " + std::to_string(dim) +
                                      " is not a multiple of 8 between 32 and 256; the nearest is " +
                                      std::to_string(nearest)};
    }
  }
  if (shape.n_kv_heads < 1 || shape.n_query_heads < 1 || shape.n_query_heads % shape.n_kv_heads != 0) {
    return {Code::kUnsupported, std::to_string(shape.n_query_heads) + " query heads do not divide among " +
                                    std::to_string(shape.n_kv_heads) + " KV heads"};
  }
  if (shape.n_query_heads / shape.n_kv_heads > 256) {
    return {Code::kUnsupported, "more than 256 query heads per KV head"};
  }
  return {};
}

// A basis per head of another layer says nothing about the heads of this one.
Status check_calibration(const LayerRequest& layer) {
  if (layer.calibration == nullptr) return {};
  for (const Side side : {Side::kKey, Side::kValue}) {
    const auto& bases = side == Side::kKey ? layer.calibration->key : layer.calibration->value;
    if (bases.empty() || static_cast<int>(bases.size()) == layer.shape.n_kv_heads) continue;
    return {Code::kMismatch, std::string("the calibration has ") + (side == Side::kKey ? "keys" : "values") +
                                 " of " + std::to_string(bases.size()) + " KV heads, the layer has " +
                                 std::to_string(layer.shape.n_kv_heads)};
  }
  return {};
}

}  // namespace

size_t LayerScheme::key_tile_bytes() const { return tile_bytes(*this, Side::kKey); }
size_t LayerScheme::value_tile_bytes() const { return tile_bytes(*this, Side::kValue); }
double LayerScheme::key_bits() const { return mean_bits(*this, Side::kKey); }
double LayerScheme::value_bits() const { return mean_bits(*this, Side::kValue); }

namespace {

struct SideChoice {
  Format format;
  std::shared_ptr<const Transform> transform;
  float static_scale = 0;
};

// Step of a static format: the largest magnitude of the head, or of all heads, at the outermost level. 0 for
// other formats and where calibration does not know it.
float static_scale(const Format& format, const std::vector<std::shared_ptr<const CalibratedBasis>>* bases,
                   int head) {
  const StaticScale scope = format.layout().static_scale;
  if (scope == StaticScale::kNone || bases == nullptr) return 0.0f;
  float largest = 0;
  for (int h = 0; h < static_cast<int>(bases->size()); ++h) {
    if ((*bases)[h] == nullptr || (scope == StaticScale::kHead && h != head)) continue;
    largest = std::max(largest, (*bases)[h]->error.largest);
  }
  return largest / outermost_level(format.layout().bands[0].bits);
}

// Schemes for comparison show what their layout does, broken heads included.
bool for_comparison(const Scheme& scheme) {
  const std::string_view full = scheme.name;
  const std::string_view name = full.substr(0, full.find(','));
  const auto& all = registered_schemes();
  return std::any_of(all.begin(), all.end(),
                     [&](const RegisteredScheme& s) { return s.comparison && s.name == name; });
}

// Format and transform of one head and side; `reason` grows when the format is not the one asked for.
Result<SideChoice> resolve_side(const Scheme& scheme, const std::string& name, const LayerShape& shape,
                                Side side, int head, const LayerCalibration* calibration,
                                std::string* reason) {
  const bool key = side == Side::kKey;
  const int dim = key ? shape.key_dim : shape.value_dim;
  const TransformChoice wanted = key ? scheme.key_transform : scheme.value_transform;
  const auto* bases = calibration == nullptr ? nullptr : key ? &calibration->key : &calibration->value;
  Result<Format> format = Format::parse(name, side, dim);
  if (!format.ok()) {
    return Status(format.status().code(), (key ? "k=" : "v=") + name + ": " + format.status().message());
  }
  auto transform = choose_transform(wanted, format.value(), side, dim, bases, head);
  if (!transform.ok()) return transform.status();
  SideChoice choice{format.value(), transform.value(), static_scale(format.value(), bases, head)};
  if (format.value().layout().static_scale != StaticScale::kNone && choice.static_scale == 0) {
    *reason += (reason->empty() ? "" : "; ") + (key ? std::string("keys") : std::string("values")) +
               " of KV head " + std::to_string(head) +
               ": without calibration the fixed scale is not known, each tile takes its own";
  }
  if (bases == nullptr || head >= static_cast<int>(bases->size()) || (*bases)[head] == nullptr) return choice;
  if (for_comparison(scheme)) return choice;
  const std::string why = widen_until(key ? kMaxKeyError : kMaxValueError, (*bases)[head]->error,
                                      choice.transform->kind(), side, head, &choice.format);
  if (!why.empty()) *reason += (reason->empty() ? "" : "; ") + why;
  return choice;
}

std::string head_text(const HeadScheme& head) {
  return "k=" + head.key_format.name() + " v=" + head.value_format.name();
}

// What the first head runs, then the heads that differ.
std::string effective_text(const LayerScheme& layer) {
  if (layer.exact) return "exact";
  const HeadScheme& first = layer.heads.front();
  std::string text = head_text(first) + " kx=" + kind_name(first.key_transform->kind()) +
                     " vx=" + kind_name(first.value_transform->kind());
  std::string others;
  for (size_t h = 1; h < layer.heads.size(); ++h) {
    if (head_text(layer.heads[h]) == head_text(first)) continue;
    others += (others.empty() ? " (head " : ", head ") + std::to_string(h) + " " + head_text(layer.heads[h]);
  }
  return others.empty() ? text : text + others + ")";
}

Result<LayerScheme> resolve_heads(const Scheme& scheme, const LayerShape& shape,
                                  const LayerCalibration* calibration, const FittedKeys& keys) {
  LayerScheme layer;
  layer.shape = shape;
  layer.exact = scheme.exact();
  layer.requested = to_string(scheme);
  layer.reason = keys.reason;
  for (int head = 0; head < shape.n_kv_heads; ++head) {
    const std::string& key_format = keys.formats.empty() ? scheme.key_format : keys.formats[head];
    auto key = resolve_side(scheme, key_format, shape, Side::kKey, head, calibration, &layer.reason);
    if (!key.ok()) return key.status();
    auto value =
        resolve_side(scheme, scheme.value_format, shape, Side::kValue, head, calibration, &layer.reason);
    if (!value.ok()) return value.status();
    layer.heads.push_back({.key_format = key.value().format,
                           .value_format = value.value().format,
                           .key_transform = key.value().transform,
                           .value_transform = value.value().transform,
                           .key_static_scale = key.value().static_scale,
                           .value_static_scale = value.value().static_scale});
  }
  layer.effective = effective_text(layer);
  return layer;
}

}  // namespace

Result<LayerScheme> resolve_layer(const Scheme& scheme, const LayerShape& shape,
                                  const LayerCalibration* calibration) {
  Result<std::vector<LayerScheme>> layers = resolve_layers(scheme, {{shape, calibration, ""}});
  if (!layers.ok()) return layers.status();
  return std::move(layers.value().front());
}

Result<std::vector<LayerScheme>> resolve_layers(const Scheme& scheme,
                                                const std::vector<LayerRequest>& layers) {
  for (const LayerRequest& layer : layers) {
    Status status = check_shape(layer.shape);
    if (status.ok()) status = check_calibration(layer);
    if (!status.ok()) return Status(status.code(), of_layer(layer) + status.message());
  }
  std::vector<FittedKeys> keys(layers.size());
  if (scheme.fit) {
    auto fitted = fit_key_formats(scheme, layers);
    if (!fitted.ok()) return fitted.status();
    keys = std::move(fitted.value());
  }
  std::vector<LayerScheme> out;
  for (size_t i = 0; i < layers.size(); ++i) {
    Result<LayerScheme> resolved = resolve_heads(scheme, layers[i].shape, layers[i].calibration, keys[i]);
    if (!resolved.ok()) {
      return Status(resolved.status().code(), of_layer(layers[i]) + resolved.status().message());
    }
    out.push_back(std::move(resolved.value()));
  }
  return out;
}

}  // namespace kvant

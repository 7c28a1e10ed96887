#include "kvant/layer_scheme.h"

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
    sum += (side == Side::kKey ? head.key_format : head.value_format).bits_per_value();
  }
  return sum / static_cast<double>(layer.heads.size());
}

size_t tile_bytes(const LayerScheme& layer, Side side) {
  size_t bytes = 0;
  for (const HeadScheme& head : layer.heads) {
    const Format& format = side == Side::kKey ? head.key_format : head.value_format;
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
                                                          const TileLayout& layout) {
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
  Result<Transform> transform = Transform::dense(dim, forward);
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
    if (format.exact() || per_channel(format)) {
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
      return banded_transform(*(*calibrated)[head], format.layout());
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

}  // namespace

size_t LayerScheme::key_tile_bytes() const { return tile_bytes(*this, Side::kKey); }
size_t LayerScheme::value_tile_bytes() const { return tile_bytes(*this, Side::kValue); }
double LayerScheme::key_bits() const { return mean_bits(*this, Side::kKey); }
double LayerScheme::value_bits() const { return mean_bits(*this, Side::kValue); }

Result<LayerScheme> resolve_layer(const Scheme& scheme, const LayerShape& shape,
                                  const LayerCalibration* calibration) {
  KVANT_RETURN_IF_ERROR(check_shape(shape));
  LayerScheme layer;
  layer.shape = shape;
  layer.exact = scheme.exact();
  layer.requested = to_string(scheme);
  for (int head = 0; head < shape.n_kv_heads; ++head) {
    Result<Format> key = Format::parse(scheme.key_format, Side::kKey, shape.key_dim);
    if (!key.ok())
      return Status(key.status().code(), "k=" + scheme.key_format + ": " + key.status().message());
    Result<Format> value = Format::parse(scheme.value_format, Side::kValue, shape.value_dim);
    if (!value.ok()) {
      return Status(value.status().code(), "v=" + scheme.value_format + ": " + value.status().message());
    }
    auto kx = choose_transform(scheme.key_transform, key.value(), Side::kKey, shape.key_dim,
                               calibration != nullptr ? &calibration->key : nullptr, head);
    if (!kx.ok()) return kx.status();
    auto vx = choose_transform(scheme.value_transform, value.value(), Side::kValue, shape.value_dim,
                               calibration != nullptr ? &calibration->value : nullptr, head);
    if (!vx.ok()) return vx.status();
    layer.heads.push_back({key.value(), value.value(), kx.value(), vx.value()});
  }
  const HeadScheme& first = layer.heads.front();
  layer.effective = layer.exact ? "exact"
                                : "k=" + first.key_format.name() + " v=" + first.value_format.name() +
                                      " kx=" + kind_name(first.key_transform->kind()) +
                                      " vx=" + kind_name(first.value_transform->kind());
  return layer;
}

}  // namespace kvant

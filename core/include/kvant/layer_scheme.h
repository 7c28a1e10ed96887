// A scheme made concrete for one layer: formats and transforms per KV head, and why it differs from what was
// asked for, if it does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "kvant/scheme.h"
#include "kvant/status.h"
#include "kvant/transform.h"
#include "kvant/types.h"

namespace kvant {

struct HeadScheme {
  Format key_format;
  Format value_format;
  std::shared_ptr<const Transform> key_transform;    // never null
  std::shared_ptr<const Transform> value_transform;  // never null
  float key_static_scale = 0;                        // step of static formats, 0: each tile takes its own
  float value_static_scale = 0;
};
inline const Format& format_of(const HeadScheme& head, Side side) {
  return side == Side::kKey ? head.key_format : head.value_format;
}

struct LayerScheme {
  LayerShape shape;
  std::vector<HeadScheme> heads;  // [n_kv_heads]
  bool exact = true;              // nothing of this layer is ever sealed
  std::string requested;          // scheme text as asked for
  std::string effective;  // what runs: "k=c4a v=t4 kx=none vx=hadamard"; heads that differ follow in ()
  std::string reason;     // why effective differs from requested; empty when it does not

  size_t key_tile_bytes() const;  // over all heads of one page
  size_t value_tile_bytes() const;
  double key_bits() const;  // per value, tile metadata counted; 16 when exact
  double value_bits() const;
};

// What quantization costs one head and side, as far as calibration saw it. A format whose squared error is
// the share r of the squares of what it stores adds r * sum(spectrum) of error: for keys the variance of a
// logit (nats^2, the model's softmax scale included); for values the share of the head's own output.
struct ErrorModel {
  std::vector<float> spectrum;  // [dim] by row of the calibrated basis, falling; empty: not known
  float excess = 1.0f;          // measured error / error of normal data, at 4 bits in the calibrated basis
  float rotated = 0.0f;         // what sum(spectrum) is for plainly rotated or untransformed rows
  float per_channel = 0.0f;     // the same for channels around their mean
  float largest = 0.0f;         // largest magnitude of what is stored, before any transform
};

// Calibrated basis of one head and side (docs/formats.md): rows of `forward` are
// sorted by falling importance, so that bands of different widths take runs of channels. Inside each band of
// a format it is followed by a Hadamard rotation.
struct CalibratedBasis {
  int dim = 0;
  std::vector<float> forward;  // [dim][dim] row-major
  std::vector<float> centre;   // [dim] or empty
  ErrorModel error;
};

// Expected error of a format (ErrorModel's units); 0 when the model does not know.
double expected_error(const ErrorModel& model, const Format& format, TransformKind transform);
// Above these a head gets wider bands (escape): a logit whose error deviates by .7 nat says little,
// and neither does an output that is one quarter error.
inline constexpr double kMaxKeyError = 0.5;
inline constexpr double kMaxValueError = 0.25;

// Of one layer; null entries: no calibration for that head.
struct LayerCalibration {
  std::vector<std::shared_ptr<const CalibratedBasis>> key;    // [n_kv_heads], or empty: of no head
  std::vector<std::shared_ptr<const CalibratedBasis>> value;  // [n_kv_heads], or empty
};

// Checks the shape, parses the formats for its head sizes and chooses transforms: `auto` takes the
// calibrated transform when there is one, else Hadamard for token formats and none for channel formats.
// Heads whose expected error is above the limits get bands that are wider by as many bits as it takes, at
// most 8; `reason` then names each of them. Fails naming the option and the nearest legal value; nothing is
// silently replaced.
Result<LayerScheme> resolve_layer(const Scheme& scheme, const LayerShape& shape,
                                  const LayerCalibration* calibration = nullptr);

struct LayerRequest {
  LayerShape shape;
  const LayerCalibration* calibration = nullptr;
  std::string name;  // stands before what is wrong with this layer; may be empty
};
inline std::string of_layer(const LayerRequest& layer) { return layer.name.empty() ? "" : layer.name + ": "; }
// All layers of a cache. Schemes with fit=1 move bits between all of their heads; layers without calibration
// keep the scheme's widths.
Result<std::vector<LayerScheme>> resolve_layers(const Scheme& scheme,
                                                const std::vector<LayerRequest>& layers);

}  // namespace kvant

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
};

struct LayerScheme {
  LayerShape shape;
  std::vector<HeadScheme> heads;  // [n_kv_heads]
  bool exact = true;              // nothing of this layer is ever sealed
  std::string requested;          // scheme text as asked for
  std::string effective;          // what runs: "k=c4 v=t4 kx=none vx=hadamard"
  std::string reason;             // why effective differs from requested; empty when it does not

  size_t key_tile_bytes() const;  // over all heads of one page
  size_t value_tile_bytes() const;
  double key_bits() const;  // per value, tile metadata counted; 16 when exact
  double value_bits() const;
};

// Calibrated basis of one head and side (quality.md of docs: "calibrated transform"): rows of `forward` are
// sorted by falling importance, so that bands of different widths take runs of channels. Inside each band of
// a format it is followed by a Hadamard rotation.
struct CalibratedBasis {
  int dim = 0;
  std::vector<float> forward;  // [dim][dim] row-major
  std::vector<float> centre;   // [dim] or empty
};

// Of one layer; null or missing entries: no calibration for that head.
struct LayerCalibration {
  std::vector<std::shared_ptr<const CalibratedBasis>> key;    // [n_kv_heads]
  std::vector<std::shared_ptr<const CalibratedBasis>> value;  // [n_kv_heads]
};

// Checks the shape, parses the formats for its head sizes and chooses transforms: `auto` takes the
// calibrated transform when there is one, else Hadamard for token formats and none for channel formats.
// Fails naming the option and the nearest legal value; nothing is silently replaced.
Result<LayerScheme> resolve_layer(const Scheme& scheme, const LayerShape& shape,
                                  const LayerCalibration* calibration = nullptr);

}  // namespace kvant

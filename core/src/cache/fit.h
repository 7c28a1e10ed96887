// Widths per head and band from what errors cost there (scheme field fit=1).
#pragma once

#include <string>
#include <vector>

#include "kvant/layer_scheme.h"

namespace kvant {

struct FittedKeys {
  std::vector<std::string> formats;  // by head; empty: the layer keeps the scheme's format
  std::string reason;                // why it does
};

// Key formats by layer: those of `scheme.key_format` with the same bands, none narrower than its narrowest,
// whose widths together take at most as many bits and make the sum of expected errors least. Layers that have
// no usable calibration of their keys are left out. kUnsupported: keys of this kind cannot be fitted.
Result<std::vector<FittedKeys>> fit_key_formats(const Scheme& scheme,
                                                const std::vector<LayerRequest>& layers);

}  // namespace kvant

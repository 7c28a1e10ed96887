// Widths per head and band from what errors cost there (scheme field fit=1).
#pragma once

#include <string>
#include <vector>

#include "kvant/layer_scheme.h"

namespace kvant {

// Key formats by layer and head: those of `scheme.key_format` with the same bands, none narrower than its
// narrowest, whose widths together take at most as many bits and make the sum of expected errors least. A layer that has no calibration of its keys
// gets an empty list: it keeps the scheme's format. kUnsupported: keys of this kind cannot be fitted.
Result<std::vector<std::vector<std::string>>> fit_key_formats(const Scheme& scheme,
                                                              const std::vector<LayerRequest>& layers);

}  // namespace kvant

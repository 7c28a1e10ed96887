// Weights expanded to 32-bit floats, once per model file. With quantized weights ggml rounds activations to 8
// bits, and the tiniest change of the cache flips such roundings: that noise hides every good cache.
#pragma once

#include <string>

#include "kvant/status.h"

namespace kvant::eval {

// Path of the expanded file in the user's cache folder ($KVANT_HOME, else $XDG_CACHE_HOME/kvant, else
// ~/.cache/kvant), made when it is not there: f32/<hash>.gguf, put in place by a rename, so that an
// interrupted expansion is never used. The hash covers the file's size, time and first and last MiB. Models
// that already have float weights are expanded too (a model that is all f32 is returned as it is). kIo:
// cannot be read or written, or the disk lacks room (4 bytes per weight).
Result<std::string> f32_weights(const std::string& model_path, int threads);

}  // namespace kvant::eval

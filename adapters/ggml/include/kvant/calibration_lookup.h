#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kvant/calibration_file.h"
#include "kvant/ggml_backend.h"

namespace kvant::ggml {

// Value of Options::recipe that keeps a calibration from being used.
inline constexpr std::string_view kNoRecipe = "none";

// The calibration for a model: options.recipe (a file, or a folder of files named by fingerprint), else the
// one in the cache folder, if there is one. A recipe that was named must exist and fit; nothing is skipped
// silently.
Result<std::optional<Calibration>> find_calibration(const Options& options, uint64_t fingerprint);

}  // namespace kvant::ggml

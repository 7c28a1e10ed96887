#include "kvant/calibration_lookup.h"

#include <filesystem>
#include <string>

namespace kvant::ggml {

Result<std::optional<Calibration>> find_calibration(const Options& options, uint64_t fingerprint) {
  namespace fs = std::filesystem;
  if (options.recipe == kNoRecipe) return std::optional<Calibration>();
  std::error_code error;
  const bool named = !options.recipe.empty();
  fs::path path = named ? fs::path(options.recipe) : fs::path(calibration_path(fingerprint));
  if (named && fs::is_directory(path, error)) path /= fs::path(calibration_path(fingerprint)).filename();
  if (!named && (fingerprint == 0 || !fs::exists(path, error))) return std::optional<Calibration>();
  if (fingerprint == 0) {
    return Status(Code::kMismatch,
                  "KVANT_RECIPE=" + options.recipe +
                      ": this model has no attention norms to recognise it by; leave KVANT_RECIPE empty");
  }
  if (!fs::exists(path, error)) {
    return Status(Code::kIo, "KVANT_RECIPE=" + options.recipe + ": " + path.string() +
                                 " does not exist; make it with `kvant calibrate`");
  }
  Result<Calibration> loaded = load_calibration(path.string(), fingerprint);
  if (!loaded.ok()) return loaded.status();
  return std::optional<Calibration>(std::move(loaded.value()));
}

}  // namespace kvant::ggml

#include "version.h"

#include <string>

#include "cpu_device.h"
#include "ggml-backend-impl.h"
#include "ggml.h"
#include "kvant/ggml_backend.h"

namespace kvant::ggml {
namespace {

std::string describe(std::string_view version, int api) {
  return "ggml " + std::string(version) + (api != 0 ? " (backend API " + std::to_string(api) + ")" : "");
}

}  // namespace

Status compare_versions(std::string_view built, int built_api, std::string_view running, int running_api) {
  if (built == running && (running_api == 0 || running_api == built_api)) return {};
  return {Code::kMismatch, "built for " + describe(built, built_api) + ", but this program runs " +
                               describe(running, running_api) +
                               "; build kvant against the program's llama.cpp"};
}

// Structures of ggml's backend interface are used as they were compiled: only the same version will do.
Status check_ggml() {
  return compare_versions(KVANT_GGML_VERSION, GGML_BACKEND_API_VERSION, ggml_version(),
                          cpu_device().api_version);
}

}  // namespace kvant::ggml

#pragma once

#include <string_view>

#include "kvant/status.h"

namespace kvant::ggml {

// `api` 0: not known (no CPU backend is registered yet).
Status compare_versions(std::string_view built, int built_api, std::string_view running, int running_api);

}  // namespace kvant::ggml

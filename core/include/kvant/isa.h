// Which instruction set runs. Bytes that are stored never depend on it.
#pragma once

#include <string_view>
#include <vector>

#include "kvant/status.h"

namespace kvant {

std::string_view active_isa();
std::vector<std::string_view> available_isas();  // "scalar" first, best last
// Affects the whole process; not to be called while attention runs.
Status force_isa(std::string_view name);

}  // namespace kvant

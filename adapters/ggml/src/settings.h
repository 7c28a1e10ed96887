// What the adapter needs of the options beyond the public header.
#pragma once

#include <string_view>

#include "kvant/ggml_backend.h"

namespace kvant::ggml {

// "kv=kv4,w=256;attention=fused;isa=avx2;strict=1;quiet=1;limit_mib=512" over `base`.
Status options_from_text(std::string_view text, Options base, Options* out);

// How many times smaller than f16 the configured scheme is once everything is packed, at head size 64.
double nominal_saving();

}  // namespace kvant::ggml

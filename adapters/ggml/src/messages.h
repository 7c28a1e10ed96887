// Everything that the backend says on stderr, one line each.
#pragma once

#include <string>

#include "kvant/status.h"

namespace kvant::ggml {

void print_error(const std::string& message);  // always
void print_note(const std::string& message);   // unless quiet

// What failed: kept for take_error(), and printed unless the program does that.
void keep_failure(const Status& status);
void print_failure(const std::string& message);

}  // namespace kvant::ggml

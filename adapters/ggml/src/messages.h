// Everything that the backend says on stderr, one line each.
#pragma once

#include <string>

namespace kvant::ggml {

void print_error(const std::string& message);  // always
void print_note(const std::string& message);   // unless quiet

}  // namespace kvant::ggml

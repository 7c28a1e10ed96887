// How far a misspelt name is from a known one: messages name the nearest.
#pragma once

#include <cstddef>
#include <string_view>

namespace kvant {

// Levenshtein distance: insertions, deletions and replacements of one character.
size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace kvant

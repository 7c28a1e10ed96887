// How far a misspelt name is from a known one: messages name the nearest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvant {

// Levenshtein distance: insertions, deletions and replacements of one character.
size_t edit_distance(std::string_view a, std::string_view b);

// The first of `names` (strings or views) that is nearest to `text`; empty when there are none. Of a long
// text the first 64 characters count.
template <typename Names>
std::string nearest(std::string_view text, const Names& names) {
  std::string_view best;
  size_t least = SIZE_MAX;
  for (const std::string_view name : names) {
    const size_t distance = edit_distance(text.substr(0, 64), name);
    if (distance >= least) continue;
    best = name;
    least = distance;
  }
  return std::string(best);
}

}  // namespace kvant

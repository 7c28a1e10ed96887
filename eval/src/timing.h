// What everything that measures time shares.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace kvant::eval {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of a list that is not empty; the upper one of two in the middle.
inline double median(std::vector<double> v) {
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

}  // namespace kvant::eval

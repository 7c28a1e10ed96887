// The bars of the project, measured in one run on this machine.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvant/status.h"

namespace kvant::eval {

enum class BarState : uint8_t { kHolds, kShort, kNotMeasured };

struct BarRow {
  std::string group;  // what --only takes
  std::string what;
  double figure = 0;
  double bound = 0;
  bool at_most = false;  // the figure must not exceed the bound; else it must reach it
  std::string note;      // what was compared, or why nothing was measured
  BarState state = BarState::kNotMeasured;
};

struct BarsOptions {
  std::string model_path;  // SmolLM2-135M-Instruct with its own weights, for its rows
  std::string
      shapes_path;  // 8 layers, 8 query and 2 KV heads x 128, Q8_0; empty: written into the cache folder
  std::vector<std::string> only;  // groups; empty: all
  std::string cache = "kv4";      // the 4-bit cache
  int threads = 2;
  std::function<void(const std::string& group)> progress;
  std::function<bool()> cancelled;
};

// Names of the groups, in the order in which they run.
const std::vector<std::string>& bar_groups();

// Rows of ik_llama.cpp are kNotMeasured unless `./run setup peers` was run. An error ends the run; rows that
// were measured stay in `out`.
Status bench_bars(const BarsOptions& options, std::vector<BarRow>* out);

}  // namespace kvant::eval

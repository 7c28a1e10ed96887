// An evaluation as JSON (version 1, docs/evaluation.md) and as a table.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kvant/evaluate.h"

namespace kvant::eval {

inline constexpr int kEvalJsonVersion = 1;

nlohmann::json to_json(const Evaluation& evaluation, const EvaluateOptions& options,
                       const std::string& text_name);

// What was run, the floor, then one table per test. `markdown`: GitHub's table syntax.
std::string to_table(const Evaluation& evaluation, const EvaluateOptions& options, bool markdown);

// What runs per layer: requested, effective, reason; layers with the same answer share an entry.
nlohmann::json effective_json(const std::vector<ggml::CacheReport>& caches);

// Rows of equal length; the first is the header. Columns after the first are aligned to the right.
std::string format_table(const std::vector<std::vector<std::string>>& rows, bool markdown);

}  // namespace kvant::eval

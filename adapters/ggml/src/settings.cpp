// Options: checked once, then copied by every cache that is created.
#include "settings.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string_view>
#include <vector>

#include "kvant/calibration_lookup.h"
#include "kvant/edit_distance.h"
#include "kvant/isa.h"
#include "kvant/layer_scheme.h"

namespace kvant::ggml {
namespace {

std::mutex options_mutex;
Options current_options;

constexpr std::string_view kVariables[] = {"KVANT_KV",     "KVANT_ATTENTION", "KVANT_ISA",
                                           "KVANT_RECIPE", "KVANT_STRICT",    "KVANT_QUIET",
                                           "KVANT_SKIP",   "KVANT_LIMIT_MIB"};
// Of the scripts and tests of the project.
constexpr std::string_view kOtherVariables[] = {"KVANT_HOME",      "KVANT_BUILD",    "KVANT_JOBS",
                                                "KVANT_ROOT",      "KVANT_TEST_DIR", "KVANT_BIN",
                                                "KVANT_LLAMA_BIN", "KVANT_MODEL",    "KVANT_GEMMA",
                                                "KVANT_TEXT_DIR",  "KVANT_CXX",      "KVANT_UPDATE_GOLDEN"};

Status bad_value(std::string_view name, std::string_view value, std::string_view hint) {
  return {Code::kInvalidArgument,
          std::string(name) + "=" + std::string(value) + ": not known; nearest is " + std::string(hint)};
}

Status parse_flag(std::string_view name, std::string_view value, bool* out) {
  if (value != "0" && value != "1")
    return bad_value(name, value, value.empty() || value[0] == 'n' ? "0" : "1");
  *out = value == "1";
  return {};
}

Status parse_limit(std::string_view name, std::string_view value, size_t* out) {
  const bool all_digits =
      !value.empty() && std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; });
  const size_t mib =
      all_digits && value.size() <= 9 ? std::strtoull(std::string(value).c_str(), nullptr, 10) : 0;
  if (mib == 0) {
    return {Code::kInvalidArgument, std::string(name) + "=" + std::string(value) +
                                        ": a number of MiB from 1 to 999999999 is needed; nearest is " +
                                        (all_digits && value.size() > 9 ? "999999999" : "1")};
  }
  *out = mib << 20;
  return {};
}

// `shown` is how the user knows the option: KVANT_KV or kv.
Status set_option(std::string_view key, std::string_view shown, std::string_view value, Options* o) {
  if (key == "kv") {
    o->scheme = value;
  } else if (key == "attention") {
    if (value != "fused" && value != "dequant") {
      return bad_value(shown, value, nearest(value, std::vector<std::string_view>{"fused", "dequant"}));
    }
    o->attention = value == "fused" ? AttentionPath::kFused : AttentionPath::kDequantize;
  } else if (key == "isa") {
    const std::vector<std::string_view> have = available_isas();
    if (!value.empty() && std::find(have.begin(), have.end(), value) == have.end()) {
      return bad_value(shown, value, nearest(value, have));
    }
    o->isa = value;
  } else if (key == "recipe") {
    o->recipe = value;
  } else if (key == "strict") {
    return parse_flag(shown, value, &o->strict);
  } else if (key == "quiet") {
    return parse_flag(shown, value, &o->quiet);
  } else if (key == "skip") {
    return parse_flag(shown, value, &o->skip);
  } else if (key == "limit_mib") {
    return parse_limit(shown, value, &o->limit_bytes);
  }
  return {};
}

std::string lower_key(std::string_view variable) {
  std::string key(variable.substr(std::strlen("KVANT_")));
  std::transform(key.begin(), key.end(), key.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  return key;
}

template <typename Values>
bool contains(const Values& values, std::string_view name) {
  return std::find(std::begin(values), std::end(values), name) != std::end(values);
}

std::vector<std::string_view> unknown_names() {
  std::vector<std::string_view> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view name(*entry);
    name = name.substr(0, name.find('='));
    if (name.starts_with("KVANT_") && !contains(kVariables, name) && !contains(kOtherVariables, name))
      names.push_back(name);
  }
  return names;
}

bool misspelt(std::string_view name, std::string_view hint) {
  return edit_distance(name, hint) <= (hint.size() > 9 ? 2U : 1U);
}

// A misspelt variable would not do what it was set for.
Status check_spelling() {
  for (const std::string_view name : unknown_names()) {
    const std::string hint = nearest(name, kVariables);
    if (misspelt(name, hint)) {
      return {Code::kInvalidArgument, std::string(name) + ": not a variable of kvant; nearest is " + hint};
    }
  }
  return {};
}

}  // namespace

Status configure(const Options& options) {
  std::error_code error;
  const bool recipe = !options.recipe.empty() && options.recipe != kNoRecipe;
  Result<Scheme> scheme = parse_scheme(options.scheme, recipe);
  if (!scheme.ok())
    return {scheme.status().code(), "KVANT_KV=" + options.scheme + ": " + scheme.status().message()};
  if (recipe && !std::filesystem::exists(options.recipe, error)) {
    return {Code::kIo, "KVANT_RECIPE=" + options.recipe + ": no such file or folder"};
  }
  if (options.limit_bytes == 0) return {Code::kInvalidArgument, "limit 0: the nearest limit is 1 MiB"};
  if (!options.isa.empty()) KVANT_RETURN_IF_ERROR(force_isa(options.isa));
  const std::lock_guard<std::mutex> lock(options_mutex);
  current_options = options;
  return {};
}

Options options() {
  const std::lock_guard<std::mutex> lock(options_mutex);
  return current_options;
}

Status options_from_environment(Options base, Options* out) {
  KVANT_RETURN_IF_ERROR(check_spelling());
  for (const std::string_view variable : kVariables) {
    const char* value = std::getenv(variable.data());
    if (value == nullptr) continue;
    KVANT_RETURN_IF_ERROR(set_option(lower_key(variable), variable, value, &base));
  }
  *out = std::move(base);
  return {};
}

std::vector<std::string> unknown_variables() {
  std::vector<std::string> lines;
  for (const std::string_view name : unknown_names()) {
    std::string hint = nearest(name, kVariables);
    if (misspelt(name, hint)) continue;
    if (edit_distance(name, "KVANT_HOME") < edit_distance(name, hint)) hint = "KVANT_HOME";
    lines.push_back(std::string(name) + ": not a variable of kvant, ignored; nearest is " + hint);
  }
  return lines;
}

Status options_from_text(std::string_view text, Options base, Options* out) {
  while (!text.empty()) {
    const std::string_view field = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), field.size() + 1));
    if (field.empty()) continue;
    const size_t equals = field.find('=');
    const std::string_view key = field.substr(0, equals);
    std::vector<std::string> keys;
    for (const std::string_view variable : kVariables) keys.push_back(lower_key(variable));
    if (equals == std::string_view::npos || std::find(keys.begin(), keys.end(), key) == keys.end()) {
      return {Code::kInvalidArgument,
              "option '" + std::string(field) + "': not known; nearest is " + nearest(key, keys) + "="};
    }
    KVANT_RETURN_IF_ERROR(set_option(key, key, field.substr(equals + 1), &base));
  }
  *out = std::move(base);
  return {};
}

double nominal_saving() {
  Result<Scheme> scheme = parse_scheme(options().scheme);
  if (!scheme.ok()) return 1.0;
  Result<LayerScheme> layer =
      resolve_layer(scheme.value(), {.n_query_heads = 1, .n_kv_heads = 1, .key_dim = 64, .value_dim = 64});
  if (!layer.ok()) return 1.0;
  return std::max(1.0, 32.0 / (layer.value().key_bits() + layer.value().value_bits()));
}

}  // namespace kvant::ggml

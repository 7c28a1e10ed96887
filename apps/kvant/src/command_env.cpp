// kvant env: the exports that make llama.cpp's own programs use this build and scheme.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli.h"

namespace kvant::cli {
namespace {

struct EnvFlags {
  std::string kv;
  CacheFlags cache;
  bool json = false;
};

constexpr char kFooter[] =
    "\nExamples:\n"
    "  eval \"$(kvant env --kv kv4)\"\n"
    "  llama-server -m model.gguf            now with kvant's cache\n"
    "  env $(kvant env --kv kv8 | sed 's/^export //') llama-bench -m model.gguf\n";

std::string quoted(const std::string& text) {
  const bool plain =
      text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=,:+-") ==
      std::string::npos;
  if (plain) return text;
  std::string out = "'";
  for (char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

int do_env(const EnvFlags& f) {
  ggml::Options options;
  std::vector<std::string> overridden;
  if (Status status = cache_options(f.cache, &options, &overridden); !status.ok()) return fail(status);
  Result<std::string> scheme = f.kv.empty() ? scheme_with_flags(options.scheme, f.cache, "KVANT_KV")
                                            : scheme_with_flags(f.kv, f.cache);
  if (!scheme.ok()) return fail(scheme.status());
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path module = self.parent_path() / "libggml-kvant.so";
  if (error || !std::filesystem::exists(module)) {
    return fail({Code::kIo, "libggml-kvant.so is not beside this program (" + module.string() +
                                "); build it: ./run build"});
  }
  std::vector<std::pair<std::string, std::string>> variables = {{"GGML_BACKEND_PATH", module.string()},
                                                                {"LLAMA_ARG_DEVICE", "KVANT"},
                                                                {"LLAMA_ARG_FLASH_ATTN", "on"},
                                                                {"KVANT_KV", scheme.value()}};
  const bool dequant = options.attention == AttentionPath::kDequantize;
  if (dequant || !f.cache.attention.empty())
    variables.emplace_back("KVANT_ATTENTION", dequant ? "dequant" : "fused");
  if (!options.isa.empty()) variables.emplace_back("KVANT_ISA", options.isa);
  if (!options.recipe.empty()) variables.emplace_back("KVANT_RECIPE", options.recipe);
  if (options.strict) variables.emplace_back("KVANT_STRICT", "1");
  if (options.limit_bytes != SIZE_MAX)
    variables.emplace_back("KVANT_LIMIT_MIB", std::to_string(options.limit_bytes >> 20));
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, value] : variables) {
    json[name] = value;
    if (!f.json) std::printf("export %s=%s\n", name.c_str(), quoted(value).c_str());
  }
  if (f.json) write_json({{"version", 1}, {"environment", json}});
  return kOk;
}

}  // namespace

Command add_env(CLI::App& root) {
  auto flags = std::make_shared<EnvFlags>();
  CLI::App* app = root.add_subcommand("env", "print the exports for llama.cpp's own programs");
  app->footer(kFooter);
  app->add_option("--kv", flags->kv, "scheme (default kv4, or KVANT_KV)")->type_name("SCHEME");
  add_cache_flags(app, &flags->cache);
  app->add_flag("--json", flags->json, "print JSON");
  return {app, [flags] { return do_env(*flags); }};
}

}  // namespace kvant::cli

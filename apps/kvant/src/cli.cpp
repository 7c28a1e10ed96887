#include "cli.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "kvant/edit_distance.h"
#include "kvant/isa.h"
#include "kvant/scheme.h"

namespace kvant::cli {
namespace {

volatile std::sig_atomic_t interrupt_count = 0;

void on_interrupt(int) {
  interrupt_count = interrupt_count + 1;
  if (interrupt_count > 1) _exit(kInterrupted);
}

std::string shown_number(double x) { return fmt::format("{:g}", x); }

// Variables of the environment that flags of this call override.
void note_overrides(const CacheFlags& flags, std::vector<std::string>* out) {
  auto note = [&](const char* variable, bool given, const std::string& flag) {
    if (const char* value = std::getenv(variable); given && value != nullptr) {
      out->push_back(fmt::format("{}={} is overridden by {}", variable, value, flag));
    }
  };
  note("KVANT_ATTENTION", !flags.attention.empty(), "--attention " + flags.attention);
  note("KVANT_ISA", !flags.isa.empty(), "--isa " + flags.isa);
  note("KVANT_RECIPE", !flags.recipe.empty(), "--recipe " + flags.recipe);
  note("KVANT_STRICT", flags.strict, "--strict");
  note("KVANT_LIMIT_MIB", flags.limit_mib > 0, fmt::format("--limit {}", flags.limit_mib));
}

}  // namespace

int fail(const Status& status) {
  std::fprintf(stderr, "kvant: %s\n", status.message().c_str());
  return exit_code(status.code());
}

CLI::Validator whole_number(long long lowest, long long highest) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        long long value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool digits =
            end == text.data() + text.size() && !text.empty() && error != std::errc::invalid_argument;
        if (!digits) {
          return fmt::format("'{}' is not a whole number; it takes {} to {}", text, lowest, highest);
        }
        const bool below = error == std::errc::result_out_of_range ? text[0] == '-' : value < lowest;
        const bool above = error == std::errc::result_out_of_range ? text[0] != '-' : value > highest;
        if (!below && !above) return "";
        return fmt::format("{} is not in {} to {}; nearest is {}", text, lowest, highest,
                           below ? lowest : highest);
      },
      "");
}

CLI::Validator decimal(double lowest, double highest) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (text.empty() || *end != 0 || value != value) {
          return fmt::format("'{}' is not a number; it takes {} to {}", text, shown_number(lowest),
                             shown_number(highest));
        }
        if (value >= lowest && value <= highest) return "";
        return fmt::format("{} is not in {} to {}; nearest is {}", text, shown_number(lowest),
                           shown_number(highest), shown_number(value < lowest ? lowest : highest));
      },
      "");
}

CLI::Validator one_of(const std::vector<std::string>& values) {
  std::string all;
  for (const std::string& v : values) all += (all.empty() ? "" : "|") + v;
  return CLI::Validator(
      [values](std::string& text) -> std::string {
        for (const std::string& v : values) {
          if (v == text) return "";
        }
        std::string list;
        for (const std::string& v : values) list += (list.empty() ? "" : ", ") + v;
        return fmt::format("'{}' is none of {}; nearest is {}", text, list, nearest(text, values));
      },
      all);
}

CLI::Validator readable_file() {
  return CLI::Validator(
      [](std::string& path) -> std::string {
        struct stat info {};
        if (stat(path.c_str(), &info) != 0) return fmt::format("there is no file {}", path);
        if (S_ISDIR(info.st_mode)) return fmt::format("{} is a folder, not a file", path);
        if (access(path.c_str(), R_OK) != 0) return fmt::format("{} cannot be read", path);
        return "";
      },
      "FILE");
}

void add_cache_flags(CLI::App* app, CacheFlags* flags) {
  const char* group = "Cache";
  app->add_option("--window", flags->window, "exact recent tokens, instead of the scheme's")
      ->check(whole_number(0, 4096))
      ->type_name("N")
      ->group(group);
  app->add_option("--sinks", flags->sinks, "exact first tokens, instead of the scheme's")
      ->check(whole_number(0, 256))
      ->type_name("N")
      ->group(group);
  app->add_option("--attention", flags->attention,
                  "fused: on packed codes; dequant: decode tiles first (default fused)")
      ->check(one_of({"fused", "dequant"}))
      ->group(group);
  std::vector<std::string> isas;
  for (std::string_view isa : available_isas()) isas.emplace_back(isa);
  app->add_option("--isa", flags->isa, "force an instruction set (default: the best of this CPU)")
      ->check(one_of(isas))
      ->group(group);
  app->add_option("--recipe", flags->recipe,
                  "calibration file, a folder of them, or none (default: where `kvant calibrate` writes)")
      ->type_name("PATH|none")
      ->group(group);
  app->add_flag("--strict", flags->strict, "what runs must be what was asked for, in every layer")
      ->group(group);
  app->add_option("--limit", flags->limit_mib, "most MiB for each cache")
      ->check(whole_number(1, 999999999))
      ->type_name("MIB")
      ->group(group);
}

Status cache_options(const CacheFlags& flags, ggml::Options* out, std::vector<std::string>* overridden) {
  ggml::Options base;
  KVANT_RETURN_IF_ERROR(ggml::options_from_environment(base, &base));
  note_overrides(flags, overridden);
  if (!flags.attention.empty()) {
    base.attention = flags.attention == "fused" ? AttentionPath::kFused : AttentionPath::kDequantize;
  }
  if (!flags.isa.empty()) base.isa = flags.isa;
  if (!flags.recipe.empty()) base.recipe = flags.recipe;
  if (flags.strict) base.strict = true;
  if (flags.limit_mib > 0) base.limit_bytes = static_cast<size_t>(flags.limit_mib) << 20;
  // The command prints its own summary; errors are shown anyway.
  base.quiet = true;
  *out = base;
  return {};
}

std::string first_kvant_flag(const CacheFlags& flags) {
  if (flags.window >= 0) return "--window";
  if (flags.sinks >= 0) return "--sinks";
  if (!flags.attention.empty()) return "--attention";
  if (!flags.isa.empty()) return "--isa";
  if (!flags.recipe.empty()) return "--recipe";
  if (flags.strict) return "--strict";
  return flags.limit_mib > 0 ? "--limit" : "";
}

Wanted wanted_caches(const std::string& flag, const std::string& fallback,
                     std::vector<std::string>* overridden) {
  const char* variable = std::getenv("KVANT_KV");
  if (flag.empty()) return variable != nullptr ? Wanted{variable, "KVANT_KV"} : Wanted{fallback};
  if (variable != nullptr)
    overridden->push_back(fmt::format("KVANT_KV={} is overridden by --kv {}", variable, flag));
  return {flag};
}

Result<std::string> scheme_with_flags(const std::string& scheme, const CacheFlags& flags, const char* shown) {
  std::string text = scheme;
  if (flags.window >= 0) text += fmt::format(",w={}", flags.window);
  if (flags.sinks >= 0) text += fmt::format(",s={}", flags.sinks);
  const Result<Scheme> parsed = parse_scheme(text);
  if (parsed.ok()) return text;
  return Status(parsed.status().code(), std::string(shown) + ": " + parsed.status().message());
}

Result<std::string> read_file(const std::string& path) {
  constexpr size_t kMost = size_t{256} << 20, kPiece = size_t{1} << 16;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  for (size_t got = kPiece; file && got > 0;) {
    const size_t at = text.size();
    text.resize(at + kPiece);
    file.read(text.data() + at, kPiece);
    got = static_cast<size_t>(file.gcount());
    text.resize(at + got);
    if (text.size() > kMost) return Status(Code::kIo, path + " has more than 256 MiB of text");
  }
  if (!file.is_open() || file.bad()) return Status(Code::kIo, path + " cannot be read");
  return text;
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::equivalent(a, b, error) && !error;
}

Status check_output(const std::string& output,
                    std::initializer_list<std::pair<const char*, std::string>> inputs) {
  for (const auto& [option, path] : inputs) {
    if (output.empty() || path.empty() || !same_file(output, path)) continue;
    return {Code::kInvalidArgument,
            fmt::format("--output {} is the file of {} and would be lost; name another", output, option)};
  }
  return {};
}

void write_json(const nlohmann::json& json) {
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
}

void catch_interrupt() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;  // no SA_RESTART: waiting for input ends, too
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return interrupt_count > 0; }

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) == 1), start_(now_seconds()) {}

void ProgressLine::show(double share, const std::string& what) {
  const double now = now_seconds();
  const bool due = terminal_ ? now - last_ >= 0.25 : what != part_ || now - last_ >= 30;
  if (now - start_ < 2 || !due) return;
  last_ = now;
  part_ = what;
  shown_ = terminal_;
  std::string left;
  if (share > 0.01) {
    const int seconds = static_cast<int>(std::lround((now - start_) * (1 - share) / share));
    left = fmt::format(", {}:{:02} left", seconds / 60, seconds % 60);
  }
  std::fprintf(stderr, "%skvant: %3.0f %%%s, %s%s", terminal_ ? "\r\033[K" : "", 100 * share, left.c_str(),
               what.c_str(), terminal_ ? "" : "\n");
  std::fflush(stderr);
}

void ProgressLine::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int default_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

std::string with_commas(size_t number) {
  std::string digits = std::to_string(number);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

std::string mib(size_t bytes) {
  return fmt::format("{:.2f}", static_cast<double>(bytes) / (1024.0 * 1024.0));
}

std::string beside_f16(size_t bytes, size_t f16_bytes) {
  if (bytes == 0 || f16_bytes == 0) return "empty";
  const double ratio = static_cast<double>(f16_bytes) / static_cast<double>(bytes);
  return ratio >= 1 ? fmt::format("{:.2f} times smaller", ratio)
                    : fmt::format("{:.2f} times larger", 1 / ratio);
}

}  // namespace kvant::cli

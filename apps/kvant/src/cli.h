// What the commands share: options, checks of values, messages, progress, Ctrl-C.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "exit_codes.h"
#include "kvant/ggml_backend.h"
#include "kvant/status.h"

namespace kvant::cli {

// A subcommand and what it does; the action returns the exit code.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> action;
};

Command add_run(CLI::App& root);
Command add_eval(CLI::App& root);
Command add_formats(CLI::App& root);
Command add_plan(CLI::App& root);
Command add_env(CLI::App& root);
Command add_testmodel(CLI::App& root);
Command add_calibrate(CLI::App& root);
Command add_bench(CLI::App& root);

// Prints "kvant: MESSAGE" and gives the exit code.
int fail(const Status& status);

// "--option TEXT" of whole numbers and decimals; messages name the nearest legal value.
CLI::Validator whole_number(long long lowest, long long highest);
CLI::Validator decimal(double lowest, double highest);
CLI::Validator one_of(const std::vector<std::string>& values);
CLI::Validator readable_file();

// Options of the cache that run and eval share. Flags win over KVANT_* variables, which win over the
// defaults.
struct CacheFlags {
  int window = -1;  // -1: the scheme's
  int sinks = -1;
  std::string attention;  // empty: the environment's
  std::string isa;
  std::string recipe;
  bool strict = false;
  long long limit_mib = 0;  // 0: the environment's
};
void add_cache_flags(CLI::App* app, CacheFlags* flags);

// Options with everything but the scheme set. `overridden`: a line for each variable that a flag overrides.
Status cache_options(const CacheFlags& flags, ggml::Options* out, std::vector<std::string>* overridden);
// `scheme` with --window and --sinks applied. Unknown names: the nearest registered one is named.
// `shown`: where the scheme comes from, for messages.
Result<std::string> scheme_with_flags(const std::string& scheme, const CacheFlags& flags,
                                      const char* shown = "--kv");
// The caches that --kv asks for (`flag`), else KVANT_KV, else `fallback`; `source` is their name in messages.
struct Wanted {
  std::string caches;
  const char* source = "--kv";
};
Wanted wanted_caches(const std::string& flag, const std::string& fallback,
                     std::vector<std::string>* overridden);
// The first of --window, --sinks, --attention, --isa, --recipe, --strict and --limit that is given; else
// empty.
std::string first_kvant_flag(const CacheFlags& flags);

// Whole; at most 256 MiB.
Result<std::string> read_file(const std::string& path);
// Both name the same file.
bool same_file(const std::string& a, const std::string& b);
// A file that is read must not be written: kInvalidArgument names both options.
Status check_output(const std::string& output,
                    std::initializer_list<std::pair<const char*, std::string>> inputs);

// Names of files and models need not be UTF-8; the JSON is.
void write_json(const nlohmann::json& json);

// Ctrl-C: the first sets a flag, the second ends the process.
void catch_interrupt();
bool interrupted();

// Shows "kvant: 42 %, 1:23 left, text" on stderr after 2 seconds: on a terminal as one line that changes,
// elsewhere as a line whenever a part is done, and every 30 seconds.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine() { clear(); }
  void show(double share, const std::string& what);
  void clear();

 private:
  bool terminal_ = false;
  bool shown_ = false;
  double start_ = 0, last_ = 0;
  std::string part_;  // of the last line
};

double now_seconds();
int default_threads();
std::string with_commas(size_t number);  // 1234567 -> "1,234,567"
std::string mib(size_t bytes);           // "12.3"
// What `bytes` are beside `f16_bytes`: "2.58 times smaller", "3.57 times larger".
std::string beside_f16(size_t bytes, size_t f16_bytes);

}  // namespace kvant::cli

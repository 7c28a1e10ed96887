// kvant: runs, evaluates, plans. Exit codes: exit_codes.h.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cli.h"
#include "kvant/edit_distance.h"
#include "kvant/llama_session.h"

namespace kvant::cli {
namespace {

constexpr char kDescription[] =
    "kvant keeps the attention state (KV cache) of language models in 2 to 8 bits and attends on the packed "
    "form.";

std::string root_footer() {
  std::string text =
      "\nExamples:\n"
      "  kvant run -m model.gguf --kv kv4                  chat with a 4-bit cache\n"
      "  kvant eval -m model.gguf -f text.txt --kv llama:q4_0,kv4\n"
      "  kvant plan -m model.gguf -c 32768                 bytes before anything is loaded\n"
      "  kvant formats                                     what there is, and what it costs\n"
      "  eval \"$(kvant env --kv kv4)\"                      llama.cpp's own programs on kvant's cache\n"
      "\nExit codes:\n";
  for (const ExitMeaning& e : kExitTable)
    text += fmt::format("  {:>3}  {}\n", static_cast<int>(e.code), e.meaning);
  return text;
}

std::vector<std::string> option_names(const CLI::App* app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// The first argument that nobody took, and the nearest that somebody would.
std::string unknown_argument(const CLI::App& root) {
  const CLI::App* app = &root;
  for (const CLI::App* sub : root.get_subcommands()) app = sub;
  const std::vector<std::string> own = app->remaining();
  const std::vector<std::string> rest = own.empty() ? root.remaining() : own;
  if (rest.empty()) return "";
  // Values of an unknown option are left over, too.
  const auto flag =
      std::find_if(rest.begin(), rest.end(), [](const std::string& r) { return r.starts_with("-"); });
  const std::string& first = flag == rest.end() ? rest[0] : *flag;
  const std::string given = first.substr(0, first.find('='));
  std::vector<std::string> names = option_names(app);
  if (app == &root && !given.starts_with("-")) {
    names.clear();
    for (const CLI::App* sub : root.get_subcommands({})) {
      if (!sub->get_name().empty()) names.push_back(sub->get_name());
    }
  }
  const bool option = given.starts_with("-");
  if (app != &root && !option)
    return fmt::format("'{}' is not expected; {} takes options only", given, app->get_name());
  return fmt::format("'{}' is not {}; nearest is {}", given, option ? "an option" : "a command",
                     nearest(given, names));
}

int usage_error(const CLI::App& root, const CLI::ParseError& error) {
  const std::string name = error.get_name();
  std::string message = error.what();
  // What nobody knows comes first: a misspelt option is also missing.
  const bool extras = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
  const std::string unknown = extras || name == "RequiredError" ? unknown_argument(root) : "";
  if (!unknown.empty()) {
    message = unknown;
  } else if (name == "RequiredError" && root.get_subcommands().empty()) {
    std::fputs(root.help().c_str(), stderr);
    return kUsage;
  }
  std::string command;
  for (const CLI::App* sub : root.get_subcommands()) command = " " + sub->get_name();
  std::fprintf(stderr, "kvant%s: %s\n", command.c_str(), message.c_str());
  // A file that is not there is not a mistake in the option.
  return message.find("there is no file") != std::string::npos ||
                 message.find("is a folder, not a file") != std::string::npos ||
                 message.find(" cannot be read") != std::string::npos
             ? kBadFile
             : kUsage;
}

int run(int argc, char** argv) {
  eval::show_llama_messages(false);
  CLI::App root(kDescription, "kvant");
  root.set_version_flag("--version",
                        std::string("kvant ") + KVANT_VERSION + " (ggml " + KVANT_GGML_VERSION + ")");
  root.footer(root_footer);
  root.require_subcommand(1);
  root.get_formatter()->column_width(34);
  const std::vector<Command> commands = {add_run(root),     add_eval(root),     add_calibrate(root),
                                         add_formats(root), add_plan(root),     add_bench(root),
                                         add_env(root),     add_testmodel(root)};
  try {
    root.parse(argc, argv);
  } catch (const CLI::Success& request) {
    return root.exit(request);
  } catch (const CLI::ParseError& error) {
    return usage_error(root, error);
  }
  for (const std::string& line : ggml::unknown_variables())
    std::fprintf(stderr, "kvant: warning: %s\n", line.c_str());
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.action();
  }
  return kUsage;
}

}  // namespace
}  // namespace kvant::cli

int main(int argc, char** argv) {
  try {
    const int code = kvant::cli::run(argc, argv);
    errno = 0;
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    std::fprintf(stderr, "kvant: the output cannot be written%s%s\n", errno != 0 ? ": " : "",
                 errno != 0 ? std::strerror(errno) : "");
    return code == kvant::cli::kOk ? kvant::cli::kBadFile : code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvant: internal error: %s\n", error.what());
    return kvant::cli::kFailed;
  }
}

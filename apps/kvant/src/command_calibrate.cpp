// kvant calibrate: the basis of each KV head, from one pass over text.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "kvant/calibrate.h"
#include "kvant/llama_session.h"

namespace kvant::cli {
namespace {

struct CalibrateFlags {
  eval::CalibrateOptions options;
  std::string text_path;
  std::string output;
  bool json = false;
};

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant calibrate -m model.gguf -f text.txt\n"
    "  kvant calibrate -m model.gguf -f text.txt --tokens 16384 -o model-calibration.gguf\n"
    "\nThe file is found again by every quantization of the model: run, eval and the backend look for it in\n"
    "$KVANT_HOME/calibration (default ~/.cache/kvant/calibration); KVANT_RECIPE names another file.\n"
    "Use text of the kind the model will read, never the text it is evaluated on.\n";

int do_calibrate(CalibrateFlags* f) {
  const Result<std::string> text = read_file(f->text_path);
  if (!text.ok()) return fail(text.status());
  const Status backends = eval::init_backends();
  if (!backends.ok()) return fail(backends);
  eval::show_llama_messages(false);
  catch_interrupt();
  ProgressLine progress;
  f->options.text = text.value();
  if (f->options.threads == 0) f->options.threads = default_threads();
  f->options.progress = [&](double share) { progress.show(share, "calibration"); };
  f->options.cancelled = [] { return interrupted(); };
  const double start = now_seconds();
  const Result<ggml::Calibration> made = eval::calibrate(f->options);
  progress.clear();
  if (!made.ok()) return fail(made.status());
  const std::string path = f->output.empty() ? ggml::calibration_path(made.value().fingerprint) : f->output;
  const Status saved = ggml::save_calibration(made.value(), path);
  if (!saved.ok()) return fail(saved);
  if (f->json) {
    const nlohmann::json out = {{"version", 1},
                                {"path", path},
                                {"model", made.value().model},
                                {"layers", made.value().layers.size()},
                                {"tokens", made.value().tokens},
                                {"seconds", now_seconds() - start}};
    std::printf("%s\n", out.dump(2).c_str());
  } else {
    std::printf("%s: %zu layers from %lld tokens in %.0f s\n", path.c_str(), made.value().layers.size(),
                static_cast<long long>(made.value().tokens), now_seconds() - start);
  }
  return kOk;
}

}  // namespace

Command add_calibrate(CLI::App& root) {
  auto f = std::make_shared<CalibrateFlags>();
  eval::CalibrateOptions& o = f->options;
  CLI::App* app =
      root.add_subcommand("calibrate", "measure a model's keys, queries and values for better schemes");
  app->footer(kFooter);
  app->add_option("-m,--model", o.model_path, "model file (GGUF)")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("-f,--file", f->text_path, "text")->required()->check(readable_file())->type_name("FILE");
  app->add_option("-o,--output", f->output, "file to write (default: where the backend looks)")
      ->type_name("FILE");
  app->add_option("--tokens", o.tokens, "tokens of text (default 8192)")
      ->check(whole_number(256, 1 << 20))
      ->type_name("N");
  app->add_option("--window", o.window_tokens, "tokens of one context (default 2048)")
      ->check(whole_number(256, 1 << 17))
      ->type_name("N");
  app->add_option("-t,--threads", o.threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
  app->add_flag("--json", f->json, "print JSON");
  return {app, [f] { return do_calibrate(f.get()); }};
}

}  // namespace kvant::cli

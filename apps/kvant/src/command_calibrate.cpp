// kvant calibrate: the basis of each KV head, from one pass over text.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "kvant/calibrate.h"
#include "kvant/layer_scheme.h"
#include "kvant/llama_session.h"
#include "kvant/scheme.h"

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

nlohmann::json outlier_json(const eval::OutlierChannel& o) {
  return {{"layer", o.layer},
          {"side", side_name(o.side)},
          {"head", o.kv_head},
          {"channel", o.channel},
          {"rms", o.rms},
          {"mean", o.mean},
          {"median_rms", o.median_rms}};
}

nlohmann::json head_json(int layer, const char* side, size_t head, const ErrorModel& model) {
  double calibrated = 0;
  std::vector<double> quarters(4, 0.0);
  for (size_t i = 0; i < model.spectrum.size(); ++i) {
    calibrated += static_cast<double>(model.spectrum[i]);
    quarters[4 * i / model.spectrum.size()] += static_cast<double>(model.spectrum[i]);
  }
  return {{"layer", layer},
          {"side", side},
          {"head", head},
          {"calibrated", calibrated},
          {"spectrum", quarters},
          {"rotated", model.rotated},
          {"per_channel", model.per_channel},
          {"excess", model.excess}};
}

void print_json(const eval::CalibrationResult& made, const std::string& path, double seconds) {
  nlohmann::json outliers = nlohmann::json::array(), heads = nlohmann::json::array();
  for (const eval::OutlierChannel& o : made.outliers) outliers.push_back(outlier_json(o));
  for (const auto& [layer, c] : made.calibration.layers) {
    for (size_t h = 0; h < c.key.size(); ++h) heads.push_back(head_json(layer, "key", h, c.key[h]->error));
    for (size_t h = 0; h < c.value.size(); ++h)
      heads.push_back(head_json(layer, "value", h, c.value[h]->error));
  }
  const nlohmann::json out = {{"version", 1},
                              {"path", path},
                              {"model", made.calibration.model},
                              {"layers", made.calibration.layers.size()},
                              {"tokens", made.calibration.tokens},
                              {"seconds", seconds},
                              {"outliers", outliers},
                              {"errors", heads}};
  write_json(out);
}

void print_outliers(const std::vector<eval::OutlierChannel>& outliers) {
  constexpr size_t kShown = 12;
  if (outliers.empty()) return;
  std::vector<eval::OutlierChannel> sorted = outliers;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.rms * b.median_rms > b.rms * a.median_rms; });
  std::printf("%zu outlier channels, the largest first:\n", sorted.size());
  for (size_t i = 0; i < std::min(kShown, sorted.size()); ++i) {
    const eval::OutlierChannel& o = sorted[i];
    std::printf("  layer %d, %s head %d, channel %d: rms %.3g (mean %.3g), %.0f times the head's median\n",
                o.layer, side_name(o.side), o.kv_head, o.channel, static_cast<double>(o.rms),
                static_cast<double>(o.mean), static_cast<double>(o.rms / std::max(o.median_rms, 1e-30f)));
  }
  if (sorted.size() > kShown) std::printf("  and %zu more (--json lists all)\n", sorted.size() - kShown);
}

// Which named schemes will not run as asked for in some head.
void print_escapes(const ggml::Calibration& calibration) {
  std::vector<LayerRequest> requests;
  for (const auto& [layer, c] : calibration.layers) {
    requests.push_back({.shape = {.n_query_heads = static_cast<int>(c.key.size()),
                                  .n_kv_heads = static_cast<int>(c.key.size()),
                                  .key_dim = c.key.front()->dim,
                                  .value_dim = c.value.front()->dim},
                        .calibration = &c,
                        .name = "layer " + std::to_string(layer)});
  }
  for (const RegisteredScheme& registered : registered_schemes()) {
    const Result<Scheme> scheme = parse_scheme(registered.name, true);
    if (!scheme.ok()) continue;
    const Result<std::vector<LayerScheme>> resolved = resolve_layers(scheme.value(), requests);
    if (!resolved.ok()) continue;
    std::string reason;
    int layers = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (resolved.value()[i].reason.empty()) continue;
      if (layers++ == 0) reason = requests[i].name + ": " + resolved.value()[i].reason;
    }
    if (layers > 0) {
      std::printf("%s gets wider bands in %d layers (%s%s)\n", std::string(registered.name).c_str(), layers,
                  reason.c_str(), layers > 1 ? "; ..." : "");
    }
  }
}

int do_calibrate(CalibrateFlags* f) {
  const Status output =
      check_output(f->output, {{"--model", f->options.model_path}, {"--file", f->text_path}});
  if (!output.ok()) return fail(output);
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
  const Result<eval::CalibrationResult> made = eval::calibrate(f->options);
  progress.clear();
  if (!made.ok()) return fail(made.status());
  const ggml::Calibration& calibration = made.value().calibration;
  const std::string path = f->output.empty() ? ggml::calibration_path(calibration.fingerprint) : f->output;
  const Status saved = ggml::save_calibration(calibration, path);
  if (!saved.ok()) return fail(saved);
  const double seconds = now_seconds() - start;
  if (f->json) {
    print_json(made.value(), path, seconds);
  } else {
    std::printf("%s: %zu layers from %lld tokens in %.0f s\n", path.c_str(), calibration.layers.size(),
                static_cast<long long>(calibration.tokens), seconds);
    print_outliers(made.value().outliers);
    print_escapes(calibration);
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

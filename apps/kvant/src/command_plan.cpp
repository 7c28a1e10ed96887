// kvant plan: bytes of a cache before anything is loaded.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "cli.h"
#include "kvant/calibration_file.h"
#include "kvant/calibration_lookup.h"
#include "kvant/candidate.h"
#include "kvant/eval_report.h"
#include "kvant/model_shape.h"
#include "kvant/peer_memory.h"

namespace kvant::cli {
namespace {

struct PlanFlags {
  std::string model, kv;
  int layers = 0, kv_heads = 0, query_heads = 0, head_dim = 0, value_dim = 0;
  CacheFlags cache;
  eval::PlanOptions options;
  bool json = false, markdown = false;
};

constexpr char kDefaultCaches[] = "exact,kv8,kv4";

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant plan -m model.gguf -c 32768 --sequences 4\n"
    "  kvant plan --layers 32 --kv-heads 8 --head-dim 128 -c 131072 --kv llama:q4_0,kv8,kv4\n"
    "\nBytes are those of a cache whose every sequence holds --ctx-size tokens: the same formula as the "
    "allocator's\n"
    "counter; llama:TYPE is llama.cpp's own cache, allocated whole from the start. Weights and llama.cpp's "
    "compute\n"
    "buffers are not counted.\n";

Result<eval::ModelShape> shape_of(const PlanFlags& f) {
  const bool by_hand = f.layers > 0 || f.kv_heads > 0 || f.head_dim > 0;
  if (!f.model.empty()) {
    if (by_hand)
      return Status(Code::kInvalidArgument,
                    "--model already says --layers, --kv-heads and --head-dim; give one or the other");
    return eval::read_model_shape(f.model);
  }
  for (const auto& [name, value] :
       {std::pair{"--layers", f.layers}, {"--kv-heads", f.kv_heads}, {"--head-dim", f.head_dim}}) {
    if (value <= 0)
      return Status(Code::kInvalidArgument, std::string(name) + " is needed, or a model file with --model");
  }
  eval::ModelShape shape;
  shape.name = fmt::format("{} layers, {} KV heads x {}", f.layers, f.kv_heads, f.head_dim);
  const LayerShape layer{.n_query_heads = f.query_heads > 0 ? f.query_heads : f.kv_heads,
                         .n_kv_heads = f.kv_heads,
                         .key_dim = f.head_dim,
                         .value_dim = f.value_dim > 0 ? f.value_dim : f.head_dim};
  for (const auto& [name, dim] : {std::pair{"--head-dim", layer.key_dim}, {"--value-dim", layer.value_dim}}) {
    if (dim % 8 == 0) continue;
    return Status(Code::kInvalidArgument, fmt::format("{} {}: head sizes are multiples of 8; nearest is {}",
                                                      name, dim, (dim + 4) / 8 * 8));
  }
  if (layer.n_query_heads % f.kv_heads != 0) {
    const int nearest = std::max(1, (2 * layer.n_query_heads + f.kv_heads) / (2 * f.kv_heads)) * f.kv_heads;
    return Status(Code::kInvalidArgument,
                  fmt::format("--query-heads {}: not a multiple of --kv-heads {}; nearest is {}",
                              layer.n_query_heads, f.kv_heads, nearest));
  }
  shape.layers.assign(f.layers, {.shape = layer});
  return shape;
}

// The calibration that the backend would find for the model.
Status find_calibration(const std::string& model, const ggml::Options& options,
                        std::optional<ggml::Calibration>* out) {
  if (model.empty()) return {};
  Result<uint64_t> fingerprint = ggml::model_fingerprint(model);
  if (!fingerprint.ok()) return fingerprint.status();
  Result<std::optional<ggml::Calibration>> found = ggml::find_calibration(options, fingerprint.value());
  if (!found.ok()) return found.status();
  *out = std::move(found.value());
  return {};
}

nlohmann::json plan_json(const std::string& scheme, const eval::Plan& p) {
  return {{"kv", scheme},
          {"bits_k", p.bits_k},
          {"bits_v", p.bits_v},
          {"bits_per_value", p.bits},
          {"bytes",
           {{"packed", p.memory.tile_bytes},
            {"exact_rows", p.memory.exact_row_bytes},
            {"tables", p.memory.table_bytes},
            {"workspace", p.memory.workspace_bytes},
            {"total", p.memory.total()},
            {"f16", p.f16_bytes}}},
          {"times_smaller", static_cast<double>(p.f16_bytes) / static_cast<double>(p.memory.total())}};
}

std::vector<std::string> plan_row(const std::string& scheme, const eval::Plan& p) {
  return {scheme,
          fmt::format("{:.3f} / {:.3f}", p.bits_k, p.bits_v),
          with_commas(p.memory.tile_bytes),
          with_commas(p.memory.exact_row_bytes),
          with_commas(p.memory.table_bytes),
          with_commas(p.memory.workspace_bytes),
          with_commas(p.memory.total()),
          beside_f16(p.memory.total(), p.f16_bytes)};
}

Result<std::vector<eval::Candidate>> read_caches(const Wanted& wanted, const CacheFlags& flags) {
  std::vector<eval::Candidate> caches;
  const std::string where = std::string(wanted.source) + ": ";
  bool any_kvant = false;
  for (const std::string& text : eval::split_candidates(wanted.caches)) {
    const bool peer = text.starts_with("llama:");
    any_kvant = any_kvant || !peer;
    Result<std::string> scheme = peer ? text : scheme_with_flags(text, flags, wanted.source);
    if (!scheme.ok()) return scheme.status();
    Result<eval::Candidate> cache = eval::parse_candidate(scheme.value());
    if (!cache.ok()) return Status(cache.status().code(), where + cache.status().message());
    caches.push_back(std::move(cache.value()));
  }
  if (caches.empty())
    return Status(Code::kInvalidArgument, where + "no cache is listed; for example " + kDefaultCaches);
  if (const std::string flag = first_kvant_flag(flags); !flag.empty() && !any_kvant) {
    return Status(Code::kUnsupported,
                  flag + " is an option of kvant's caches, and " + wanted.source + " lists none");
  }
  return caches;
}

int do_plan(const PlanFlags& f) {
  Result<eval::ModelShape> shape = shape_of(f);
  if (!shape.ok()) return fail(shape.status());
  std::vector<std::vector<std::string>> rows = {
      {"scheme", "bits K / V", "packed", "exact rows", "tables", "workspace", "total bytes", "beside f16"}};
  nlohmann::json plans = nlohmann::json::array();
  if (f.model.empty() && !f.cache.recipe.empty() && f.cache.recipe != "none") {
    return fail(
        {Code::kInvalidArgument, "--recipe " + f.cache.recipe + " is for a model; give it with --model"});
  }
  ggml::Options environment;
  std::vector<std::string> overridden;
  if (Status status = cache_options(f.cache, &environment, &overridden); !status.ok()) return fail(status);
  std::optional<ggml::Calibration> calibration;
  if (Status status = find_calibration(f.model, environment, &calibration); !status.ok()) return fail(status);
  const Wanted wanted = wanted_caches(f.kv, kDefaultCaches, &overridden);
  Result<std::vector<eval::Candidate>> caches = read_caches(wanted, f.cache);
  if (!caches.ok()) return fail(caches.status());
  size_t f16 = 0;
  for (const eval::Candidate& c : caches.value()) {
    eval::PlanOptions options = f.options;
    options.scheme = c.scheme;
    options.calibration = calibration ? &*calibration : nullptr;
    Result<eval::Plan> plan =
        c.peer ? eval::plan_peer(shape.value(), c, options) : eval::plan_model(shape.value(), options);
    if (!plan.ok()) return fail(plan.status());
    f16 = plan.value().f16_bytes;
    rows.push_back(plan_row(c.name, plan.value()));
    plans.push_back(plan_json(c.name, plan.value()));
  }
  if (f.json) {
    const nlohmann::json j = {{"version", 1},
                              {"model", f.model.empty() ? nlohmann::json(nullptr) : nlohmann::json(f.model)},
                              {"layers", shape.value().layers.size()},
                              {"calibrated", calibration.has_value()},
                              {"sliding_window", shape.value().sliding_window},
                              {"ctx_size", f.options.context},
                              {"sequences", f.options.sequences},
                              {"overridden", overridden},
                              {"plans", plans}};
    write_json(j);
    return kOk;
  }
  for (const std::string& line : overridden) std::fprintf(stderr, "kvant: %s\n", line.c_str());
  std::printf("%s, %zu layers with a cache, %d sequences of %d tokens; f16 rows alone: %s bytes.\n\n",
              shape.value().name.c_str(), shape.value().layers.size(), f.options.sequences, f.options.context,
              with_commas(f16).c_str());
  std::fputs(eval::format_table(rows, f.markdown).c_str(), stdout);
  if (shape.value().sliding_window > 0) {
    std::printf(
        "\nLayers with a sliding window of %d tokens: what their cache holds after that many tokens, at "
        "most.\n",
        shape.value().sliding_window);
  }
  return kOk;
}

}  // namespace

Command add_plan(CLI::App& root) {
  auto f = std::make_shared<PlanFlags>();
  f->options.threads = default_threads();
  CLI::App* app = root.add_subcommand("plan", "bytes of a cache by part, without loading a model");
  app->footer(kFooter);
  app->add_option("-m,--model", f->model, "model file (GGUF); only its header is read")
      ->check(readable_file())
      ->type_name("FILE");
  const char* shape = "Shape, instead of a model";
  app->add_option("--layers", f->layers, "layers with attention")
      ->check(whole_number(1, 4096))
      ->type_name("N")
      ->group(shape);
  app->add_option("--kv-heads", f->kv_heads, "KV heads per layer")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->group(shape);
  app->add_option("--query-heads", f->query_heads, "query heads per layer (default: --kv-heads)")
      ->check(whole_number(1, 8192))
      ->type_name("N")
      ->group(shape);
  app->add_option("--head-dim", f->head_dim, "channels of a key head (32 to 256, a multiple of 8)")
      ->check(whole_number(32, 256))
      ->type_name("N")
      ->group(shape);
  app->add_option("--value-dim", f->value_dim, "channels of a value head (default: --head-dim)")
      ->check(whole_number(32, 256))
      ->type_name("N")
      ->group(shape);
  app->add_option("-c,--ctx-size", f->options.context, "tokens per sequence (default 4096)")
      ->check(whole_number(1, 1 << 28))
      ->type_name("N");
  app->add_option("--sequences", f->options.sequences, "sequences, each in its own stream (default 1)")
      ->check(whole_number(1, 4096))
      ->type_name("N");
  app->add_option("-t,--threads", f->options.threads, "threads, for the workspace (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
  app->add_option("--kv", f->kv, "schemes and llama:TYPE (default exact,kv8,kv4, or KVANT_KV)")
      ->type_name("LIST");
  app->add_option("--window", f->cache.window, "exact recent tokens, instead of the scheme's")
      ->check(whole_number(0, 4096))
      ->type_name("N");
  app->add_option("--sinks", f->cache.sinks, "exact first tokens, instead of the scheme's")
      ->check(whole_number(0, 256))
      ->type_name("N");
  app->add_option("--recipe", f->cache.recipe,
                  "calibration file, a folder of them, or none (default: where `kvant calibrate` writes)")
      ->type_name("PATH|none");
  app->add_flag("--json", f->json, "print JSON");
  app->add_flag("--markdown", f->markdown, "print a table for GitHub");
  return {app, [f] { return do_plan(*f); }};
}

}  // namespace kvant::cli

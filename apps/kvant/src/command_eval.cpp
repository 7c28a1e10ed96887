// kvant eval: caches compared on a model and a text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "cli.h"
#include "kvant/eval_report.h"
#include "kvant/evaluate.h"
#include "kvant/llama_session.h"

namespace kvant::cli {
namespace {

struct EvalFlags {
  std::string model, file, filler;
  std::vector<std::string> kv;
  CacheFlags cache;
  eval::EvaluateOptions options;
  std::string tests = "text,copy", score = "beyond-window", weights = "f32";
  double max_kl = -1;
  bool no_speed = false, legs = false, json = false, markdown = false, verbose = false;
};

// Three 4-bit schemes: the default (keys per channel), groups of 32 as llama.cpp's types have them, and a
// plain rotation.
constexpr char kDefaultCaches[] =
    "llama:f16,llama:q8_0,llama:q5_0,llama:q4_0,exact,kv8,kv4;k=g4,v=g4;k=t4,v=t4,kx=hadamard";

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant eval -m model.gguf -f text.txt --filler other.txt\n"
    "  kvant eval -m model.gguf -f text.txt --kv llama:q8_0,llama:q8_0/q4_0,kv4,kv4,w=256 -c 4096\n"
    "  kvant eval -m model.gguf -f text.txt --kv 'k=c4,v=t4;k=t4,v=t4' --legs --json\n"
    "  kvant eval -m model.gguf -f text.txt --kv kv4 --max-kl 0.01 --no-speed   (exit code 8 when it is "
    "above)\n"
    "  kvant eval -m model.gguf -f text.txt --kv llama:q4_0 --score second-half -c 512 --windows 4 --tests "
    "text\n"
    "      scores what llama-perplexity --kl-divergence scores\n"
    "\nCaches are separated by commas; a part with '=' continues the scheme before it, ';' always "
    "separates.\n"
    "Everything is compared with llama.cpp's f16 cache; docs/evaluation.md explains the columns.\n";

void add_text_flags(CLI::App* app, EvalFlags* f) {
  const char* group = "Tests";
  app->add_option("--filler", f->filler, "other text of the copy test (default: the end of the text)")
      ->check(readable_file())
      ->type_name("FILE")
      ->group(group);
  app->add_option("--tests", f->tests, "which tests (default text,copy)")
      ->check(one_of({"text", "copy", "text,copy", "none"}))
      ->group(group);
  app->add_option("-c,--ctx-size", f->options.window_tokens, "tokens of a text window (default 2048)")
      ->check(whole_number(64, 1 << 24))
      ->type_name("N")
      ->group(group);
  app->add_option("--windows", f->options.windows, "consecutive windows of the text (default 1)")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N")
      ->group(group);
  app->add_option("--score", f->score,
                  "positions that count (default beyond-window: the largest exact window + 512)")
      ->check(one_of({"beyond-window", "second-half"}))
      ->group(group);
  app->add_option("--passage", f->options.passage_tokens,
                  "copy test: tokens that are repeated (default 1024)")
      ->check(whole_number(16, 1 << 20))
      ->type_name("N")
      ->group(group);
  app->add_option("--filler-tokens", f->options.filler_tokens, "copy test: tokens in between (default 2048)")
      ->check(whole_number(0, 1 << 24))
      ->type_name("N")
      ->group(group);
}

void add_other_flags(CLI::App* app, EvalFlags* f) {
  const char* speed = "Speed";
  app->add_flag("--no-speed", f->no_speed, "no speed figures")->group(speed);
  app->add_option("--speed-depth", f->options.speed_tokens,
                  "tokens in the cache when decoding and prefill are timed (default 2048)")
      ->check(whole_number(64, 1 << 24))
      ->type_name("N")
      ->group(speed);
  app->add_option("--decode-tokens", f->options.decode_tokens, "tokens decoded (default 64)")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N")
      ->group(speed);
  const char* method = "Method";
  app->add_option("--weights", f->weights,
                  "f32 (default): expanded once into the cache folder; native: as in the file")
      ->check(one_of({"f32", "native"}))
      ->group(method);
  app->add_option("--chunk", f->options.chunk_tokens, "tokens per step (default 256)")
      ->check(whole_number(1, 8192))
      ->type_name("N")
      ->group(method);
  app->add_option("-t,--threads", f->options.threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N")
      ->group(method);
  app->add_option("--resamples", f->options.bootstrap.resamples, "of the bootstrap (default 1000)")
      ->check(whole_number(1000, 1000000))
      ->type_name("N")
      ->group(method);
  app->add_option("-s,--seed", f->options.bootstrap.seed, "of the bootstrap (default 1)")
      ->check(whole_number(0, 4294967295LL))
      ->type_name("N")
      ->group(method);
  app->add_flag("--legs", f->legs, "also keys only and values only, per cache")->group(method);
  app->add_flag("--both-paths", f->options.both_paths,
                "also decode tiles first (--attention dequant): what attention on packed codes costs")
      ->group(method);
  app->add_option("--max-kl", f->max_kl, "exit code 8 when a kvant cache has a larger mean KL in any test")
      ->check(decimal(0, 1000))
      ->type_name("KL")
      ->group(method);
  app->add_flag("--json", f->json, "print JSON, version 1")->group("Output");
  app->add_flag("--markdown", f->markdown, "print tables for GitHub")->group("Output");
  app->add_flag("-v,--verbose", f->verbose, "llama.cpp's messages, and what runs per layer")->group("Output");
}

Status read_candidates(EvalFlags* f, std::vector<std::string>* overridden) {
  // Several --kv are one list.
  const auto [list, source] =
      wanted_caches(fmt::format("{}", fmt::join(f->kv, ";")), kDefaultCaches, overridden);
  const std::string where = std::string(source) + ": ";
  for (const std::string& text : eval::split_candidates(list)) {
    std::string scheme = text;
    if (!text.starts_with("llama:")) {
      Result<std::string> checked = scheme_with_flags(text, f->cache, source);
      if (!checked.ok()) return checked.status();
      scheme = checked.value();
    }
    Result<eval::Candidate> candidate = eval::parse_candidate(scheme);
    if (!candidate.ok()) return {candidate.status().code(), where + candidate.status().message()};
    for (const eval::Candidate& other : f->options.candidates) {
      if (other.name == candidate.value().name)
        return {Code::kInvalidArgument, fmt::format("{}'{}' is listed twice", where, text)};
    }
    f->options.candidates.push_back(std::move(candidate.value()));
  }
  if (f->options.candidates.empty()) {
    return {Code::kInvalidArgument, where + "no cache is listed; for example " + kDefaultCaches};
  }
  const bool judged = std::any_of(f->options.candidates.begin(), f->options.candidates.end(),
                                  [](const eval::Candidate& c) { return !c.peer; });
  if (f->max_kl >= 0 && !judged) {
    return {Code::kInvalidArgument, "--max-kl judges kvant's caches, and --kv lists none; for example kv4"};
  }
  if (const std::string flag = first_kvant_flag(f->cache); !flag.empty() && !judged) {
    return {Code::kUnsupported,
            flag + " is an option of kvant's caches, and --kv lists none; for example kv4"};
  }
  if (f->legs) f->options.candidates = eval::with_legs(f->options.candidates);
  return {};
}

Status prepare(EvalFlags* f, std::vector<std::string>* overridden) {
  eval::EvaluateOptions& o = f->options;
  KVANT_RETURN_IF_ERROR(cache_options(f->cache, &o.kvant, overridden));
  KVANT_RETURN_IF_ERROR(read_candidates(f, overridden));
  o.model_path = f->model;
  o.text_test = f->tests.find("text") != std::string::npos;
  o.copy_test = f->tests.find("copy") != std::string::npos;
  o.second_half = f->score == "second-half";
  o.f32_weights = f->weights == "f32";
  o.speed = !f->no_speed;
  if (!o.text_test && !o.copy_test)
    return {Code::kInvalidArgument, "--tests none leaves no rows; nearest is text"};
  Result<std::string> text = read_file(f->file);
  if (!text.ok()) return text.status();
  o.text = std::move(text.value());
  if (!f->filler.empty()) {
    Result<std::string> filler = read_file(f->filler);
    if (!filler.ok()) return filler.status();
    if (filler.value().empty()) return {Code::kInvalidArgument, "--filler " + f->filler + " is empty"};
    o.filler = std::move(filler.value());
  }
  return {};
}

void print_effective(const eval::Evaluation& result, const std::vector<std::string>& overridden) {
  for (const std::string& line : overridden) std::fprintf(stderr, "kvant: %s\n", line.c_str());
  for (const eval::Row& row : result.rows) {
    if (row.candidate.peer) continue;
    for (const nlohmann::json& e : eval::effective_json(row.caches)) {
      const std::string reason = e["reason"];
      std::fprintf(stderr, "kvant: %s, %s: %zu layers run %s%s\n", row.candidate.name.c_str(),
                   row.test.c_str(), e["layers"].size(), e["effective"].get<std::string>().c_str(),
                   reason.empty() ? "" : (" (" + reason + ")").c_str());
    }
  }
}

int judge(const eval::Evaluation& result, double max_kl) {
  int code = kOk;
  for (const eval::Row& row : result.rows) {
    if (row.candidate.peer || max_kl < 0 || row.quality.kl_mean <= max_kl) continue;
    std::fprintf(stderr, "kvant eval: --max-kl %g: %s has a mean KL of %g on %s\n", max_kl,
                 row.candidate.name.c_str(), row.quality.kl_mean, row.test.c_str());
    code = kBarFailed;
  }
  return code;
}

int do_eval(EvalFlags* f) {
  std::vector<std::string> overridden;
  if (Status status = prepare(f, &overridden); !status.ok()) return fail(status);
  eval::show_llama_messages(f->verbose);
  catch_interrupt();
  eval::Evaluation result;
  Status status;
  {
    ProgressLine line;
    const eval::EvaluateHooks hooks{
        .progress = [&](double share, const std::string& what) { line.show(share, what); },
        .cancelled = [] { return interrupted(); }};
    status = eval::evaluate(f->options, hooks, &result);
  }
  if (!status.ok() && status.code() != Code::kCancelled) return fail(status);
  if (f->verbose) print_effective(result, overridden);
  if (f->json) {
    nlohmann::json j = eval::to_json(result, f->options, f->file);
    j["overridden"] = overridden;
    write_json(j);
  } else {
    std::fputs(eval::to_table(result, f->options, f->markdown).c_str(), stdout);
    std::printf("Took %.0f s.\n", result.seconds);
  }
  std::fflush(stdout);
  if (!status.ok()) return kInterrupted;
  return judge(result, f->max_kl);
}

}  // namespace

Command add_eval(CLI::App& root) {
  auto flags = std::make_shared<EvalFlags>();
  flags->options.threads = default_threads();
  CLI::App* app = root.add_subcommand("eval", "compare caches on a model and a text: quality, bytes, speed");
  app->footer(kFooter);
  app->add_option("-m,--model", flags->model, "model file (GGUF)")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("-f,--file", flags->file, "text to evaluate on")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("--kv", flags->kv, fmt::format("caches to compare (default {})", kDefaultCaches))
      ->type_name("LIST")
      ->allow_extra_args(false);
  add_text_flags(app, flags.get());
  add_cache_flags(app, &flags->cache);
  add_other_flags(app, flags.get());
  return {app, [flags] { return do_eval(flags.get()); }};
}

}  // namespace kvant::cli

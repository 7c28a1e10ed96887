// kvant bench: how fast caches are read, side by side in one run.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "kvant/bench_attention.h"
#include "kvant/bench_decode.h"
#include "kvant/candidate.h"
#include "kvant/llama_session.h"

namespace kvant::cli {
namespace {

struct AttentionFlags {
  eval::BenchAttentionOptions options;
  std::string caches = "llama:f16,llama:q8_0,llama:q4_0,exact,kv8,kv4,k=t4,v=t4,kv3,kv2";
  bool json = false;
};

constexpr char kAttentionFooter[] =
    "\nExamples:\n"
    "  kvant bench attention\n"
    "  kvant bench attention --kv exact,kv4,llama:f16,llama:q4_0 --lengths 4096,32768 --group 4\n"
    "\nOne query per step, as in decoding. Results are checked against double precision over the stored "
    "values before\n"
    "they are timed. GB/s counts the bytes of the cache; stream is a plain read of memory in the same run.\n";

std::string repro(const eval::BenchAttentionOptions& o) {
  return fmt::format(
      "kvant bench attention --kv '{}' --lengths {} --head-dim {} --kv-heads {} --group {} --layers {} -t {} "
      "--repeats {}",
      fmt::join(o.caches, ";"), fmt::join(o.lengths, ","), o.head_dim, o.kv_heads, o.group, o.layers,
      o.threads, o.repeats);
}

void print_json(const eval::AttentionBench& bench, const eval::BenchAttentionOptions& o) {
  nlohmann::json rows = nlohmann::json::array();
  for (const eval::AttentionRow& r : bench.rows) {
    rows.push_back({{"cache", r.cache},
                    {"length", r.length},
                    {"ns_per_head_key", r.ns_per_head_key},
                    {"cache_bytes", r.cache_bytes},
                    {"gb_per_s", r.gigabytes_per_s},
                    {"stream_share", r.stream_share},
                    {"max_error", r.max_error},
                    {"note", r.note}});
  }
  const nlohmann::json out = {{"version", 1},         {"isa", bench.isa},
                              {"threads", o.threads}, {"stream_gb_per_s", bench.stream_gigabytes_per_s},
                              {"command", repro(o)},  {"rows", rows}};
  std::printf("%s\n", out.dump(2).c_str());
}

void print_table(const eval::AttentionBench& bench, const eval::BenchAttentionOptions& o) {
  std::printf("isa %s, %d threads, read stream %.1f GB/s\n\n", bench.isa.c_str(), o.threads,
              bench.stream_gigabytes_per_s);
  std::printf(
      "| cache | keys | ns per head and key | MB read | GB/s | of stream | error | "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const eval::AttentionRow& r : bench.rows) {
    std::printf("| %s | %d | %.3f | %.2f | %.2f | %.0f %% | %s | %s |\n", r.cache.c_str(), r.length,
                r.ns_per_head_key, r.cache_bytes * 1e-6, r.gigabytes_per_s, 100 * r.stream_share,
                r.max_error > 0 ? fmt::format("{:.1e}", r.max_error).c_str() : "", r.note.c_str());
  }
  std::printf("\n%s\n", repro(o).c_str());
}

int do_attention(AttentionFlags* f) {
  catch_interrupt();
  f->options.caches = eval::split_candidates(f->caches);
  ProgressLine progress;
  f->options.progress = [&](double share, const std::string& what) { progress.show(share, what); };
  f->options.cancelled = [] { return interrupted(); };
  if (f->options.threads == 0) f->options.threads = default_threads();
  eval::AttentionBench bench;
  const Status status = eval::bench_attention(f->options, &bench);
  progress.clear();
  if (!status.ok()) return fail(status);
  if (f->json) {
    print_json(bench, f->options);
  } else {
    print_table(bench, f->options);
  }
  return kOk;
}

struct DecodeFlags {
  eval::BenchDecodeOptions options;
  CacheFlags cache;
  std::string caches = "llama:f16,llama:q8_0,llama:q4_0,exact,kv8,kv4";
  bool json = false;
};

constexpr char kDecodeFooter[] =
    "\nExamples:\n"
    "  kvant bench decode -m model.gguf --depths 0,4096\n"
    "  kvant bench decode -m model.gguf --kv llama:f16,llama:q4_0,kv4 --depths 7936 --json\n"
    "\nWhole steps of the model over a filled cache. Contexts of all caches live at once and take turns.\n";

std::string repro(const DecodeFlags& f) {
  return fmt::format(
      "kvant bench decode -m {} --kv '{}' --depths {} -t {} --rounds {} --round-tokens {} --prefill {}",
      f.options.model_path, f.caches, fmt::join(f.options.depths, ","), f.options.threads, f.options.rounds,
      f.options.round_tokens, f.options.prefill_tokens);
}

void print_decode(const std::vector<eval::DecodeRow>& rows, const DecodeFlags& f) {
  if (f.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const eval::DecodeRow& r : rows) {
      list.push_back({{"cache", r.cache},
                      {"depth", r.depth},
                      {"decode_tok_s", r.decode_tok_s},
                      {"prefill_tok_s", r.prefill_tok_s},
                      {"flash_attention", r.flash_attention},
                      {"cache_bytes", r.cache_bytes}});
    }
    const nlohmann::json out = {
        {"version", 1}, {"threads", f.options.threads}, {"command", repro(f)}, {"rows", list}};
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  std::printf(
      "| cache | depth | decode tok/s | prefill %d tok/s | cache MiB | |\n|---|---|---|---|---|---|\n",
      f.options.prefill_tokens);
  for (const eval::DecodeRow& r : rows) {
    std::printf("| %s | %d | %.2f | %.1f | %s | %s |\n", r.cache.c_str(), r.depth, r.decode_tok_s,
                r.prefill_tok_s, r.cache_bytes > 0 ? mib(r.cache_bytes).c_str() : "",
                r.flash_attention ? "" : "flash attention off");
  }
  std::printf("\n%s\n", repro(f).c_str());
}

int do_decode(DecodeFlags* f) {
  std::vector<std::string> overridden;
  const Status options = cache_options(f->cache, &f->options.kvant, &overridden);
  if (!options.ok()) return fail(options);
  const Result<std::vector<eval::Candidate>> caches = eval::parse_candidates(f->caches);
  if (!caches.ok()) return fail(caches.status());
  catch_interrupt();
  eval::show_llama_messages(false);
  f->options.caches = caches.value();
  f->options.kvant.quiet = true;
  if (f->options.threads == 0) f->options.threads = default_threads();
  ProgressLine progress;
  f->options.progress = [&](double share, const std::string& what) { progress.show(share, what); };
  f->options.cancelled = [] { return interrupted(); };
  std::vector<eval::DecodeRow> rows;
  const Status status = eval::bench_decode(f->options, &rows);
  progress.clear();
  if (!rows.empty()) print_decode(rows, *f);
  return status.ok() ? static_cast<int>(kOk) : fail(status);
}

CLI::App* add_decode(CLI::App* bench, DecodeFlags* f) {
  eval::BenchDecodeOptions& o = f->options;
  o.threads = 0;
  CLI::App* app = bench->add_subcommand(
      "decode", "whole model steps over a filled cache, kvant and llama.cpp in one run");
  app->footer(kDecodeFooter);
  app->add_option("-m,--model", o.model_path, "model file (GGUF)")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("--kv", f->caches, "caches: schemes, or llama:TYPE (default " + f->caches + ")")
      ->type_name("LIST");
  app->add_option("--depths", o.depths, "tokens in the cache (default 0,4096)")
      ->delimiter(',')
      ->check(whole_number(0, 1 << 20))
      ->type_name("LIST");
  app->add_option("-t,--threads", o.threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
  app->add_option("--rounds", o.rounds, "rounds over the caches (default 5)")
      ->check(whole_number(1, 1000))
      ->type_name("N");
  app->add_option("--round-tokens", o.round_tokens, "decode steps of a cache in a round (default 8)")
      ->check(whole_number(1, 10000))
      ->type_name("N");
  app->add_option("--prefill", o.prefill_tokens, "tokens of one prefill batch, 0: none (default 512)")
      ->check(whole_number(0, 4096))
      ->type_name("N");
  add_cache_flags(app, &f->cache);
  app->add_flag("--json", f->json, "print JSON");
  return app;
}

}  // namespace

Command add_bench(CLI::App& root) {
  auto f = std::make_shared<AttentionFlags>();
  eval::BenchAttentionOptions& o = f->options;
  o.threads = 0;
  CLI::App* bench = root.add_subcommand("bench", "measure speed");
  bench->require_subcommand(1);
  CLI::App* app =
      bench->add_subcommand("attention", "decode attention alone, kvant and llama.cpp in one run");
  app->footer(kAttentionFooter);
  app->add_option("--kv", f->caches, "caches: schemes, or llama:TYPE (default " + f->caches + ")")
      ->type_name("LIST");
  app->add_option("--lengths", o.lengths, "keys (default 4096,32768)")
      ->delimiter(',')
      ->check(whole_number(64, 1 << 22))
      ->type_name("LIST");
  app->add_option("--head-dim", o.head_dim, "channels of a head (default 128)")
      ->check(whole_number(32, 256))
      ->type_name("N");
  app->add_option("--kv-heads", o.kv_heads, "KV heads (default 2)")
      ->check(whole_number(1, 64))
      ->type_name("N");
  app->add_option("--group", o.group, "query heads per KV head (default 4)")
      ->check(whole_number(1, 64))
      ->type_name("N");
  app->add_option("--layers", o.layers, "caches visited in turn (default 8)")
      ->check(whole_number(1, 64))
      ->type_name("N");
  app->add_option("-t,--threads", o.threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
  app->add_option("--repeats", o.repeats, "rounds; the median counts (default 5)")
      ->check(whole_number(1, 1000))
      ->type_name("N");
  app->add_flag("--json", f->json, "print JSON");
  auto d = std::make_shared<DecodeFlags>();
  CLI::App* decode = add_decode(bench, d.get());
  bench->footer("\nExamples:\n  kvant bench attention\n  kvant bench decode -m model.gguf --depths 0,4096\n");
  return {bench, [f, d, decode] { return decode->parsed() ? do_decode(d.get()) : do_attention(f.get()); }};
}

}  // namespace kvant::cli

// kvant bench: how fast caches are read, side by side in one run.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "kvant/bench_attention.h"
#include "kvant/bench_bars.h"
#include "kvant/bench_decode.h"
#include "kvant/candidate.h"
#include "kvant/isa.h"
#include "kvant/llama_session.h"

namespace kvant::cli {
namespace {

constexpr char kAttentionCaches[] = "llama:f16,llama:q8_0,llama:q4_0,exact,kv8,kv4;k=t4,v=t4;kv3,kv2";
constexpr char kDecodeCaches[] = "llama:f16,llama:q8_0,llama:q4_0,exact,kv8,kv4";

struct AttentionFlags {
  eval::BenchAttentionOptions options;
  std::string caches, peers;  // empty: KVANT_KV, or the default
  bool json = false;
};

// --kv, else KVANT_KV, else `fallback`, once that is known to be a list of caches.
Status choose_caches(const char* fallback, std::string* caches) {
  std::vector<std::string> overridden;
  const Wanted wanted = wanted_caches(*caches, fallback, &overridden);
  for (const std::string& line : overridden) std::fprintf(stderr, "kvant: %s\n", line.c_str());
  const Result<std::vector<eval::Candidate>> parsed = eval::parse_bench_candidates(wanted.caches);
  if (!parsed.ok()) {
    return {parsed.status().code(), std::string(wanted.source) + ": " + parsed.status().message()};
  }
  *caches = wanted.caches;
  return {};
}

// --peer adds to --kv.
std::string with_peers(const std::string& caches, const std::string& peers) {
  return peers.empty() ? caches : peers + ";" + caches;
}

void add_peer_option(CLI::App* app, std::string* peers) {
  app->add_option("--peer", *peers,
                  "more caches of other engines: llama:TYPE, ik:TYPE (after ./run setup peers)")
      ->type_name("LIST");
}

constexpr char kAttentionFooter[] =
    "\nExamples:\n"
    "  kvant bench attention\n"
    "  kvant bench attention --kv exact,kv4,llama:f16,llama:q4_0 --lengths 4096,32768 --group 4\n"
    "  kvant bench attention --kv kv4 --lengths 16384 --forks 8\n"
    "\nOne query per step, as in decoding. Results are checked against double precision over the stored "
    "values before\n"
    "they are timed. GB/s counts the bytes of the cache; stream is a plain read of memory, median too, in "
    "turn.\n";

std::string repro(const eval::BenchAttentionOptions& o) {
  return fmt::format(
      "kvant bench attention --kv '{}' --lengths {} --head-dim {} --kv-heads {} --group {} --forks {} "
      "--layers {} "
      "-t {} --repeats {}",
      fmt::join(o.caches, ";"), fmt::join(o.lengths, ","), o.head_dim, o.kv_heads, o.group, o.forks, o.layers,
      o.threads, o.repeats);
}

void print_json(const eval::AttentionBench& bench, const eval::BenchAttentionOptions& o) {
  nlohmann::json rows = nlohmann::json::array();
  for (const eval::AttentionRow& r : bench.rows) {
    rows.push_back({{"cache", r.cache},
                    {"length", r.length},
                    {"seconds", r.seconds},
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
  write_json(out);
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

// KVANT_ISA holds for kernels that are timed without the backend, too.
Status force_isa_of_environment() {
  ggml::Options environment;
  KVANT_RETURN_IF_ERROR(ggml::options_from_environment({}, &environment));
  return environment.isa.empty() ? Status() : force_isa(environment.isa);
}

int do_attention(AttentionFlags* f) {
  if (const Status forced = force_isa_of_environment(); !forced.ok()) return fail(forced);
  if (const Status chosen = choose_caches(kAttentionCaches, &f->caches); !chosen.ok()) return fail(chosen);
  catch_interrupt();
  f->options.caches = eval::split_candidates(with_peers(f->caches, f->peers));
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
  std::string caches, peers;  // empty: KVANT_KV, or the default
  bool json = false;
};

constexpr char kDecodeFooter[] =
    "\nExamples:\n"
    "  kvant bench decode -m model.gguf --depths 0,4096\n"
    "  kvant bench decode -m model.gguf --kv llama:f16,llama:q4_0,kv4 --depths 7936 --json\n"
    "  kvant bench decode -m model.gguf --kv exact,kv4 --peer llama:f16,ik:q4_0 --depths 32768\n"
    "\nWhole steps of the model over a filled cache. Contexts of all caches live at once and take turns.\n";

std::string repro(const DecodeFlags& f) {
  return fmt::format(
      "kvant bench decode -m {} --kv '{}' --depths {} -t {} --rounds {} --round-tokens {} --prefill {} "
      "--prefill-rounds {}",
      f.options.model_path, with_peers(f.caches, f.peers), fmt::join(f.options.depths, ","),
      f.options.threads, f.options.rounds, f.options.round_tokens, f.options.prefill_tokens,
      f.options.prefill_rounds);
}

void print_decode(const std::vector<eval::DecodeRow>& rows, const DecodeFlags& f) {
  if (f.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const eval::DecodeRow& r : rows) {
      list.push_back({{"cache", r.cache},
                      {"depth", r.depth},
                      {"decode_tok_s", r.decode_tok_s},
                      {"prefill_tok_s", r.prefill_tok_s},
                      {"prefill_encode_tok_s", r.prefill_encode_tok_s},
                      {"flash_attention", r.flash_attention},
                      {"encode_share", r.profile.encode_share()},
                      {"steps", r.profile.graphs},
                      {"weights_seconds", r.profile.model_seconds()},
                      {"attention_seconds", r.profile.attention_seconds},
                      {"encode_seconds", r.profile.encode_seconds},
                      {"masks_seconds", r.profile.plan_seconds},
                      {"cache_bytes", r.cache_bytes}});
    }
    const nlohmann::json out = {
        {"version", 1}, {"threads", f.options.threads}, {"command", repro(f)}, {"rows", list}};
    write_json(out);
    return;
  }
  std::printf(
      "| cache | depth | decode tok/s | prefill %d tok/s | its encoding alone | cache MiB | |\n"
      "|---|---|---|---|---|---|---|\n",
      f.options.prefill_tokens);
  for (const eval::DecodeRow& r : rows) {
    const std::string encode =
        r.prefill_encode_tok_s > 0 ? fmt::format("{:.0f} tok/s", r.prefill_encode_tok_s) : "";
    std::printf("| %s | %d | %.2f | %.1f | %s | %s | %s |\n", r.cache.c_str(), r.depth, r.decode_tok_s,
                r.prefill_tok_s, encode.c_str(), r.cache_bytes > 0 ? mib(r.cache_bytes).c_str() : "",
                r.flash_attention ? "" : "flash attention off");
  }
  std::printf("\n%s\n", repro(f).c_str());
}

int do_decode(DecodeFlags* f) {
  std::vector<std::string> overridden;
  const Status options = cache_options(f->cache, &f->options.kvant, &overridden);
  if (!options.ok()) return fail(options);
  if (const Status chosen = choose_caches(kDecodeCaches, &f->caches); !chosen.ok()) return fail(chosen);
  const Result<std::vector<eval::Candidate>> caches =
      eval::parse_bench_candidates(with_peers(f->caches, f->peers));
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
  app->add_option("--kv", f->caches,
                  fmt::format("caches: schemes, or llama:TYPE (default {}, or KVANT_KV)", kDecodeCaches))
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
  app->add_option("--prefill-rounds", o.prefill_rounds, "rounds of prefill; the median counts (default 1)")
      ->check(whole_number(1, 100))
      ->type_name("N");
  add_peer_option(app, &f->peers);
  add_cache_flags(app, &f->cache);
  app->add_flag("--json", f->json, "print JSON");
  return app;
}

struct BarsFlags {
  eval::BarsOptions options;
  bool json = false;
};

constexpr char kBarsFooter[] =
    "\nExamples:\n"
    "  kvant bench bars -m SmolLM2-135M-Instruct.Q4_1.gguf\n"
    "  kvant bench bars -m SmolLM2-135M-Instruct.Q4_1.gguf --only attention,forks --json\n"
    "\nEach row is a median of rounds that interleave the caches. Results are checked before they are timed. "
    "Exit code\n8 when a row that was measured falls short.\n";

const char* state_name(eval::BarState state) {
  switch (state) {
    case eval::BarState::kHolds:
      return "holds";
    case eval::BarState::kShort:
      return "falls short";
    case eval::BarState::kNotMeasured:
      break;
  }
  return "not measured";
}

std::string repro(const BarsFlags& f) {
  const eval::BarsOptions& o = f.options;
  return fmt::format("kvant bench bars -m {}{}{} --cache '{}' -t {}{}{}", o.model_path,
                     o.shapes_path.empty() ? "" : " --shapes ", o.shapes_path, o.cache, o.threads,
                     o.only.empty() ? "" : " --only ", fmt::join(o.only, ","));
}

void print_bars(const std::vector<eval::BarRow>& rows, const BarsFlags& f) {
  if (f.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const eval::BarRow& r : rows) {
      const bool measured = r.state != eval::BarState::kNotMeasured;
      list.push_back({{"group", r.group},
                      {"what", r.what},
                      {"figure", measured ? nlohmann::json(r.figure) : nlohmann::json()},
                      {"bar", r.bound},
                      {"at_most", r.at_most},
                      {"state", state_name(r.state)},
                      {"note", r.note}});
    }
    const nlohmann::json out = {{"version", 1},
                                {"isa", std::string(active_isa())},
                                {"threads", f.options.threads},
                                {"command", repro(f)},
                                {"rows", list}};
    write_json(out);
    return;
  }
  std::printf(
      "isa %s, %d threads\n\n| --only | what | figure | bar | | measured |\n|---|---|---|---|---|---|\n",
      std::string(active_isa()).c_str(), f.options.threads);
  for (const eval::BarRow& r : rows) {
    const bool measured = r.state != eval::BarState::kNotMeasured;
    std::printf("| %s | %s | %s | %s %.3g | %s | %s |\n", r.group.c_str(), r.what.c_str(),
                measured ? fmt::format("{:.3f}", r.figure).c_str() : "", r.at_most ? "<=" : ">=", r.bound,
                state_name(r.state), r.note.c_str());
  }
  std::printf("\n%s\n", repro(f).c_str());
}

int do_bars(BarsFlags* f) {
  if (const Status forced = force_isa_of_environment(); !forced.ok()) return fail(forced);
  catch_interrupt();
  eval::show_llama_messages(false);
  if (f->options.threads == 0) f->options.threads = default_threads();
  ProgressLine progress;
  f->options.progress = [&](const std::string& group) {
    const auto& all = eval::bar_groups();
    const auto at = std::find(all.begin(), all.end(), group) - all.begin();
    progress.show(static_cast<double>(at) / static_cast<double>(all.size()), group);
  };
  f->options.cancelled = [] { return interrupted(); };
  std::vector<eval::BarRow> rows;
  const Status status = eval::bench_bars(f->options, &rows);
  progress.clear();
  if (!rows.empty()) print_bars(rows, *f);
  if (!status.ok()) return fail(status);
  const bool all_hold = std::none_of(rows.begin(), rows.end(),
                                     [](const eval::BarRow& r) { return r.state == eval::BarState::kShort; });
  return all_hold ? kOk : kBarFailed;
}

CLI::App* add_bars(CLI::App* bench, BarsFlags* f) {
  eval::BarsOptions& o = f->options;
  o.threads = 0;
  CLI::App* app = bench->add_subcommand("bars", "the project's bars: figure, bar, holds or not");
  app->footer(kBarsFooter);
  app->add_option("-m,--model", o.model_path, "SmolLM2-135M-Instruct with its own weights (GGUF)")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("--shapes", o.shapes_path,
                  "8 layers, 8 query and 2 KV heads x 128 (default: written into the cache folder once)")
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("--cache", o.cache, "the 4-bit cache (default kv4)")->type_name("SCHEME");
  app->add_option("--only", o.only, fmt::format("these groups: {}", fmt::join(eval::bar_groups(), ", ")))
      ->delimiter(',')
      ->type_name("LIST");
  app->add_option("-t,--threads", o.threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
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
  app->add_option("--kv", f->caches,
                  fmt::format("caches: schemes, or llama:TYPE (default {}, or KVANT_KV)", kAttentionCaches))
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
  app->add_option("--forks", o.forks, "sequences that share all keys but their own newest one (default 1)")
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
  add_peer_option(app, &f->peers);
  app->add_flag("--json", f->json, "print JSON");
  auto d = std::make_shared<DecodeFlags>();
  CLI::App* decode = add_decode(bench, d.get());
  auto b = std::make_shared<BarsFlags>();
  CLI::App* bars = add_bars(bench, b.get());
  bench->footer("\nExamples:\n  kvant bench attention\n  kvant bench decode -m model.gguf --depths 0,4096\n");
  return {bench, [f, d, b, decode, bars] {
            if (bars->parsed()) return do_bars(b.get());
            return decode->parsed() ? do_decode(d.get()) : do_attention(f.get());
          }};
}

}  // namespace kvant::cli

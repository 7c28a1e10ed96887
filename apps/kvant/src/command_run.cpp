// kvant run: completion and chat.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "chat.h"
#include "cli.h"
#include "generate.h"
#include "kvant/candidate.h"
#include "kvant/eval_report.h"

namespace kvant::cli {
namespace {

struct RunFlags {
  std::string model, file, kv, system;
  std::optional<std::string> prompt;
  CacheFlags cache;
  GenerateOptions generate;
  int context = 4096;
  int threads = default_threads();
  bool chat = false, json = false, verbose = false, profile = false;
};

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant run -m model.gguf                                  chat (end with Ctrl-D)\n"
    "  kvant run -m model.gguf --kv kv4,w=256 -p \"Once upon a time\" -n 200\n"
    "  kvant run -m model.gguf --chat -p \"What is a cache?\" --temp 0\n"
    "  kvant run -m model.gguf -f prompt.txt --kv llama:q8_0    llama.cpp's own cache, for comparison\n"
    "  kvant run -m model.gguf -f prompt.txt -n 64 --profile    where the time of a decode step goes\n"
    "\nWithout -p and -f it chats: every line of the input is one turn. Text goes to stdout, the summary to "
    "stderr.\n";

struct Settings {
  ggml::Options kvant;
  eval::Candidate candidate;
  std::vector<std::string> overridden;
};

Status read_settings(const RunFlags& f, Settings* s) {
  KVANT_RETURN_IF_ERROR(cache_options(f.cache, &s->kvant, &s->overridden));
  const auto [wanted, source] = wanted_caches(f.kv, s->kvant.scheme, &s->overridden);
  std::string text = wanted;
  if (wanted.starts_with("llama:")) {
    if (const std::string flag = first_kvant_flag(f.cache); !flag.empty()) {
      return {Code::kUnsupported,
              fmt::format("{}: {} is llama.cpp's own cache and has no such option", flag, wanted)};
    }
  } else {
    Result<std::string> scheme = scheme_with_flags(wanted, f.cache, source);
    if (!scheme.ok()) return scheme.status();
    text = scheme.value();
  }
  Result<eval::Candidate> candidate = eval::parse_candidate(text);
  if (!candidate.ok())
    return {candidate.status().code(), std::string(source) + ": " + candidate.status().message()};
  s->candidate = std::move(candidate.value());
  s->kvant.scheme = s->candidate.scheme;
  return {};
}

struct Part {
  const char* name;
  double seconds;
};

// Where the time of decoding went; the parts add up to all of it.
std::vector<Part> decode_parts(const Timing& t) {
  const ggml::Profile& p = t.decode_profile;
  return {{"weights", p.model_seconds()},
          {"attention", p.attention_seconds},
          {"encode", p.encode_seconds},
          {"sampling", t.sampling_seconds},
          {"other", t.decode_seconds - p.total_seconds - t.sampling_seconds + p.plan_seconds}};
}

void print_profile(const Timing& t) {
  if (t.decoded_tokens == 0) return;
  std::fprintf(stderr, "a decode step, by part\n");
  for (const Part& part : decode_parts(t)) {
    std::fprintf(stderr, "  %-14s %9.3f ms  %5.1f %%\n", part.name, part.seconds * 1e3 / t.decoded_tokens,
                 100 * part.seconds / t.decode_seconds);
  }
}

nlohmann::json profile_json(const Timing& t) {
  nlohmann::json out = {{"steps", t.decoded_tokens}, {"seconds", t.decode_seconds}};
  for (const Part& part : decode_parts(t)) out[std::string(part.name) + "_seconds"] = part.seconds;
  return out;
}

void print_summary(const RunFlags& f, const Settings& s, const Session& session) {
  const Timing& t = session.timing();
  auto rate = [](int tokens, double seconds) { return seconds > 0 ? tokens / seconds : 0.0; };
  std::fprintf(stderr, "\nprompt   %7d tokens  %8.1f tok/s\ndecode   %7d tokens  %8.1f tok/s\n",
               t.prompt_tokens, rate(t.prompt_tokens, t.prompt_seconds), t.decoded_tokens,
               rate(t.decoded_tokens, t.decode_seconds));
  const CacheUse use = session.cache_use();
  std::fprintf(stderr, "cache    %7d tokens  %s\n", use.tokens, s.candidate.name.c_str());
  if (!s.candidate.peer) {
    const std::pair<const char*, size_t> parts[] = {{"exact rows", use.memory.exact_row_bytes},
                                                    {"packed tiles", use.memory.tile_bytes},
                                                    {"tables", use.memory.table_bytes},
                                                    {"workspace", use.memory.workspace_bytes}};
    for (const auto& [name, bytes] : parts)
      std::fprintf(stderr, "  %-14s %15s bytes\n", name, with_commas(bytes).c_str());
    if (use.engine_bytes > 0)
      std::fprintf(stderr, "  %-14s %15s bytes\n", "llama.cpp f16", with_commas(use.engine_bytes).c_str());
    std::fprintf(stderr, "  %-14s %15s bytes, peak %s\n", "total", with_commas(use.total()).c_str(),
                 with_commas(use.peak_bytes).c_str());
    std::fprintf(stderr, "  %-14s %15s bytes: the cache is %s%s\n", "f16 rows",
                 with_commas(use.f16_bytes).c_str(), beside_f16(use.total(), use.f16_bytes).c_str(),
                 use.quantized_share > 0 ? "" : "; nothing was read quantized yet");
    if (use.skipped_share > 0) {
      std::fprintf(stderr, "  %-14s %14.2f %% of value reads: weights too small to matter\n", "skipped",
                   100 * use.skipped_share);
    }
  }
  if (f.profile) print_profile(t);
  std::fprintf(stderr, "process  %s MiB resident at most\n", mib(peak_resident_bytes()).c_str());
  if (!f.verbose) return;
  for (const std::string& line : s.overridden) std::fprintf(stderr, "note: %s\n", line.c_str());
  for (const nlohmann::json& e : eval::effective_json(session.context().reports())) {
    std::fprintf(stderr, "layers %s: requested %s, effective %s%s%s\n", e["layers"].dump().c_str(),
                 e["requested"].get<std::string>().c_str(), e["effective"].get<std::string>().c_str(),
                 e["reason"].get<std::string>().empty() ? "" : ", because ",
                 e["reason"].get<std::string>().c_str());
  }
}

nlohmann::json summary_json(const RunFlags& f, const Settings& s, const Session& session,
                            const std::string& text) {
  const Timing& t = session.timing();
  const CacheUse use = session.cache_use();
  nlohmann::json out = {{"version", 1},
                        {"model", f.model},
                        {"kv", s.candidate.name},
                        {"text", text},
                        {"prompt", {{"tokens", t.prompt_tokens}, {"seconds", t.prompt_seconds}}},
                        {"decode", {{"tokens", t.decoded_tokens}, {"seconds", t.decode_seconds}}},
                        {"cache",
                         {{"tokens", use.tokens},
                          {"exact_rows", use.memory.exact_row_bytes},
                          {"packed", use.memory.tile_bytes},
                          {"tables", use.memory.table_bytes},
                          {"workspace", use.memory.workspace_bytes},
                          {"engine_f16", use.engine_bytes},
                          {"total", use.total()},
                          {"peak", use.peak_bytes},
                          {"f16", use.f16_bytes},
                          {"quantized_read_share", use.quantized_share},
                          {"skipped_read_share", use.skipped_share}}},
                        {"peak_resident_bytes", peak_resident_bytes()},
                        {"effective", eval::effective_json(session.context().reports())},
                        {"overridden", s.overridden},
                        {"interrupted", interrupted()}};
  if (f.profile) out["profile"] = profile_json(t);
  return out;
}

// One turn: adds the text to the context and generates. The reply is appended to `all`.
Status take_turn(Session* session, const std::string& text, bool special, bool print, std::string* reply) {
  return session->turn(text, special, [&](const std::string& piece) {
    *reply += piece;
    if (!print) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  });
}

Status chat_loop(const RunFlags& f, Session* session, Chat* chat, std::string* all) {
  const bool terminal = isatty(STDIN_FILENO) == 1;
  while (!interrupted()) {
    if (terminal) std::fputs("\n> ", stderr);
    std::string line;
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    Result<std::string> turn = chat->user(line);
    if (!turn.ok()) return turn.status();
    std::string reply;
    KVANT_RETURN_IF_ERROR(take_turn(session, turn.value(), true, !f.json, &reply));
    chat->assistant(reply, session->ended());
    if (!f.json) std::puts("");
    *all += reply + "\n";
  }
  return {};
}

Status generate(const RunFlags& f, Session* session, Chat* chat, std::string* all) {
  std::string prompt = f.prompt.value_or("");
  if (!f.file.empty()) {
    Result<std::string> text = read_file(f.file);
    if (!text.ok()) return text.status();
    prompt += text.value();
  }
  if (!f.prompt && f.file.empty()) return chat_loop(f, session, chat, all);
  if (prompt.empty()) return {Code::kInvalidArgument, "the prompt is empty"};
  if (f.chat) {
    Result<std::string> turn = chat->user(prompt);
    if (!turn.ok()) return turn.status();
    prompt = turn.value();
  } else if (!f.json) {
    std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    std::fflush(stdout);
  }
  KVANT_RETURN_IF_ERROR(take_turn(session, prompt, f.chat, !f.json, all));
  if (!f.json) std::puts("");
  return {};
}

int do_run(const RunFlags& f) {
  Settings settings;
  if (Status status = read_settings(f, &settings); !status.ok()) return fail(status);
  if (f.profile && settings.candidate.peer) {
    return fail({Code::kUnsupported,
                 "--profile: the parts of a step are known of kvant's caches only; use --kv exact"});
  }
  ggml::set_profiling(f.profile);
  eval::show_llama_messages(f.verbose);
  Result<std::unique_ptr<eval::Model>> model =
      eval::Model::load(f.model, settings.candidate.peer ? eval::Device::kCpu : eval::Device::kKvant);
  if (!model.ok()) return fail(model.status());
  const int most = model.value()->train_context();
  if (most > 0 && f.context > most) {
    return fail(
        {Code::kInvalidArgument,
         fmt::format("--ctx-size {}: the model was trained for {}; nearest is {}", f.context, most, most)});
  }
  Result<std::unique_ptr<eval::Context>> context =
      eval::Context::create(*model.value(),
                            {.n_ctx = f.context,
                             .n_batch = 512,
                             .n_threads = f.threads,
                             .n_outputs = 1,
                             .type_k = settings.candidate.type_k,
                             .type_v = settings.candidate.type_v},
                            settings.kvant);
  if (!context.ok()) return fail(context.status());
  catch_interrupt();
  Session session(*model.value(), std::move(context.value()), f.generate);
  Chat chat(*model.value(), f.system);
  std::string text;
  const Status status = generate(f, &session, &chat, &text);
  if (f.json) {
    write_json(summary_json(f, settings, session, text));
  }
  std::fflush(stdout);
  if (!f.json) print_summary(f, settings, session);
  if (!status.ok() && status.code() != Code::kCancelled) return fail(status);
  return interrupted() ? kInterrupted : kOk;
}

}  // namespace

Command add_run(CLI::App& root) {
  auto f = std::make_shared<RunFlags>();
  CLI::App* app = root.add_subcommand("run", "complete a prompt, or chat");
  app->footer(kFooter);
  app->add_option("-m,--model", f->model, "model file (GGUF)")
      ->required()
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("-p,--prompt", f->prompt, "text to complete (with --chat: what the user says)")
      ->type_name("TEXT");
  app->add_option("-f,--file", f->file, "the same from a file; follows --prompt")
      ->check(readable_file())
      ->type_name("FILE");
  app->add_flag("--chat", f->chat, "put the prompt into the model's chat template");
  app->add_option("--system", f->system, "system message of the chat")->type_name("TEXT");
  app->add_option("-n,--n-predict", f->generate.n_predict, "most tokens per reply (default 512)")
      ->check(whole_number(0, 1 << 28))
      ->type_name("N");
  app->add_option("-c,--ctx-size", f->context, "tokens of context (default 4096)")
      ->check(whole_number(16, 1 << 28))
      ->type_name("N");
  app->add_option("-t,--threads", f->threads, "threads (default: all cores)")
      ->check(whole_number(1, 512))
      ->type_name("N");
  app->add_option("-s,--seed", f->generate.seed, "of sampling (default 1)")
      ->check(whole_number(0, 4294967295LL))
      ->type_name("N");
  app->add_option("--temp", f->generate.temperature,
                  "temperature; 0 takes the most likely token (default 0.8)")
      ->check(decimal(0, 100))
      ->type_name("T");
  app->add_option("--top-k", f->generate.top_k, "sample from the K most likely; 0: all (default 40)")
      ->check(whole_number(0, 1 << 24))
      ->type_name("K");
  app->add_option("--top-p", f->generate.top_p, "sample from this share of probability (default 0.95)")
      ->check(decimal(0, 1))
      ->type_name("P");
  app->add_flag("--ignore-eos", f->generate.ignore_eos, "do not stop where the model ends its text");
  app->add_option("--kv", f->kv, "cache: a scheme or llama:TYPE (default kv4, or KVANT_KV)")
      ->type_name("SCHEME");
  add_cache_flags(app, &f->cache);
  app->add_flag("--profile", f->profile, "print where the time of a decode step goes");
  app->add_flag("--json", f->json, "print text and summary as JSON, at the end");
  app->add_flag("-v,--verbose", f->verbose, "llama.cpp's messages, and what runs per layer");
  return {app, [f] { return do_run(*f); }};
}

}  // namespace kvant::cli

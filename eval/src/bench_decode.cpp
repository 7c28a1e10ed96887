#include "kvant/bench_decode.h"

#include <algorithm>
#include <memory>

#include "filled_cache.h"
#include "kvant/llama_session.h"
#include "kvant/profile.h"
#include "peer_process.h"
#include "timing.h"

namespace kvant::eval {
namespace {

// Of every turn, not timed: threads of the engine before may still spin on the cores, and cores that slept
// take milliseconds to reach their clock.
constexpr int kWarmSteps = 4;

int context_tokens(const BenchDecodeOptions& o, int depth) {
  const int n = depth + kSeedTokens + o.rounds * (kWarmSteps + o.round_tokens) +
                (1 + o.prefill_rounds) * o.prefill_tokens + 8;
  return (n + 255) / 256 * 256;
}

int batch_tokens(const BenchDecodeOptions& o) { return std::max(kSeedTokens, o.prefill_tokens); }

// One filled cache that can be timed.
class Subject {
 public:
  virtual ~Subject() = default;
  // Appends the seconds of n steps, and leaves their profile to be taken.
  virtual Status steps(int n, std::vector<double>* seconds) = 0;
  virtual Status prefill(int n, double* seconds) = 0;
  virtual size_t cache_bytes() const = 0;
};

class LlamaSubject : public Subject {
 public:
  LlamaSubject(std::unique_ptr<Context> context, const std::vector<llama_token>& tokens)
      : context_(std::move(context)), cache_(context_.get(), tokens) {}

  Status fill(int depth) { return cache_.fill(depth); }

  Status steps(int n, std::vector<double>* seconds) override {
    double untimed = 0;
    for (int i = 0; i < kWarmSteps; ++i) KVANT_RETURN_IF_ERROR(cache_.step(&untimed));
    (void)ggml::take_profile();
    for (int i = 0; i < n; ++i) KVANT_RETURN_IF_ERROR(cache_.step(&seconds->emplace_back()));
    return {};
  }

  Status prefill(int n, double* seconds) override { return cache_.prefill(n, seconds); }

  size_t cache_bytes() const override {
    size_t bytes = 0;
    for (const ggml::CacheReport& r : context_->reports()) bytes += r.memory.total() + r.engine_bytes;
    return bytes;
  }

 private:
  std::unique_ptr<Context> context_;
  FilledCache cache_;
};

class IkSubject : public Subject {
 public:
  explicit IkSubject(std::unique_ptr<PeerProcess> process) : process_(std::move(process)) {}
  Status steps(int n, std::vector<double>* seconds) override {
    const Result<std::vector<double>> answer = process_->ask("step " + std::to_string(kWarmSteps + n));
    if (!answer.ok()) return answer.status();
    if (answer.value().size() != static_cast<size_t>(kWarmSteps) + n)
      return {Code::kInternal, "ik_llama.cpp timed " + std::to_string(answer.value().size()) + " steps"};
    seconds->insert(seconds->end(), answer.value().begin() + kWarmSteps, answer.value().end());
    return {};
  }
  Status prefill(int n, double* seconds) override {
    const Result<std::vector<double>> answer = process_->ask("prefill " + std::to_string(n));
    if (!answer.ok()) return answer.status();
    *seconds = answer.value().front();
    return {};
  }
  size_t cache_bytes() const override { return process_->cache_bytes(); }

 private:
  std::unique_ptr<PeerProcess> process_;
};

struct Timed {
  const Candidate* candidate = nullptr;
  bool flash = true;
  std::unique_ptr<Subject> subject;
  std::vector<double> step_seconds;
  std::vector<double> prefill_seconds;
  std::vector<double> prefill_encode_seconds;
  ggml::Profile profile;
};

struct Models {
  const Model& cpu;
  const Model& kvant;
  std::vector<llama_token> tokens;
};

Result<std::unique_ptr<Subject>> make_subject(const BenchDecodeOptions& o, const Models& models,
                                              const Candidate& c, bool flash, int depth) {
  if (!c.ik_type.empty()) {
    Result<std::unique_ptr<PeerProcess>> process = PeerProcess::start(
        {"decode", o.model_path, c.ik_type, std::to_string(depth), std::to_string(context_tokens(o, depth)),
         std::to_string(batch_tokens(o)), std::to_string(o.threads)});
    if (!process.ok()) return process.status();
    return std::unique_ptr<Subject>(std::make_unique<IkSubject>(std::move(process.value())));
  }
  ContextOptions options;
  options.n_ctx = context_tokens(o, depth);
  options.n_batch = batch_tokens(o);
  options.n_threads = o.threads;
  options.type_k = c.type_k;
  options.type_v = c.type_v;
  options.flash_attention = flash;
  ggml::Options kvant = o.kvant;
  kvant.scheme = c.scheme;
  Result<std::unique_ptr<Context>> context =
      Context::create(c.peer ? models.cpu : models.kvant, options, kvant);
  if (!context.ok()) return context.status();
  auto subject = std::make_unique<LlamaSubject>(std::move(context.value()), models.tokens);
  KVANT_RETURN_IF_ERROR(subject->fill(depth));
  return std::unique_ptr<Subject>(std::move(subject));
}

Status time_steps(const BenchDecodeOptions& o, int depth, std::vector<Timed>* timed) {
  for (int round = 0; round < o.rounds; ++round) {
    for (Timed& t : *timed) {
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      KVANT_RETURN_IF_ERROR(t.subject->steps(o.round_tokens, &t.step_seconds));
      t.profile += ggml::take_profile();
      if (o.progress)
        o.progress((round + 1.0) / (o.rounds + 1), t.candidate->name + " at depth " + std::to_string(depth));
    }
  }
  return {};
}

Status time_prefills(const BenchDecodeOptions& o, std::vector<Timed>* timed) {
  for (int round = 0; o.prefill_tokens > 0 && round < o.prefill_rounds; ++round) {
    for (Timed& t : *timed) {
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      if (round > 0 && t.prefill_seconds[0] > kLongPrefillSeconds) continue;
      double seconds = 0;
      (void)ggml::take_profile();
      KVANT_RETURN_IF_ERROR(t.subject->prefill(o.prefill_tokens, &seconds));
      t.prefill_seconds.push_back(seconds);
      t.prefill_encode_seconds.push_back(ggml::take_profile().encode_seconds);
    }
  }
  return {};
}

DecodeRow row_of(const BenchDecodeOptions& o, const Timed& t, int depth) {
  DecodeRow row;
  row.cache = t.candidate->name;
  row.depth = depth;
  row.decode_tok_s = 1.0 / median(t.step_seconds);
  row.prefill_tok_s = t.prefill_seconds.empty() ? 0 : o.prefill_tokens / median(t.prefill_seconds);
  const double encode = t.prefill_encode_seconds.empty() ? 0 : median(t.prefill_encode_seconds);
  row.prefill_encode_tok_s = encode > 0 ? o.prefill_tokens / encode : 0;
  row.flash_attention = t.flash;
  row.cache_bytes = t.subject->cache_bytes();
  row.profile = t.profile;
  return row;
}

void add_row(const DecodeRow& row, std::vector<DecodeRow>* out) {
  DecodeRow* last = out->empty() ? nullptr : &out->back();
  if (last == nullptr || last->cache != row.cache || last->depth != row.depth) {
    out->push_back(row);
    return;
  }
  // The same cache with flash attention off: the faster of the two counts.
  last->prefill_tok_s = std::max(last->prefill_tok_s, row.prefill_tok_s);
  if (row.decode_tok_s > last->decode_tok_s) {
    last->decode_tok_s = row.decode_tok_s;
    last->flash_attention = row.flash_attention;
  }
}

Status run_depth(const BenchDecodeOptions& o, const Models& models, int depth, std::vector<DecodeRow>* out) {
  std::vector<Timed> timed;
  for (const Candidate& c : o.caches) {
    for (const bool flash : {true, false}) {
      if (!flash && !c.baseline()) continue;
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      if (o.progress) o.progress(0, c.name + " at depth " + std::to_string(depth));
      Result<std::unique_ptr<Subject>> subject = make_subject(o, models, c, flash, depth);
      if (!subject.ok()) return {subject.status().code(), c.name + ": " + subject.status().message()};
      Timed& t = timed.emplace_back();
      t.candidate = &c;
      t.flash = flash;
      t.subject = std::move(subject.value());
    }
  }
  KVANT_RETURN_IF_ERROR(time_steps(o, depth, &timed));
  KVANT_RETURN_IF_ERROR(time_prefills(o, &timed));
  for (const Timed& t : timed) add_row(row_of(o, t, depth), out);
  return {};
}

}  // namespace

Status bench_decode(const BenchDecodeOptions& options, std::vector<DecodeRow>* out) {
  KVANT_RETURN_IF_ERROR(init_backends());
  Result<std::unique_ptr<Model>> cpu = Model::load(options.model_path, Device::kCpu);
  if (!cpu.ok()) return cpu.status();
  Result<std::unique_ptr<Model>> kvant = Model::load(options.model_path, Device::kKvant);
  if (!kvant.ok()) return kvant.status();
  const int vocab = cpu.value()->n_vocab();
  Models models{*cpu.value(), *kvant.value(), std::vector<llama_token>(kSeedTokens)};
  for (int i = 0; i < kSeedTokens; ++i)
    models.tokens[i] = static_cast<llama_token>((i * 7919 + 13) % std::min(vocab, 32000));
  ggml::set_profiling(true);
  Status status;
  for (const int depth : options.depths) {
    status = run_depth(options, models, depth, out);
    if (!status.ok()) break;
  }
  ggml::set_profiling(false);
  return status;
}

}  // namespace kvant::eval

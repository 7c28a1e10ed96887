#include "kvant/bench_decode.h"

#include <algorithm>
#include <memory>

#include "kvant/llama_session.h"
#include "timing.h"

namespace kvant::eval {
namespace {

constexpr int kSeedTokens = 512;

struct Subject {
  const Candidate* candidate = nullptr;
  bool flash = true;
  std::unique_ptr<Context> context;
  int position = 0;
  std::vector<double> step_seconds;
  double prefill_seconds = 0;
};

Status fill(Context* context, const std::vector<llama_token>& tokens, int depth) {
  if (depth == 0) return {};
  const int seed = std::min(kSeedTokens, depth);
  KVANT_RETURN_IF_ERROR(context->decode({tokens.data(), static_cast<size_t>(seed)}, 0, seed));
  llama_synchronize(context->get());
  if (depth == seed) return {};
  std::vector<uint8_t> state(llama_state_seq_get_size(context->get(), 0));
  if (llama_state_seq_get_data(context->get(), state.data(), state.size(), 0) != state.size()) {
    return {Code::kInternal, "llama.cpp gave no sequence state"};
  }
  const Result<std::vector<uint8_t>> filled = repeat_state(state, depth);
  if (!filled.ok()) return filled.status();
  context->clear();
  if (llama_state_seq_set_data(context->get(), filled.value().data(), filled.value().size(), 0) == 0) {
    return {Code::kInternal, "llama.cpp refused the repeated sequence state"};
  }
  return {};
}

Status step(Subject* s, const std::vector<llama_token>& tokens, double* seconds) {
  const llama_token token = tokens[static_cast<size_t>(s->position) % tokens.size()];
  const double start = now_seconds();
  KVANT_RETURN_IF_ERROR(s->context->decode({&token, 1}, s->position, 0));
  if (s->context->logits(0) == nullptr) return {Code::kInternal, "llama.cpp gave no logits"};
  *seconds = now_seconds() - start;
  ++s->position;
  return {};
}

Status make_subject(const BenchDecodeOptions& o, const Model& model, const std::vector<llama_token>& tokens,
                    int depth, Subject* s) {
  const Candidate& c = *s->candidate;
  ContextOptions options;
  options.n_ctx = depth + kSeedTokens + o.rounds * o.round_tokens + 2 * o.prefill_tokens + 8;
  options.n_ctx = (options.n_ctx + 255) / 256 * 256;
  options.n_batch = std::max(kSeedTokens, o.prefill_tokens);
  options.n_threads = o.threads;
  options.type_k = c.type_k;
  options.type_v = c.type_v;
  options.flash_attention = s->flash;
  ggml::Options kvant = o.kvant;
  kvant.scheme = c.scheme;
  Result<std::unique_ptr<Context>> context = Context::create(model, options, kvant);
  if (!context.ok()) return context.status();
  s->context = std::move(context.value());
  KVANT_RETURN_IF_ERROR(fill(s->context.get(), tokens, depth));
  s->position = depth;
  double warm = 0;
  return step(s, tokens, &warm);
}

Status measure_prefill(const BenchDecodeOptions& o, const std::vector<llama_token>& tokens, Subject* s) {
  if (o.prefill_tokens == 0) return {};
  std::vector<llama_token> batch(o.prefill_tokens);
  for (int i = 0; i < o.prefill_tokens; ++i) batch[i] = tokens[static_cast<size_t>(i) % tokens.size()];
  const double start = now_seconds();
  KVANT_RETURN_IF_ERROR(s->context->decode(batch, s->position, o.prefill_tokens - 1));
  llama_synchronize(s->context->get());
  s->prefill_seconds = now_seconds() - start;
  return {};
}

size_t cache_bytes(const Subject& s) {
  size_t bytes = 0;
  for (const ggml::CacheReport& r : s.context->reports()) bytes += r.memory.total() + r.engine_bytes;
  return bytes;
}

Status run_depth(const BenchDecodeOptions& o, const Model& cpu, const Model& kvant,
                 const std::vector<llama_token>& tokens, int depth, std::vector<DecodeRow>* out) {
  std::vector<Subject> subjects;
  for (const Candidate& c : o.caches) {
    for (const bool flash : {true, false}) {
      if (!flash && !c.baseline()) continue;
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      if (o.progress) o.progress(0, c.name + " at depth " + std::to_string(depth));
      Subject s;
      s.candidate = &c;
      s.flash = flash;
      KVANT_RETURN_IF_ERROR(make_subject(o, c.peer ? cpu : kvant, tokens, depth, &s));
      subjects.push_back(std::move(s));
    }
  }
  for (int round = 0; round < o.rounds; ++round) {
    for (Subject& s : subjects) {
      for (int i = 0; i < o.round_tokens; ++i) {
        if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
        double seconds = 0;
        KVANT_RETURN_IF_ERROR(step(&s, tokens, &seconds));
        s.step_seconds.push_back(seconds);
      }
      if (o.progress)
        o.progress((round + 1.0) / (o.rounds + 1), s.candidate->name + " at depth " + std::to_string(depth));
    }
  }
  for (Subject& s : subjects) {
    KVANT_RETURN_IF_ERROR(measure_prefill(o, tokens, &s));
    DecodeRow row;
    row.cache = s.candidate->name;
    row.depth = depth;
    row.decode_tok_s = 1.0 / median(s.step_seconds);
    row.prefill_tok_s = s.prefill_seconds > 0 ? o.prefill_tokens / s.prefill_seconds : 0;
    row.flash_attention = s.flash;
    row.cache_bytes = cache_bytes(s);
    DecodeRow* last = out->empty() ? nullptr : &out->back();
    if (last != nullptr && last->cache == row.cache && last->depth == depth) {
      last->prefill_tok_s = std::max(last->prefill_tok_s, row.prefill_tok_s);
      if (row.decode_tok_s > last->decode_tok_s) {
        last->decode_tok_s = row.decode_tok_s;
        last->flash_attention = row.flash_attention;
      }
      continue;
    }
    out->push_back(row);
  }
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
  std::vector<llama_token> tokens(kSeedTokens);
  for (int i = 0; i < kSeedTokens; ++i)
    tokens[i] = static_cast<llama_token>((i * 7919 + 13) % std::min(vocab, 32000));
  for (const int depth : options.depths) {
    KVANT_RETURN_IF_ERROR(run_depth(options, *cpu.value(), *kvant.value(), tokens, depth, out));
  }
  return {};
}

}  // namespace kvant::eval

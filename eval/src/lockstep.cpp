#include "lockstep.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "kvant/attention_override.h"

namespace kvant::eval {
namespace {

struct Pairs {
  uint64_t total = 0, quantized = 0;
};

// Pairs whose keys or whose values were read from tiles, whichever are more: schemes may quantize one side
// only.
Pairs count_pairs(const std::vector<ggml::CacheReport>& caches) {
  uint64_t total = 0, keys = 0, values = 0;
  for (const ggml::CacheReport& c : caches) {
    total += c.pairs_total;
    keys += c.pairs_quantized;
    values += c.pairs_quantized_v;
  }
  return {.total = total, .quantized = std::max(keys, values)};
}

// Values of one token, keys and values.
struct Widths {
  double keys = 0, values = 0;
};

Widths widths(const LayerShape& s) {
  return {static_cast<double>(s.n_kv_heads) * s.key_dim, static_cast<double>(s.n_kv_heads) * s.value_dim};
}

double bytes_per_value(ggml_type type) {
  return static_cast<double>(ggml_type_size(type)) / static_cast<double>(ggml_blck_size(type));
}

}  // namespace

Status Lockstep::add(const Model& model, Entry entry, int n_ctx) {
  ContextOptions context{.n_ctx = n_ctx,
                         .n_batch = options_.chunk_tokens,
                         .n_threads = options_.threads,
                         .n_outputs = options_.chunk_tokens,
                         .type_k = entry.candidate.type_k,
                         .type_v = entry.candidate.type_v,
                         .flash_attention = !entry.floor};
  ggml::Options kvant = options_.kvant;
  kvant.scheme = entry.candidate.scheme;
  Result<std::unique_ptr<Context>> made = Context::create(model, context, kvant);
  if (!made.ok()) return {made.status().code(), entry.candidate.name + ": " + made.status().message()};
  entry.context = std::move(made.value());
  entries_.push_back(std::move(entry));
  return {};
}

Result<std::unique_ptr<Lockstep>> Lockstep::create(const Model& cpu, const Model* kvant,
                                                   const EvaluateOptions& options, int n_ctx) {
  std::unique_ptr<Lockstep> lockstep(new Lockstep(options));
  Result<std::unique_ptr<Context>> baseline = Context::create(cpu, {.n_ctx = n_ctx,
                                                                    .n_batch = options.chunk_tokens,
                                                                    .n_threads = options.threads,
                                                                    .n_outputs = options.chunk_tokens});
  if (!baseline.ok()) return baseline.status();
  lockstep->baseline_ = std::move(baseline.value());
  Entry floor;
  floor.floor = true;
  floor.candidate.name = "floor";
  floor.candidate.peer = true;
  KVANT_RETURN_IF_ERROR(lockstep->add(cpu, std::move(floor), n_ctx));
  for (const Candidate& candidate : options.candidates) {
    Entry entry;
    entry.candidate = candidate;
    entry.both_paths = options.both_paths && !candidate.peer && candidate.quantized();
    if (candidate.baseline()) {
      lockstep->entries_.push_back(std::move(entry));
      continue;
    }
    KVANT_RETURN_IF_ERROR(lockstep->add(candidate.peer ? cpu : *kvant, std::move(entry), n_ctx));
  }
  return lockstep;
}

// Scores positions begin + from .. end - 1 of the chunk that every context has just decoded.
void Lockstep::compare_chunk(int window, const Pass& pass, int begin, int from, int end) {
  const int n = end - begin - from;
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(baseline_->get())));
  std::vector<const float*> base(n);
  for (int i = 0; i < n; ++i) base[i] = baseline_->logits(from + i);
  struct Job {
    std::vector<const float*> logits;
    TokenScore* scores;
    const float* decoded;  // [n][n_vocab], or null
    TokenScore* fused;
  };
  std::vector<Job> jobs;
  for (Entry& entry : entries_) {
    if (!entry.active) continue;
    const size_t old = entry.scores.size();
    entry.scores.resize(old + n);
    Job job{.logits = {}, .scores = entry.scores.data() + old, .decoded = nullptr, .fused = nullptr};
    if (entry.both_paths) {
      entry.fused.resize(old + n);
      job.decoded = entry.decoded.data();
      job.fused = entry.fused.data() + old;
    }
    for (int i = 0; i < n; ++i)
      job.logits.push_back(entry.context ? entry.context->logits(from + i) : base[i]);
    jobs.push_back(std::move(job));
  }
  std::atomic<int> next{0};
  auto work = [&] {
    Distribution distribution, decoded;
    for (int i = next++; i < n; i = next++) {
      const int position = begin + from + i;
      distribution.reset(base[i], n_vocab);
      for (const Job& job : jobs) {
        job.scores[i] = distribution.compare(job.logits[i], pass.tokens[position + 1]);
        if (job.decoded != nullptr) {
          decoded.reset(job.decoded + static_cast<size_t>(i) * n_vocab, n_vocab);
          job.fused[i] = decoded.compare(job.logits[i], pass.tokens[position + 1]);
        }
        job.scores[i].window = window;
        job.scores[i].position = position;
      }
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < options_.threads; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
}

// The same chunk over the same tiles with the other path; then the chunk is taken back. Tokens of a chunk are
// in each other's exact window (evaluate() sees to that), so no tile that is read depends on the path.
Status Lockstep::decode_first(Entry* entry, std::span<const llama_token> chunk, int begin, int from) {
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(baseline_->get())));
  ggml::override_attention(AttentionPath::kDequantize);
  Status status = entry->context->decode(chunk, begin, from);
  ggml::override_attention(std::nullopt);
  KVANT_RETURN_IF_ERROR(std::move(status));
  const int n = static_cast<int>(chunk.size()) - from;
  entry->decoded.resize(static_cast<size_t>(n) * n_vocab);
  for (int i = 0; i < n; ++i) {
    std::copy_n(entry->context->logits(from + i), n_vocab,
                entry->decoded.data() + static_cast<size_t>(i) * n_vocab);
  }
  if (!llama_memory_seq_rm(llama_get_memory(entry->context->get()), 0, begin, -1)) {
    return {Code::kUnsupported,
            "tokens of this model's cache cannot be taken back, which --both-paths needs"};
  }
  return {};
}

int Lockstep::begin_pass(const Pass& pass) {
  const std::vector<llama_token> held = std::exchange(held_, {});
  const int n = static_cast<int>(held.size());
  if (n > 0 && n <= pass.first_scored && std::equal(held.begin(), held.end(), pass.tokens.begin())) return n;
  baseline_->clear();
  for (Entry& entry : entries_) {
    if (entry.context) entry.context->clear();
  }
  return 0;
}

Status Lockstep::run_pass(int index, const Pass& pass, const std::string& what, Progress* progress) {
  const int start = begin_pass(pass);
  const int length = pass.last_scored + 1;
  const auto active = std::count_if(entries_.begin(), entries_.end(),
                                    [](const Entry& entry) { return entry.context && entry.active; });
  progress->step(static_cast<double>(start) * static_cast<double>(active + 1), what);
  for (int begin = start; begin < length; begin += options_.chunk_tokens) {
    const int end = std::min(length, begin + options_.chunk_tokens);
    const std::span<const llama_token> chunk(pass.tokens.data() + begin, end - begin);
    const int from = std::clamp(pass.first_scored - begin, 0, end - begin);
    KVANT_RETURN_IF_ERROR(baseline_->decode(chunk, begin, from));
    progress->step(end - begin, what);
    for (Entry& entry : entries_) {
      if (progress->cancelled()) return {Code::kCancelled, "interrupted"};
      if (!entry.context || !entry.active) continue;
      Status status;
      if (entry.both_paths) status = decode_first(&entry, chunk, begin, from);
      if (status.ok()) status = entry.context->decode(chunk, begin, from);
      if (!status.ok()) return {status.code(), entry.candidate.name + ": " + status.message()};
      progress->step(end - begin, what);
    }
    if (from < end - begin) compare_chunk(index, pass, begin, from, end);
  }
  held_.assign(pass.tokens.begin(), pass.tokens.begin() + length);
  return {};
}

void Lockstep::finish(const std::string& test, int tokens, bool complete, Evaluation* out) {
  for (Entry& entry : entries_) {
    if (entry.scores.empty()) continue;
    const Summary summary = summarize(entry.scores, options_.bootstrap);
    if (entry.floor) {
      out->floors.push_back({.test = test, .quality = summary});
      continue;
    }
    Row row;
    row.candidate = entry.candidate;
    row.test = test;
    row.quality = summary;
    row.complete = complete;
    if (entry.both_paths) row.fused_kl = summarize(entry.fused, options_.bootstrap).kl_mean;
    if (!entry.candidate.peer) {
      row.caches = entry.context->reports();
      const Pairs pairs = count_pairs(row.caches);
      if (pairs.total > 0)
        row.quantized_read_share = static_cast<double>(pairs.quantized) / static_cast<double>(pairs.total);
      fill_sizes(row.caches, tokens, &row);
    } else {
      row.quantized_read_share = entry.candidate.quantized() ? 1.0 : 0.0;
    }
    out->rows.push_back(std::move(row));
  }
  for (Entry& entry : entries_) {
    entry.scores.clear();
    entry.fused.clear();
  }
}

Status Lockstep::run(const std::string& test, const std::vector<Pass>& passes, bool with_floor,
                     Progress* progress, Evaluation* out) {
  ggml::reset_counters();
  if (with_floor) held_.clear();  // the floor's context may not hold it
  for (Entry& entry : entries_) entry.active = !entry.floor || with_floor;
  Status status;
  int tokens = 1;
  for (size_t i = 0; i < passes.size() && status.ok(); ++i) {
    std::string what = test;
    if (passes.size() > 1) what += " " + std::to_string(i + 1) + "/" + std::to_string(passes.size());
    status = run_pass(static_cast<int>(i), passes[i], what, progress);
    tokens = passes[i].last_scored + 1;
  }
  finish(test, tokens, status.ok(), out);
  return status;
}

void fill_sizes(const std::vector<ggml::CacheReport>& caches, int tokens, Row* row) {
  int slots = 0;
  for (const ggml::CacheReport& c : caches) slots = std::max(slots, c.n_slots);
  double keys = 0, values = 0, key_bits = 0, value_bits = 0, bytes = 0, asymptotic = 0;
  size_t peak = 0;
  for (const ggml::CacheReport& c : caches) {
    bytes += static_cast<double>(c.memory.total() + c.engine_bytes);
    peak += c.peak_bytes + c.engine_bytes;
    for (const LayerScheme& layer : c.layers) {
      const Widths w = widths(layer.shape);
      keys += w.keys;
      values += w.values;
      const double k = w.keys * stored_bits(layer, Side::kKey),
                   v = w.values * stored_bits(layer, Side::kValue);
      key_bits += k;
      value_bits += v;
      // A cache with fewer slots belongs to layers with a sliding window: it does not grow.
      if (c.n_slots == slots) asymptotic += (k + v) / 8;
    }
  }
  if (keys > 0) {
    row->bits_k = key_bits / keys;
    row->bits_v = value_bits / values;
    row->bits = (key_bits + value_bits) / (keys + values);
  }
  row->bytes_per_token = bytes / tokens;
  row->bytes_per_token_asymptotic = asymptotic;
  row->speed.peak_bytes = peak;
}

void fill_peer_sizes(const ModelShape& shape, int tokens, Row* row) {
  const Candidate& c = row->candidate;
  const double bk = bytes_per_value(c.type_k), bv = bytes_per_value(c.type_v);
  double keys = 0, values = 0, bytes = 0, asymptotic = 0;
  for (const ShapeLayer& layer : shape.layers) {
    const Widths w = widths(layer.shape);
    keys += w.keys;
    values += w.values;
    const double per_token = w.keys * bk + w.values * bv;
    const int held = layer.windowed ? std::min(tokens, windowed_slots(tokens, shape.sliding_window)) : tokens;
    bytes += per_token * held;
    if (!layer.windowed) asymptotic += per_token;
  }
  row->bits_k = 8 * bk;
  row->bits_v = 8 * bv;
  row->bits = 8 * (keys * bk + values * bv) / (keys + values);
  row->bytes_per_token = bytes / tokens;
  row->bytes_per_token_asymptotic = asymptotic;
}

}  // namespace kvant::eval

#include "kvant/evaluate.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "kvant/f32_weights.h"
#include "kvant/llama_session.h"
#include "kvant/model_shape.h"
#include "kvant/peer_memory.h"
#include "lockstep.h"
#include "speed.h"

namespace kvant::eval {
namespace {

// Positions that follow the exact window by this much read mostly quantized keys.
constexpr int kBeyondWindow = 512;

int largest_window(const std::vector<Candidate>& candidates) {
  int window = 0;
  for (const Candidate& c : candidates) window = std::max(window, c.window());
  return window;
}

bool any_kvant(const std::vector<Candidate>& candidates) {
  return std::any_of(candidates.begin(), candidates.end(), [](const Candidate& c) { return !c.peer; });
}

Status too_short(const char* what, size_t have, size_t need, const std::string& smaller) {
  return {Code::kInvalidArgument, std::string(what) + " has " + std::to_string(have) + " tokens; " +
                                      std::to_string(need) + " are needed: " + smaller};
}

struct Texts {
  std::vector<Pass> text, copy;
  std::vector<llama_token> speed;
};

Status make_text_passes(const Model& model, const EvaluateOptions& o, const std::vector<llama_token>& tokens,
                        int first_scored, Texts* out) {
  const size_t need = static_cast<size_t>(o.window_tokens) * o.windows;
  if (tokens.size() < need) {
    const size_t windows = tokens.size() / o.window_tokens;
    return too_short("the text", tokens.size(), need,
                     windows > 0 ? "the nearest --windows is " + std::to_string(windows)
                                 : "the nearest --ctx-size is " + std::to_string(tokens.size()));
  }
  if (first_scored > o.window_tokens - 2) {
    return {Code::kInvalidArgument,
            "--ctx-size " + std::to_string(o.window_tokens) +
                ": no position lies beyond the exact window + 512; the nearest that works is " +
                std::to_string(first_scored + 2)};
  }
  for (int w = 0; w < o.windows; ++w) {
    Pass pass;
    const auto begin = tokens.begin() + static_cast<int64_t>(w) * o.window_tokens;
    pass.tokens.assign(begin, begin + o.window_tokens);
    if (llama_vocab_get_add_bos(model.vocab())) pass.tokens[0] = llama_vocab_bos(model.vocab());
    pass.first_scored = first_scored;
    pass.last_scored = o.window_tokens - 2;
    out->text.push_back(std::move(pass));
  }
  return {};
}

Status make_copy_pass(const Model& model, const EvaluateOptions& o, const std::vector<llama_token>& tokens,
                      Texts* out) {
  const size_t passage = o.passage_tokens, filler = o.filler_tokens;
  std::vector<llama_token> other =
      o.filler.empty() ? tokens : model.tokenize(o.filler, /*add_special=*/false, /*parse_special=*/false);
  const size_t need = o.filler.empty() ? passage + filler : passage;
  if (tokens.size() < need) {
    return too_short("the text", tokens.size(), need, "use a smaller --passage or --filler-tokens");
  }
  if (other.size() < filler) {
    return too_short("the other text (--filler)", other.size(), filler,
                     "the nearest --filler-tokens is " + std::to_string(other.size()));
  }
  Pass pass;
  pass.tokens.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(passage));
  // Without other text: the end of the same text.
  const auto from = o.filler.empty() ? other.end() - static_cast<int64_t>(filler) : other.begin();
  pass.tokens.insert(pass.tokens.end(), from, from + static_cast<int64_t>(filler));
  pass.tokens.insert(pass.tokens.end(), tokens.begin(), tokens.begin() + static_cast<int64_t>(passage));
  if (llama_vocab_get_add_bos(model.vocab())) pass.tokens[0] = llama_vocab_bos(model.vocab());
  pass.first_scored = static_cast<int>(passage + filler);
  pass.last_scored = static_cast<int>(pass.tokens.size()) - 2;
  out->copy.push_back(std::move(pass));
  return {};
}

Status make_texts(const Model& model, const EvaluateOptions& o, Evaluation* result, Texts* out) {
  const std::vector<llama_token> tokens =
      model.tokenize(o.text, /*add_special=*/true, /*parse_special=*/false);
  result->first_scored = o.second_half ? o.window_tokens / 2 : largest_window(o.candidates) + kBeyondWindow;
  if (o.text_test) KVANT_RETURN_IF_ERROR(make_text_passes(model, o, tokens, result->first_scored, out));
  if (o.copy_test) KVANT_RETURN_IF_ERROR(make_copy_pass(model, o, tokens, out));
  if (o.speed) {
    if (tokens.empty()) return too_short("the text", 0, 1, "name another --file");
    for (int i = 0; i < o.speed_tokens; ++i) out->speed.push_back(tokens[i % tokens.size()]);
  }
  return {};
}

int longest(const Texts& texts) {
  size_t n = 0;
  for (const Pass& p : texts.text) n = std::max(n, p.tokens.size());
  for (const Pass& p : texts.copy) n = std::max(n, p.tokens.size());
  return static_cast<int>(n);
}

double total_units(const Texts& texts, const EvaluateOptions& o) {
  double text = 0, copy = 0, units = 0;
  for (const Pass& p : texts.text) text += p.last_scored + 1;
  for (const Pass& p : texts.copy) copy += p.last_scored + 1;
  double contexts = 1;
  for (const Candidate& c : o.candidates) {
    if (!c.baseline()) contexts += o.both_paths && !c.peer && c.quantized() ? 2 : 1;
  }
  for (const Candidate& c : o.candidates) units += o.speed ? speed_units(c, o) : 0;
  return (text + copy) * contexts + (text > 0 ? text : copy) + units;
}

Status check_lengths(const Model& model, const Texts& texts, const EvaluateOptions& o) {
  const int n = std::max(longest(texts), o.speed ? speed_context_tokens(o) : 0);
  const int most = model.train_context();
  if (most > 0 && n > most) {
    return {Code::kInvalidArgument,
            std::to_string(n) + " tokens are asked for, but the model was trained for " +
                std::to_string(most) + "; use smaller --ctx-size, --passage, --filler-tokens or " +
                "--speed-depth"};
  }
  return {};
}

Status measure_quality(const std::string& path, const EvaluateOptions& o, const EvaluateHooks& hooks,
                       Texts* texts, std::unique_ptr<Progress>* progress, Evaluation* out) {
  Result<std::unique_ptr<Model>> cpu = Model::load(path, Device::kCpu);
  if (!cpu.ok()) return cpu.status();
  std::unique_ptr<Model> kvant;
  if (any_kvant(o.candidates)) {
    Result<std::unique_ptr<Model>> loaded = Model::load(path, Device::kKvant);
    if (!loaded.ok()) return loaded.status();
    kvant = std::move(loaded.value());
  }
  KVANT_RETURN_IF_ERROR(make_texts(*cpu.value(), o, out, texts));
  KVANT_RETURN_IF_ERROR(check_lengths(*cpu.value(), *texts, o));
  *progress = std::make_unique<Progress>(hooks, total_units(*texts, o));
  if (texts->text.empty() && texts->copy.empty()) return {};
  Result<std::unique_ptr<Lockstep>> lockstep =
      Lockstep::create(*cpu.value(), kvant.get(), o, longest(*texts));
  if (!lockstep.ok()) return lockstep.status();
  Status status;
  // The floor is a matter of the model and its weights: once is enough.
  const bool text = !texts->text.empty();
  if (text) status = lockstep.value()->run("text", texts->text, /*with_floor=*/true, progress->get(), out);
  if (status.ok() && !texts->copy.empty()) {
    status = lockstep.value()->run("copy", texts->copy, /*with_floor=*/!text, progress->get(), out);
  }
  return status;
}

Status measure_speeds(const EvaluateOptions& o, const Texts& texts, Progress* progress, Evaluation* out) {
  std::unique_ptr<Model> models[2];
  for (const Candidate& c : o.candidates) {
    const Device device = c.peer ? Device::kCpu : Device::kKvant;
    std::unique_ptr<Model>& model = models[c.peer ? 0 : 1];
    if (!model) {
      Result<std::unique_ptr<Model>> loaded = Model::load(o.model_path, device);
      if (!loaded.ok()) return loaded.status();
      model = std::move(loaded.value());
    }
    Speed speed;
    Status status = measure_speed(*model, c, o, texts.speed, progress, &speed);
    if (!status.ok())
      return {status.code(),
              status.code() == Code::kCancelled ? status.message() : c.name + ": " + status.message()};
    for (Row& row : out->rows) {
      if (row.candidate.name != c.name) continue;
      const size_t peak = std::max(row.speed.peak_bytes, speed.peak_bytes);
      row.speed = speed;
      row.speed.peak_bytes = peak;
    }
  }
  return {};
}

void fill_peers(const EvaluateOptions& o, const Texts& texts, Evaluation* out) {
  const Result<ModelShape> shape = read_model_shape(o.model_path);
  for (Row& row : out->rows) {
    const std::vector<Pass>& passes = row.test == "copy" ? texts.copy : texts.text;
    const double nll = row.quality.base_nll;
    (row.test == "copy" ? out->copy_base_nll : out->text_base_nll) = nll;
    (row.test == "copy" ? out->copy_scored : out->text_scored) = row.quality.n;
    if (!row.candidate.peer || !shape.ok() || passes.empty()) continue;
    fill_peer_sizes(shape.value(), static_cast<int>(passes[0].tokens.size()) - 1, &row);
    const int n_ctx =
        std::max(static_cast<int>(passes[0].tokens.size()), o.speed ? speed_context_tokens(o) : 0);
    row.speed.peak_bytes = peer_cache_bytes(shape.value(), row.candidate, n_ctx, o.chunk_tokens);
  }
}

}  // namespace

Status evaluate(const EvaluateOptions& asked, const EvaluateHooks& hooks, Evaluation* out) {
  EvaluateOptions options = asked;
  // Both paths read the same tiles when no token of a chunk is read from one by another of the chunk.
  if (options.both_paths) options.chunk_tokens = std::min(options.chunk_tokens, kPageTokens);
  const auto start = std::chrono::steady_clock::now();
  KVANT_RETURN_IF_ERROR(init_backends());
  for (const Candidate& c : options.candidates) {
    if (c.peer) continue;
    ggml::Options kvant = options.kvant;
    kvant.scheme = c.scheme;
    KVANT_RETURN_IF_ERROR(ggml::configure(kvant));
  }
  std::string path = options.model_path;
  out->weights = "native";
  if (options.f32_weights) {
    if (hooks.progress) hooks.progress(0, "f32 weights");
    Result<std::string> expanded = f32_weights(options.model_path, options.threads);
    if (!expanded.ok()) return expanded.status();
    path = expanded.value();
    out->weights = "f32";
  }
  {
    Result<ModelShape> shape = read_model_shape(options.model_path);
    if (shape.ok()) out->model = shape.value().name.empty() ? options.model_path : shape.value().name;
  }
  Texts texts;
  std::unique_ptr<Progress> progress;
  Status status = measure_quality(path, options, hooks, &texts, &progress, out);
  if (status.ok() && options.speed) status = measure_speeds(options, texts, progress.get(), out);
  fill_peers(options, texts, out);
  out->interrupted = status.code() == Code::kCancelled;
  out->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return status;
}

}  // namespace kvant::eval

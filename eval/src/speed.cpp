#include "speed.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "filled_cache.h"
#include "timing.h"

namespace kvant::eval {
namespace {

// Of progress: a prefilled token with f32 weights is one.
constexpr double kFillUnits = 250, kPrefillUnits = 130, kStepUnits = 4;

size_t resident_bytes() {
  long pages = 0, resident = 0;
  FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
  std::fclose(file);
  return static_cast<size_t>(resident) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

bool works_without_flash(const Candidate& c) { return c.peer && !ggml_is_quantized(c.type_v); }

Status timed_run(Context* context, std::span<const llama_token> tokens, const EvaluateOptions& options,
                 Progress* progress, const std::string& what, Speed* out) {
  FilledCache cache(context, tokens);
  KVANT_RETURN_IF_ERROR(cache.fill(options.speed_tokens));
  progress->step(kFillUnits, what);
  std::vector<double> times;
  for (int i = 0; i < options.decode_tokens; ++i) {
    if (progress->cancelled()) return {Code::kCancelled, "interrupted"};
    KVANT_RETURN_IF_ERROR(cache.step(&times.emplace_back()));
    progress->step(kStepUnits, what);
  }
  out->decode_tok_s = 1.0 / median(times);
  double seconds = 0;
  KVANT_RETURN_IF_ERROR(cache.prefill(kSpeedPrefillTokens, &seconds));
  out->prefill_tok_s = kSpeedPrefillTokens / seconds;
  progress->step(kPrefillUnits, what);
  return {};
}

Status one_setting(const Model& model, const Candidate& c, const EvaluateOptions& options,
                   std::span<const llama_token> tokens, bool flash, Progress* progress, Speed* out) {
  ContextOptions context{.n_ctx = speed_context_tokens(options),
                         .n_batch = kSpeedPrefillTokens,
                         .n_threads = options.threads,
                         .n_outputs = 1,
                         .type_k = c.type_k,
                         .type_v = c.type_v,
                         .flash_attention = flash};
  ggml::Options kvant = options.kvant;
  kvant.scheme = c.scheme;
  const size_t before = resident_bytes();
  Result<std::unique_ptr<Context>> made = Context::create(model, context, kvant);
  if (!made.ok()) return made.status();
  const std::string what = "speed of " + c.name + (flash ? "" : ", flash attention off");
  KVANT_RETURN_IF_ERROR(timed_run(made.value().get(), tokens, options, progress, what, out));
  const size_t after = resident_bytes();
  out->resident_bytes = after > before ? after - before : 0;
  out->flash_prefill = out->flash_decode = flash;
  for (const ggml::CacheReport& cache : made.value()->reports())
    out->peak_bytes += cache.peak_bytes + cache.engine_bytes;
  return {};
}

}  // namespace

int speed_context_tokens(const EvaluateOptions& options) {
  return options.speed_tokens + 1 + options.decode_tokens + kSpeedPrefillTokens;
}

double speed_units(const Candidate& candidate, const EvaluateOptions& options) {
  return (kFillUnits + kStepUnits * options.decode_tokens + kPrefillUnits) *
         (works_without_flash(candidate) ? 2 : 1);
}

Status measure_speed(const Model& model, const Candidate& candidate, const EvaluateOptions& options,
                     std::span<const llama_token> tokens, Progress* progress, Speed* out) {
  Speed best;
  KVANT_RETURN_IF_ERROR(one_setting(model, candidate, options, tokens, true, progress, &best));
  if (works_without_flash(candidate)) {
    Speed off;
    KVANT_RETURN_IF_ERROR(one_setting(model, candidate, options, tokens, false, progress, &off));
    if (off.prefill_tok_s > best.prefill_tok_s) {
      best.prefill_tok_s = off.prefill_tok_s;
      best.flash_prefill = false;
    }
    if (off.decode_tok_s > best.decode_tok_s) {
      best.decode_tok_s = off.decode_tok_s;
      best.flash_decode = false;
    }
  }
  *out = best;
  return {};
}

}  // namespace kvant::eval

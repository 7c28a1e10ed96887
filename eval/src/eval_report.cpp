#include "kvant/eval_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvant::eval {
namespace {

constexpr double kMib = 1024.0 * 1024.0;

// Infinity and NaN are not JSON: null.
nlohmann::json number(double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(nullptr); }

nlohmann::json kl_json(const Summary& s) {
  return {{"mean", number(s.kl_mean)},     {"lo", number(s.kl_lo)},   {"hi", number(s.kl_hi)},
          {"median", number(s.kl_median)}, {"p99", number(s.kl_p99)}, {"p999", number(s.kl_p999)},
          {"max", number(s.kl_max)}};
}

nlohmann::json quality_json(const Summary& s) {
  return {{"kl", kl_json(s)}, {"top1", s.top1}, {"ppl_ratio", number(s.ppl_ratio)}, {"scored", s.n}};
}

nlohmann::json buckets_json(const Summary& s) {
  nlohmann::json out = nlohmann::json::array();
  for (const Bucket& b : s.buckets) {
    out.push_back({{"first", b.first}, {"last", b.last}, {"kl_mean", number(b.kl_mean)}, {"n", b.n}});
  }
  return out;
}

nlohmann::json row_json(const Row& row) {
  nlohmann::json j = {{"name", row.candidate.name},
                      {"test", row.test},
                      {"bits_per_value", row.bits},
                      {"bits_k", row.bits_k},
                      {"bits_v", row.bits_v},
                      {"bytes_per_token", row.bytes_per_token},
                      {"bytes_per_token_asymptotic", row.bytes_per_token_asymptotic},
                      {"kl", kl_json(row.quality)},
                      {"top1", row.quality.top1},
                      {"ppl_ratio", number(row.quality.ppl_ratio)},
                      {"quantized_read_share", row.quantized_read_share},
                      {"prefill_tok_s", row.speed.prefill_tok_s},
                      {"decode_tok_s", row.speed.decode_tok_s},
                      {"peak_bytes", row.speed.peak_bytes}};
  j["scored"] = row.quality.n;
  j["delta_nll"] = number(row.quality.delta_nll);
  j["share_above_one_nat"] = row.quality.share_above_one_nat;
  j["buckets"] = buckets_json(row.quality);
  j["flash_attention"] = {{"prefill", row.speed.flash_prefill}, {"decode", row.speed.flash_decode}};
  j["resident_bytes"] = row.speed.resident_bytes;
  if (row.fused_kl) {
    j["fused"] = {{"kl_mean", number(*row.fused_kl)}, {"share", number(*row.fused_kl / row.quality.kl_mean)}};
  }
  if (!row.measures_quantization()) j["note"] = "not a quantization measurement";
  if (!row.complete) j["interrupted"] = true;
  if (!row.candidate.peer) j["effective"] = effective_json(row.caches);
  return j;
}

std::string kl_text(double x) {
  if (!std::isfinite(x)) return "inf";
  if (x == 0) return "0";
  if (x < 1e-4) return fmt::format("{:.1e}", x);
  return x < 0.1 ? fmt::format("{:.5f}", x) : fmt::format("{:.3f}", x);
}

std::string speed_text(double tok_s, bool flash, bool peer) {
  if (tok_s <= 0) return "-";
  return fmt::format("{:.{}f}{}", tok_s, tok_s < 100 ? 1 : 0, peer && !flash ? "*" : "");
}

std::vector<std::string> table_row(const Row& row, bool both_paths, bool speed) {
  const Summary& q = row.quality;
  std::vector<std::string> cells = {
      row.candidate.name,
      fmt::format("{:.2f} / {:.2f}", row.bits_k, row.bits_v),
      fmt::format("{:.0f}", row.bytes_per_token),
      fmt::format("{:.0f}", row.bytes_per_token_asymptotic),
      kl_text(q.kl_mean),
      row.candidate.baseline() ? "" : fmt::format("{} .. {}", kl_text(q.kl_lo), kl_text(q.kl_hi)),
      kl_text(q.kl_median),
      kl_text(q.kl_p99),
      kl_text(q.kl_p999),
      kl_text(q.kl_max),
      fmt::format("{:.2f} %", 100 * q.top1),
      fmt::format("{:.4f}", q.ppl_ratio),
      row.measures_quantization() ? fmt::format("{:.1f} %", 100 * row.quantized_read_share) : "none"};
  if (both_paths) {
    cells.push_back(
        row.fused_kl ? fmt::format("{} ({:.1f} %)", kl_text(*row.fused_kl), 100 * *row.fused_kl / q.kl_mean)
                     : "");
  }
  if (speed) {
    cells.push_back(speed_text(row.speed.prefill_tok_s, row.speed.flash_prefill, row.candidate.peer));
    cells.push_back(speed_text(row.speed.decode_tok_s, row.speed.flash_decode, row.candidate.peer));
    cells.push_back(row.speed.peak_bytes == 0 ? "-" : fmt::format("{:.1f}", row.speed.peak_bytes / kMib));
  }
  return cells;
}

std::string test_title(const std::string& test, const Evaluation& e, const EvaluateOptions& o) {
  if (test == "copy") {
    return fmt::format(
        "Copy test: {} tokens, {} other tokens, the same {} again; {} positions of the second copy "
        "scored, loss with f16 {:.3f}",
        o.passage_tokens, o.filler_tokens, o.passage_tokens, e.copy_scored, e.copy_base_nll);
  }
  return fmt::format("Running text: {} x {} tokens, {} positions from {} on scored, loss with f16 {:.3f}",
                     o.windows, o.window_tokens, e.text_scored, e.first_scored, e.text_base_nll);
}

std::string footnotes(const Evaluation& e, bool speed) {
  std::string text;
  const bool none =
      std::any_of(e.rows.begin(), e.rows.end(), [](const Row& r) { return !r.measures_quantization(); });
  const bool off = std::any_of(e.rows.begin(), e.rows.end(), [](const Row& r) {
    return r.candidate.peer && (!r.speed.flash_prefill || !r.speed.flash_decode);
  });
  if (none) text += "quantized reads none: not a quantization measurement\n";
  if (speed && off) text += "* flash attention off was faster\n";
  if (e.interrupted) text += "interrupted: figures are of what was finished\n";
  return text;
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows, bool markdown) {
  std::vector<size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  auto line = [&](const std::vector<std::string>& row) {
    std::string out = markdown ? "|" : "";
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell =
          i == 0 ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
      out += markdown ? " " + cell + " |" : (i == 0 ? "" : "  ") + cell;
    }
    while (!out.empty() && out.back() == ' ') out.pop_back();
    return out + "\n";
  };
  for (size_t r = 0; r < rows.size(); ++r) {
    text += line(rows[r]);
    if (r != 0) continue;
    std::string rule = markdown ? "|" : "";
    for (size_t i = 0; i < widths.size(); ++i) {
      if (markdown) {
        rule += i == 0 ? std::string(widths[i] + 2, '-') + "|" : std::string(widths[i] + 1, '-') + ":|";
      } else {
        rule += std::string(i == 0 ? 0 : 2, ' ') + std::string(widths[i], '-');
      }
    }
    text += rule + "\n";
  }
  return text;
}

nlohmann::json effective_json(const std::vector<ggml::CacheReport>& caches) {
  nlohmann::json out = nlohmann::json::array();
  for (const ggml::CacheReport& cache : caches) {
    for (size_t i = 0; i < cache.layers.size(); ++i) {
      const LayerScheme& layer = cache.layers[i];
      const bool same = !out.empty() && out.back()["requested"] == layer.requested &&
                        out.back()["effective"] == layer.effective && out.back()["reason"] == layer.reason;
      if (same) {
        out.back()["layers"].push_back(cache.model_layers[i]);
      } else {
        out.push_back({{"layers", {cache.model_layers[i]}},
                       {"requested", layer.requested},
                       {"effective", layer.effective},
                       {"reason", layer.reason}});
      }
    }
  }
  return out;
}

nlohmann::json to_json(const Evaluation& e, const EvaluateOptions& o, const std::string& text_name) {
  nlohmann::json floor = nlohmann::json::object();
  for (const Floor& f : e.floors) floor[f.test] = quality_json(f.quality);
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : e.rows) rows.push_back(row_json(row));
  nlohmann::json settings = {{"weights", e.weights},
                             {"threads", o.threads},
                             {"chunk_tokens", o.chunk_tokens},
                             {"ctx_size", o.window_tokens},
                             {"windows", o.windows},
                             {"score", o.second_half ? "second-half" : "beyond-window"},
                             {"first_scored", e.first_scored},
                             {"passage_tokens", o.passage_tokens},
                             {"filler_tokens", o.filler_tokens},
                             {"speed_depth", o.speed ? o.speed_tokens : 0},
                             {"decode_tokens", o.speed ? o.decode_tokens : 0},
                             {"attention", o.kvant.attention == AttentionPath::kFused ? "fused" : "dequant"},
                             {"bootstrap_resamples", o.bootstrap.resamples},
                             {"seed", o.bootstrap.seed}};
  nlohmann::json j = {{"version", kEvalJsonVersion},
                      {"model", e.model},
                      {"text", text_name},
                      {"floor", floor},
                      {"rows", rows}};
  j["settings"] = settings;
  j["seconds"] = e.seconds;
  if (e.interrupted) j["interrupted"] = true;
  return j;
}

std::string to_table(const Evaluation& e, const EvaluateOptions& o, bool markdown) {
  std::string text = fmt::format("{}, {} weights, {} threads. KL in nats against llama.cpp's f16 cache.\n",
                                 e.model, e.weights, o.threads);
  for (const char* test : {"text", "copy"}) {
    std::vector<std::vector<std::string>> rows = {{"cache", "bits K / V", "B/token", "B/token inf", "mean KL",
                                                   "95 %", "median", "p99", "p99.9", "max", "top-1",
                                                   "ppl ratio", "quantized reads"}};
    if (o.both_paths) rows[0].push_back("fused KL");
    if (o.speed) {
      for (const char* column : {"prefill tok/s", "decode tok/s", "peak MiB"}) rows[0].push_back(column);
    }
    for (const Row& row : e.rows) {
      if (row.test == test) rows.push_back(table_row(row, o.both_paths, o.speed));
    }
    if (rows.size() == 1) continue;
    text += "\n" + test_title(test, e, o) + ".\n";
    for (const Floor& f : e.floors) {
      if (f.test != test) continue;
      text += fmt::format(
          "Floor (llama.cpp f16, flash attention off against on): mean KL {}, p99 {}, top-1 {:.2f} %.\n",
          kl_text(f.quality.kl_mean), kl_text(f.quality.kl_p99), 100 * f.quality.top1);
    }
    text += "\n" + format_table(rows, markdown);
  }
  text += "\nB/token: bytes per token at this length, everything counted; inf: at unlimited length.";
  if (o.speed) {
    text += fmt::format(
        " Speed: the model's own weights, after {} tokens: {} decoded one by one, then {} prefilled.",
        o.speed_tokens, o.decode_tokens, kSpeedPrefillTokens);
  }
  if (o.both_paths) {
    text += " Fused KL: attention on packed codes against decoding tiles first, and its share of mean KL.";
  }
  return text + "\n" + footnotes(e, o.speed);
}

}  // namespace kvant::eval

// The JSON that docs/evaluation.md promises, and tables.
#include "kvant/eval_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace kvant::eval {
namespace {

using testing::HasSubstr;

Row row(const std::string& kv, const std::string& test) {
  Row r;
  r.candidate = parse_candidate(kv).value();
  r.test = test;
  r.quality = {.n = 10,
               .kl_mean = 0.01,
               .kl_lo = 0.005,
               .kl_hi = 0.02,
               .kl_median = 0.004,
               .kl_p99 = 0.1,
               .kl_p999 = 0.2,
               .kl_max = 0.3,
               .top1 = 0.9,
               .delta_nll = 0.01,
               .ppl_ratio = 1.01,
               .base_nll = 2.0,
               .share_above_one_nat = 0.0,
               .buckets = {}};
  r.bytes_per_token = 7000;
  r.bytes_per_token_asymptotic = 6480;
  r.quantized_read_share = r.candidate.quantized() ? 0.8 : 0.0;
  r.speed = {.prefill_tok_s = 500,
             .decode_tok_s = 50,
             .flash_prefill = false,
             .flash_decode = true,
             .peak_bytes = 1 << 20,
             .resident_bytes = 0};
  return r;
}

Evaluation evaluation() {
  Evaluation e;
  e.model = "a model";
  e.weights = "f32";
  e.floors.push_back({.test = "text", .quality = row("llama:f16", "text").quality});
  e.rows = {row("llama:q4_0", "text"), row("kv4", "text"), row("exact", "text"), row("kv4", "copy")};
  return e;
}

TEST(EvalJson, HasExactlyTheDocumentedFields) {
  const nlohmann::json j = to_json(evaluation(), {}, "text.txt");
  EXPECT_EQ(j["version"], 1);
  EXPECT_EQ(j["model"], "a model");
  EXPECT_EQ(j["text"], "text.txt");
  EXPECT_DOUBLE_EQ(j["floor"]["text"]["kl"]["mean"], 0.01);
  ASSERT_EQ(j["rows"].size(), 4U);
  for (const nlohmann::json& r : j["rows"]) {
    for (const char* field : {"name", "test", "bits_per_value", "bits_k", "bits_v", "bytes_per_token",
                              "bytes_per_token_asymptotic", "kl", "top1", "ppl_ratio", "quantized_read_share",
                              "prefill_tok_s", "decode_tok_s", "peak_bytes"}) {
      EXPECT_TRUE(r.contains(field)) << field;
    }
    EXPECT_EQ(r["kl"].size(), 7U);
    for (const char* field : {"mean", "lo", "hi", "median", "p99", "p999", "max"})
      EXPECT_TRUE(r["kl"].contains(field)) << field;
  }
  EXPECT_EQ(j["rows"][3]["test"], "copy");
  EXPECT_FALSE(j["rows"][1].contains("note"));
  EXPECT_EQ(j["rows"][2]["note"], "not a quantization measurement");
  EXPECT_EQ(j["rows"][1]["peak_bytes"], 1 << 20);
}

TEST(EvalJson, InfiniteFiguresAreNull) {
  Evaluation e = evaluation();
  e.rows[0].quality.kl_mean = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(to_json(e, {}, "t")["rows"][0]["kl"]["mean"].is_null());
}

TEST(EvalTable, TellsWhatWasRunAndMarksRows) {
  const std::string table = to_table(evaluation(), {}, /*markdown=*/false);
  EXPECT_THAT(table, HasSubstr("a model, f32 weights"));
  EXPECT_THAT(table, HasSubstr("Floor (llama.cpp f16"));
  EXPECT_THAT(table, HasSubstr("Copy test: 1024 tokens, 2048 other tokens"));
  EXPECT_THAT(table, HasSubstr("500*"));
  EXPECT_THAT(table, HasSubstr("not a quantization measurement"));
  EXPECT_EQ(table.find('|'), std::string::npos);
  EXPECT_THAT(to_table(evaluation(), {}, /*markdown=*/true), HasSubstr("| kv4 "));
}

TEST(FormatTable, AlignsColumns) {
  EXPECT_EQ(format_table({{"name", "n"}, {"a", "100"}, {"long name", "1"}}, false),
            "name         n\n"
            "---------  ---\n"
            "a          100\n"
            "long name    1\n");
  EXPECT_EQ(format_table({{"name", "n"}, {"a", "100"}}, true),
            "| name |   n |\n"
            "|------|----:|\n"
            "| a    | 100 |\n");
}

TEST(Effective, LayersWithTheSameAnswerShareAnEntry) {
  ggml::CacheReport cache;
  for (int layer = 0; layer < 3; ++layer) {
    LayerScheme scheme;
    scheme.requested = "kv4";
    scheme.effective = layer == 2 ? "llama.cpp f16" : "k=c4 v=t4";
    scheme.reason = layer == 2 ? "head size 20" : "";
    cache.layers.push_back(scheme);
    cache.model_layers.push_back(layer + 5);
  }
  const nlohmann::json j = effective_json({cache});
  ASSERT_EQ(j.size(), 2U);
  EXPECT_EQ(j[0]["layers"], (std::vector<int>{5, 6}));
  EXPECT_EQ(j[1]["reason"], "head size 20");
}

TEST(EvalTable, ShowsWhatIntegerArithmeticCosts) {
  Evaluation e = evaluation();
  e.rows[1].fused_kl = 0.0002;
  EvaluateOptions o;
  EXPECT_EQ(to_table(e, o, false).find("fused KL"), std::string::npos);
  o.both_paths = true;
  EXPECT_THAT(to_table(e, o, false), HasSubstr("0.00020 (2.0 %)"));
  const nlohmann::json j = to_json(e, o, "text.txt");
  EXPECT_DOUBLE_EQ(j["rows"][1]["fused"]["kl_mean"], 0.0002);
  EXPECT_DOUBLE_EQ(j["rows"][1]["fused"]["share"], 0.02);
  EXPECT_FALSE(j["rows"][0].contains("fused"));
}

}  // namespace
}  // namespace kvant::eval

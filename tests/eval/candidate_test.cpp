#include "kvant/candidate.h"

#include <gtest/gtest.h>

namespace kvant::eval {
namespace {

using Texts = std::vector<std::string>;

TEST(SplitCandidates, CommasSeparateAndFieldsContinue) {
  EXPECT_EQ(split_candidates("llama:f16,exact,kv4"), (Texts{"llama:f16", "exact", "kv4"}));
  EXPECT_EQ(split_candidates("kv4,w=256,kv8"), (Texts{"kv4,w=256", "kv8"}));
  EXPECT_EQ(split_candidates("k=c4,v=t4,w=64,llama:q4_0"), (Texts{"k=c4,v=t4,w=64", "llama:q4_0"}));
  EXPECT_EQ(split_candidates("k=c4,v=t4,k=t4,v=t4"), (Texts{"k=c4,v=t4", "k=t4,v=t4"}));
  EXPECT_EQ(split_candidates("v=t4;w=3,v=t8"), (Texts{"v=t4", "w=3,v=t8"}));
  EXPECT_EQ(split_candidates("llama:q8_0,w=3"), (Texts{"llama:q8_0", "w=3"}));
  EXPECT_EQ(split_candidates(",kv4,,"), (Texts{"kv4"}));
  EXPECT_TRUE(split_candidates("").empty());
}

TEST(ParseCandidate, Peers) {
  const Result<Candidate> both = parse_candidate("llama:q8_0");
  ASSERT_TRUE(both.ok());
  EXPECT_TRUE(both.value().peer);
  EXPECT_EQ(both.value().type_k, GGML_TYPE_Q8_0);
  EXPECT_EQ(both.value().type_v, GGML_TYPE_Q8_0);
  EXPECT_TRUE(both.value().quantized());
  EXPECT_EQ(both.value().window(), 0);
  const Result<Candidate> mixed = parse_candidate("llama:q8_0/q4_0");
  ASSERT_TRUE(mixed.ok());
  EXPECT_EQ(mixed.value().type_v, GGML_TYPE_Q4_0);
  EXPECT_TRUE(parse_candidate("llama:f16").value().baseline());
  EXPECT_FALSE(parse_candidate("llama:f16").value().quantized());
  for (std::string_view name : cache_type_names())
    EXPECT_TRUE(parse_candidate("llama:" + std::string(name)).ok()) << name;
}

TEST(ParseBenchCandidates, TakeIkLlamaToo) {
  const Result<std::vector<Candidate>> list = parse_bench_candidates("ik:q4_0;k=t4,v=t4;llama:f16,ik:f16");
  ASSERT_TRUE(list.ok()) << list.status().message();
  ASSERT_EQ(list.value().size(), 4U);
  EXPECT_EQ(list.value()[0].ik_type, "q4_0");
  EXPECT_TRUE(list.value()[0].peer);
  EXPECT_EQ(list.value()[1].scheme, "k=t4,v=t4");
  EXPECT_TRUE(list.value()[2].baseline());
  EXPECT_FALSE(list.value()[3].baseline());
  EXPECT_NE(parse_bench_candidates("ik:q8").status().message().find("nearest is q8_0"), std::string::npos);
  EXPECT_FALSE(parse_candidates("ik:q4_0").ok());
}

TEST(ParseCandidate, ErrorsNameTheNearest) {
  const Result<Candidate> bad = parse_candidate("llama:q8");
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), Code::kInvalidArgument);
  EXPECT_NE(bad.status().message().find("nearest is q8_0"), std::string::npos) << bad.status().message();
  EXPECT_FALSE(parse_candidate("llama:").ok());
  EXPECT_FALSE(parse_candidate("llama:q8_0/").ok());
  EXPECT_FALSE(parse_candidate("nothing").ok());
  EXPECT_FALSE(parse_candidates("").ok());
  EXPECT_FALSE(parse_candidates("kv4,exact,kv4").ok());
}

TEST(ParseCandidate, WindowsOfSchemes) {
  EXPECT_EQ(parse_candidate("kv4,w=256").value().window(), 256);
  EXPECT_EQ(parse_candidate("exact").value().window(), 0);
  EXPECT_FALSE(parse_candidate("exact").value().quantized());
}

TEST(Legs, OneSideEach) {
  const Result<std::vector<Candidate>> list = parse_candidates("llama:q4_0;exact;kv4,w=64;k=c4,v=t4;k=c4");
  ASSERT_TRUE(list.ok());
  Texts names, schemes;
  for (const Candidate& c : with_legs(list.value())) {
    names.push_back(c.name);
    schemes.push_back(c.scheme);
    EXPECT_TRUE(c.peer || parse_candidate(c.scheme).ok()) << c.scheme;
  }
  EXPECT_EQ(names, (Texts{"llama:q4_0", "llama:q4_0 (keys only)", "llama:q4_0 (values only)", "exact",
                          "kv4,w=64", "kv4,w=64 (keys only)", "kv4,w=64 (values only)", "k=c4,v=t4",
                          "k=c4,v=t4 (keys only)", "k=c4,v=t4 (values only)", "k=c4", "k=c4 (keys only)"}));
  EXPECT_EQ(schemes[5], "kv4,w=64,v=f16");
  EXPECT_EQ(schemes[6], "kv4,w=64,k=f16");
  EXPECT_EQ(parse_candidate(schemes[8]).value().parsed.value_format, "f16");
  EXPECT_EQ(parse_candidate(schemes[9]).value().parsed.key_format, "f16");
}

}  // namespace
}  // namespace kvant::eval

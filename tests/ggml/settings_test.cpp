// Options of the backend: text, environment, versions. Needs no model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "../../adapters/ggml/src/cache_state.h"
#include "../../adapters/ggml/src/settings.h"
#include "../../adapters/ggml/src/version.h"

namespace kvant::ggml {
namespace {

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Settings, TextSetsEveryOption) {
  Options o;
  ASSERT_TRUE(
      options_from_text("kv=kv8,w=64;attention=dequant;isa=scalar;strict=1;quiet=1;limit_mib=3", {}, &o)
          .ok());
  EXPECT_EQ(o.scheme, "kv8,w=64");
  EXPECT_EQ(o.attention, AttentionPath::kDequantize);
  EXPECT_EQ(o.isa, "scalar");
  EXPECT_TRUE(o.strict);
  EXPECT_TRUE(o.quiet);
  EXPECT_EQ(o.limit_bytes, size_t{3} << 20);
}

TEST(Settings, TextErrorsNameTheNearest) {
  Options o;
  const struct {
    const char* text;
    const char* word;
  } cases[] = {{"atention=fused", "attention="},
               {"attention=dequantize", "dequant"},
               {"strict=yes", "1"},
               {"limit_mib=many", "MiB"},
               {"limit_mib=0", "MiB"},
               {"isa=scalr", "scalar"},
               {"fused", "nearest"}};
  for (const auto& c : cases) {
    const Status status = options_from_text(c.text, {}, &o);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_NE(status.message().find(c.word), std::string::npos) << c.text << ": " << status.message();
  }
}

TEST(Settings, EnvironmentOverridesTheBase) {
  const Variable kv("KVANT_KV", "exact"), limit("KVANT_LIMIT_MIB", "10");
  Options o;
  ASSERT_TRUE(options_from_environment({.scheme = "kv8"}, &o).ok());
  EXPECT_EQ(o.scheme, "exact");
  EXPECT_EQ(o.limit_bytes, size_t{10} << 20);
}

TEST(Settings, MisspeltVariableIsAnError) {
  Options o;
  {
    const Variable wrong("KVANT_STRIKT", "1");
    const Status status = options_from_environment({}, &o);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("KVANT_STRICT"), std::string::npos) << status.message();
    EXPECT_TRUE(unknown_variables().empty());
  }
  const Variable other("KVANT_HOME", "/nowhere");
  EXPECT_TRUE(options_from_environment({}, &o).ok());
}

TEST(Settings, UnknownVariablesAreNamed) {
  const Variable kv("KVANT_KV", "kv4"), home("KVANT_HOME", "/nowhere"), other("KVANTUM", "1");
  EXPECT_TRUE(unknown_variables().empty());
  const Variable foo("KVANT_FOO", "1"), recipes("KVANT_RECIPES_DIR", "x"), near_home("KVANT_HOMES", "x");
  Options o;
  EXPECT_TRUE(options_from_environment({}, &o).ok());
  std::vector<std::string> lines = unknown_variables();
  std::sort(lines.begin(), lines.end());
  EXPECT_THAT(lines, testing::ElementsAre(
                         "KVANT_FOO: not a variable of kvant, ignored; nearest is KVANT_KV",
                         "KVANT_HOMES: not a variable of kvant, ignored; nearest is KVANT_HOME",
                         "KVANT_RECIPES_DIR: not a variable of kvant, ignored; nearest is KVANT_RECIPE"));
}

TEST(Settings, ConfigureChecksSchemeAndRecipe) {
  const Options before = options();
  EXPECT_EQ(configure({.scheme = "kv44"}).code(), Code::kInvalidArgument);
  EXPECT_EQ(configure({.recipe = "/no/such/recipe"}).code(), Code::kIo);
  EXPECT_TRUE(configure({.scheme = before.scheme, .recipe = "none"}).ok());
  EXPECT_EQ(configure({.limit_bytes = 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(options().scheme, before.scheme);
  ASSERT_TRUE(configure({.scheme = "kv8"}).ok());
  EXPECT_EQ(options().scheme, "kv8");
  EXPECT_GT(nominal_saving(), 1.7);
  EXPECT_LT(nominal_saving(), 2.1);
  ASSERT_TRUE(configure({.scheme = "exact"}).ok());
  EXPECT_EQ(nominal_saving(), 1.0);
  ASSERT_TRUE(configure(before).ok());
}

TEST(Versions, MismatchNamesBoth) {
  EXPECT_TRUE(compare_versions("0.25.3", 2, "0.25.3", 2).ok());
  EXPECT_TRUE(compare_versions("0.25.3", 2, "0.25.3", 0).ok());
  for (const Status& status :
       {compare_versions("0.25.3", 2, "0.26.0", 2), compare_versions("0.25.3", 2, "0.25.3", 3)}) {
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_NE(status.message().find("ggml 0.25.3 (backend API 2)"), std::string::npos) << status.message();
  }
  EXPECT_NE(compare_versions("0.25.3", 2, "0.26.0", 3).message().find("ggml 0.26.0 (backend API 3)"),
            std::string::npos);
}

TEST(Versions, RunningGgmlIsTheOneBuiltFor) { EXPECT_TRUE(check_ggml().ok()) << check_ggml().message(); }

TEST(CacheNames, OnlyAttentionCaches) {
  Side side = Side::kKey;
  int layer = -1;
  EXPECT_TRUE(parse_cache_name("cache_k_l0", &side, &layer));
  EXPECT_EQ(side, Side::kKey);
  EXPECT_EQ(layer, 0);
  EXPECT_TRUE(parse_cache_name("cache_v_l112", &side, &layer));
  EXPECT_EQ(side, Side::kValue);
  EXPECT_EQ(layer, 112);
  for (const char* name :
       {"cache_k_l", "cache_k_l1 (view)", "cache_r_l0", "cache_idx_k_l0", "Kcur-0", "cache_k_l9999999"}) {
    EXPECT_FALSE(parse_cache_name(name, &side, &layer)) << name;
  }
}

}  // namespace
}  // namespace kvant::ggml

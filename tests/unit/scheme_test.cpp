#include "kvant/scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "kvant/format.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

Scheme must_parse(std::string_view text, bool calibrated = false) {
  Result<Scheme> scheme = parse_scheme(text, calibrated);
  EXPECT_TRUE(scheme.ok()) << text << ": " << scheme.status().message();
  return scheme.ok() ? scheme.value() : Scheme{};
}

std::string refusal(std::string_view text) {
  Result<Scheme> scheme = parse_scheme(text);
  EXPECT_FALSE(scheme.ok()) << text;
  return scheme.ok() ? "" : scheme.status().message();
}

TEST(Scheme, RegisteredNames) {
  EXPECT_TRUE(must_parse("exact").exact());
  EXPECT_EQ(to_string(must_parse("kv4")), "k=c4a,v=t4,w=128,s=16,kx=auto,vx=auto,fit=0");
  EXPECT_EQ(to_string(must_parse("kv4", true)), "k=t6-4-3-3,v=t4,w=128,s=16,kx=auto,vx=auto,fit=1");
  EXPECT_EQ(must_parse("kv4", true).name, "kv4");
  std::set<std::string_view> names;
  for (const RegisteredScheme& registered : registered_schemes()) {
    EXPECT_TRUE(names.insert(registered.name).second);
    EXPECT_FALSE(registered.summary.empty());
    for (bool calibrated : {false, true}) {
      const Scheme scheme = must_parse(registered.name, calibrated);
      for (int head_dim : {64, 80, 96, 128, 256}) {
        EXPECT_TRUE(Format::parse(scheme.key_format, Side::kKey, head_dim).ok()) << registered.name;
        EXPECT_TRUE(Format::parse(scheme.value_format, Side::kValue, head_dim).ok()) << registered.name;
      }
    }
  }
  for (const char* name : {"exact", "kv8", "kv6", "kv5", "kv4", "kv3", "kv2"})
    EXPECT_EQ(names.count(name), 1u);
}

TEST(Scheme, KeysThatAreGivenAreNotFitted) {
  EXPECT_TRUE(must_parse("kv4,w=64", true).fit);
  EXPECT_FALSE(must_parse("kv4,fit=0", true).fit);
  EXPECT_FALSE(must_parse("kv4,k=5-4-4-3", true).fit);
  EXPECT_TRUE(must_parse("kv4,k=5-4-4-3,fit=1", true).fit);
  EXPECT_TRUE(must_parse("fit=1,k=5-3,v=4").fit);
  EXPECT_FALSE(must_parse("k=5-3,v=4").fit);
  EXPECT_NE(refusal("kv4,fit=2").find("fit= takes 0 or 1"), std::string::npos);
  EXPECT_NE(refusal("kv4,fit=").find("fit= takes 0 or 1"), std::string::npos);
}

// Bits per value, keys and values averaged, all metadata counted: what the names promise at every usual head
// size.
TEST(Scheme, NamesKeepTheirBits) {
  const struct {
    const char* name;
    double plain, calibrated;
  } kMostBits[] = {{"kv8", 8.25, 8.25}, {"kv6", 6.5, 6.25}, {"kv5", 5.5, 5.25},
                   {"kv4", 4.5, 4.25},  {"kv3", 3.5, 3.5},  {"kv2", 2.6, 2.6}};
  for (const auto& most : kMostBits) {
    for (const bool calibrated : {false, true}) {
      for (const int head_dim : {64, 96, 128, 256}) {
        const Scheme scheme = must_parse(most.name, calibrated);
        const double bits =
            (Format::parse(scheme.key_format, Side::kKey, head_dim).value().bits_per_value() +
             Format::parse(scheme.value_format, Side::kValue, head_dim).value().bits_per_value()) /
            2;
        EXPECT_LE(bits, calibrated ? most.calibrated : most.plain) << most.name << calibrated << head_dim;
        EXPECT_GE(bits, std::atoi(most.name + 2) - .25) << most.name << calibrated << head_dim;
      }
    }
  }
}

// Comparison schemes use formats of their own kind or say what they imitate, and no scheme for use needs
// them.
TEST(Scheme, ComparisonSchemesAreMarked) {
  int marked = 0;
  for (const RegisteredScheme& registered : registered_schemes()) {
    EXPECT_EQ(registered.name.starts_with("cmp-"), registered.comparison) << registered.name;
    marked += registered.comparison ? 1 : 0;
    for (const bool calibrated : {false, true}) {
      const Scheme scheme = must_parse(registered.name, calibrated);
      for (const FamilyInfo& family : format_families()) {
        if (registered.comparison || !family.comparison) continue;
        for (const std::string& format : {scheme.key_format, scheme.value_format}) {
          const std::string letters = format.substr(0, format.find_first_of("0123456789"));
          EXPECT_NE(letters, family.prefix) << registered.name;
        }
      }
    }
  }
  EXPECT_EQ(marked, 6);
}

TEST(Scheme, DocsListTheRegisteredDefinitions) {
  std::ifstream in(std::string(KVANT_SOURCE_DIR) + "/docs/formats.md");
  std::stringstream text;
  text << in.rdbuf();
  for (const RegisteredScheme& registered : registered_schemes()) {
    const std::string calibrated =
        registered.calibrated.empty() ? "the same" : "`" + std::string(registered.calibrated) + "`";
    const std::string row = "| `" + std::string(registered.name) + "` | `" + std::string(registered.plain) +
                            "` | " + calibrated + " |\n";
    EXPECT_NE(text.str().find(row), std::string::npos) << "docs/formats.md should have the row\n" << row;
  }
}

TEST(Scheme, FieldsOverrideRegisteredNames) {
  const Scheme scheme = must_parse("kv4,w=256,kx=none");
  EXPECT_EQ(scheme.window, 256);
  EXPECT_EQ(scheme.sinks, 16);
  EXPECT_EQ(scheme.key_format, "c4a");
  EXPECT_EQ(scheme.key_transform, TransformChoice::kIdentity);
  EXPECT_EQ(scheme.value_transform, TransformChoice::kAuto);
  EXPECT_EQ(scheme.name, "kv4,w=256,kx=none");
}

TEST(Scheme, FieldsAlone) {
  const Scheme scheme = must_parse("k=5-3,v=4-3:s8,w=0,s=0,kx=calibrated,vx=hadamard");
  EXPECT_EQ(scheme.key_format, "t5-3");
  EXPECT_EQ(scheme.value_format, "t4-3:s8");
  EXPECT_EQ(scheme.window, 0);
  EXPECT_EQ(scheme.sinks, 0);
  EXPECT_EQ(scheme.key_transform, TransformChoice::kCalibrated);
  EXPECT_EQ(scheme.value_transform, TransformChoice::kHadamard);
  EXPECT_EQ(must_parse("v=t4").key_format, "f16");
  EXPECT_FALSE(must_parse("v=t4").exact());
  EXPECT_TRUE(must_parse("w=5").exact());
  EXPECT_EQ(must_parse("k=t4:s4").key_format, "t4");
}

TEST(Scheme, CanonicalTextParsesToTheSame) {
  for (const char* text :
       {"exact", "kv8", "kv2", "k=c4a,v=g4,w=4096,s=256", "k=ct5-3:s16,kx=none,vx=calibrated"}) {
    const Scheme scheme = must_parse(text);
    const std::string canonical = to_string(scheme);
    EXPECT_EQ(to_string(must_parse(canonical)), canonical);
    EXPECT_EQ(must_parse(canonical).key_format, scheme.key_format);
    EXPECT_EQ(must_parse(canonical).window, scheme.window);
  }
}

TEST(Scheme, RefusalsNameTheFieldAndWhatIsLegal) {
  EXPECT_THAT(refusal(""), HasSubstr("take one of exact, kv8"));
  EXPECT_THAT(refusal("kv9"), HasSubstr("take one of exact, kv8"));
  EXPECT_THAT(refusal("kv44,w=3"), HasSubstr("; nearest is kv4"));
  EXPECT_THAT(refusal("exakt"), HasSubstr("; nearest is exact"));
  EXPECT_THAT(refusal("cmp-kivi3"), HasSubstr("; nearest is cmp-kivi"));
  EXPECT_THAT(refusal("kv4,"), HasSubstr("ends in a comma"));
  EXPECT_THAT(refusal("kv4,kv5"), HasSubstr("'kv5' is neither"));
  EXPECT_THAT(refusal("k=t4,"), HasSubstr("neither"));
  EXPECT_THAT(refusal("k=t9"), HasSubstr("nearest: 't8'"));
  EXPECT_THAT(refusal("k="), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("kv4,w=5000"), HasSubstr("w= takes 0..4096; nearest: 4096"));
  EXPECT_THAT(refusal("w=-1"), HasSubstr("nearest: 0"));
  EXPECT_THAT(refusal("w=99999999999999999999"), HasSubstr("nearest: 4096"));
  EXPECT_THAT(refusal("w=12x"), HasSubstr("w= takes 0..4096"));
  EXPECT_THAT(refusal("w="), HasSubstr("w= takes 0..4096"));
  EXPECT_THAT(refusal("s=257"), HasSubstr("s= takes 0..256; nearest: 256"));
  EXPECT_THAT(refusal("kx=fft"), HasSubstr("kx= takes auto, none, hadamard or calibrated"));
  EXPECT_THAT(refusal("q=4"), HasSubstr("'q' is not a field; fields are k, v, w, s, kx, vx"));
  EXPECT_THAT(refusal("w=1,w=2"), HasSubstr("w= is given twice"));
  EXPECT_THAT(refusal("w=1\n"), HasSubstr("scheme 'w=1?'"));
}

}  // namespace
}  // namespace kvant

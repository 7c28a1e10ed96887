#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kvant/format.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;
using testing::must_parse;

std::string refusal(std::string_view name, Side side = Side::kKey, int head_dim = 128) {
  Result<Format> format = Format::parse(name, side, head_dim);
  EXPECT_FALSE(format.ok()) << name;
  return format.ok() ? "" : format.status().message();
}

TEST(FormatParse, CanonicalNamesLeaveDefaultsOut) {
  EXPECT_EQ(must_parse("t4", Side::kKey, 64).name(), "t4");
  EXPECT_EQ(must_parse("t4:s4", Side::kKey, 64).name(), "t4");
  EXPECT_EQ(must_parse("t4:s16", Side::kKey, 64).name(), "t4:s16");
  EXPECT_EQ(must_parse("g4:s16", Side::kKey, 64).name(), "g4");
  EXPECT_EQ(must_parse("t5-3a:s8", Side::kKey, 64).name(), "t5-3a:s8");
}

TEST(FormatParse, RefusesWithTheNearestLegalName) {
  EXPECT_THAT(refusal("t9"), HasSubstr("width 9 is not in 2..8; nearest: 't8'"));
  EXPECT_THAT(refusal("t4-1"), HasSubstr("width 1 is not in 2..8; nearest: 't4-2'"));
  EXPECT_THAT(refusal("c12"), HasSubstr("nearest: 'c8'"));
  EXPECT_THAT(refusal("t6-5-4-3-2"), HasSubstr("5 widths, at most 4; nearest: 't6-5-4-3'"));
  EXPECT_THAT(refusal("c4-3"), HasSubstr("2 widths, at most 1; nearest: 'c4'"));
  EXPECT_THAT(refusal("c4:s8"), HasSubstr("no token scales; nearest: 'c4'"));
  EXPECT_THAT(refusal("ct4a"), HasSubstr("no asymmetric grid; nearest: 'ct4'"));
  EXPECT_THAT(refusal("t4:s5"), HasSubstr("nearest: 't4'"));
  EXPECT_THAT(refusal("t4b"), HasSubstr("nearest: 't4'"));
  EXPECT_THAT(refusal("x4"), HasSubstr("not a known format; nearest: 't4'"));
  EXPECT_THAT(refusal("f61"), HasSubstr("nearest: 'f16'"));
  EXPECT_THAT(refusal(""), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("t"), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("t4-"), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("t-4"), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("t99999999999999999999"), HasSubstr("not a known format"));
  EXPECT_THAT(refusal("f16a"), HasSubstr("nearest: 'f16'"));
  EXPECT_THAT(refusal(std::string("t4\n\x01")), HasSubstr("??"));
}

TEST(FormatParse, RefusesHeadSizesAndEmptyBands) {
  EXPECT_THAT(refusal("t4", Side::kKey, 36),
              HasSubstr("head size 36 is not a multiple of 8 in 32..256; nearest: 40"));
  EXPECT_THAT(refusal("t4", Side::kKey, 24), HasSubstr("nearest: 32"));
  EXPECT_THAT(refusal("t4", Side::kKey, -2000000000), HasSubstr("nearest: 32"));
  EXPECT_THAT(refusal("t4", Side::kValue, 512), HasSubstr("nearest: 256"));
  EXPECT_THAT(refusal("t4-4-3-3", Side::kValue, 32), HasSubstr("nearest: 't4-4'"));
  EXPECT_TRUE(Format::parse("t4-4-3-3", Side::kKey, 32).ok());
}

// Each example either is right or is refused with a name that is accepted for the same head.
TEST(FormatParse, EveryExampleAtEveryHeadSize) {
  for (const std::string& name : format_names()) {
    for (Side side : testing::kSides) {
      for (int head_dim : testing::kHeadDims) {
        Result<Format> format = Format::parse(name, side, head_dim);
        if (format.ok()) continue;
        const std::string& message = format.status().message();
        const size_t at = message.rfind("nearest: '");
        ASSERT_NE(at, std::string::npos) << message;
        const std::string nearest = message.substr(at + 10, message.rfind('\'') - at - 10);
        EXPECT_TRUE(Format::parse(nearest, side, head_dim).ok()) << message;
      }
    }
  }
}

TEST(FormatParse, ExamplesAreCanonicalAndUnique) {
  std::set<std::string> names;
  std::set<uint32_t> ids;
  for (const std::string& name : format_names()) {
    const Format format = must_parse(name, Side::kKey, 256);
    EXPECT_EQ(format.name(), name);
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_TRUE(ids.insert(format.id()).second) << name;
  }
  EXPECT_GE(names.size(), 20u);
}

TEST(FormatId, IsPermanentAndIndependentOfTheHead) {
  EXPECT_EQ(must_parse("f16", Side::kKey, 64).id(), 0x01000000u);
  EXPECT_EQ(must_parse("bf16", Side::kKey, 64).id(), 0x02000000u);
  EXPECT_EQ(must_parse("t6-4-3-3", Side::kKey, 64).id(), 0x03033346u);
  EXPECT_EQ(must_parse("t4a:s16", Side::kKey, 64).id(), 0x03110004u);
  EXPECT_EQ(must_parse("t4:s8", Side::kKey, 64).id(), 0x03020004u);
  EXPECT_EQ(must_parse("c4", Side::kKey, 64).id(), 0x04000004u);
  EXPECT_EQ(must_parse("g4", Side::kKey, 64).id(), 0x05010004u);
  EXPECT_EQ(must_parse("ct4", Side::kKey, 64).id(), 0x06030004u);
  testing::for_each_format([](const Format& format) {
    const TileLayout& layout = format.layout();
    EXPECT_EQ(format.id(), must_parse(format.name(), Side::kKey, 256).id());
    Result<Format> again = Format::from_id(format.id(), layout.side, layout.head_dim);
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(again.value().name(), format.name());
    EXPECT_EQ(again.value().tile_bytes(), format.tile_bytes());
  });
}

TEST(FormatId, RefusesWhatNoNameGives) {
  for (uint32_t id :
       {0u, 0x07000004u, 0xff000000u, 0x01000004u, 0x03000004u, 0x03030000u, 0x03030001u, 0x03030009u,
        0x03030404u, 0x03040004u, 0x03230004u, 0x04030004u, 0x04000044u, 0x06130004u, 0x03830004u}) {
    EXPECT_FALSE(Format::from_id(id, Side::kKey, 64).ok()) << std::hex << id;
  }
  EXPECT_FALSE(Format::from_id(0x04000004u, Side::kKey, 20).ok());
}

}  // namespace
}  // namespace kvant

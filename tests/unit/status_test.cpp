#include "kvant/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace kvant {
namespace {

Status fail_when(bool fail) { return fail ? Status(Code::kIo, "cannot read") : Status(); }

Status pass_on(bool fail) {
  KVANT_RETURN_IF_ERROR(fail_when(fail));
  return Status(Code::kCancelled, "went on");
}

TEST(Status, IsOkUnlessItSaysOtherwise) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().code(), Code::kOk);
  const Status status(Code::kCorrupt, "why");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.message(), "why");
}

TEST(Status, EveryCodeHasItsName) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code) {
    const std::string name = code_name(static_cast<Code>(code));
    EXPECT_NE(name, "unknown") << code;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_STREQ(code_name(static_cast<Code>(200)), "unknown");
}

TEST(Status, ReturnIfErrorPassesTheFirstErrorOn) {
  EXPECT_EQ(pass_on(true).code(), Code::kIo);
  EXPECT_EQ(pass_on(false).code(), Code::kCancelled);
}

TEST(Status, ResultHoldsAValueOrAStatus) {
  Result<std::string> value(std::string("text"));
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  EXPECT_EQ(value.value(), "text");
  const Result<std::string> error(Status(Code::kMismatch, "other model"));
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().code(), Code::kMismatch);
}

TEST(Status, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code) {
    names.insert(code_name(static_cast<Code>(code)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(Code::kInternal) + 1);
  EXPECT_EQ(names.count("unknown"), 0u);
}

}  // namespace
}  // namespace kvant

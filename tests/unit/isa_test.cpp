// Choice of the instruction set: what is available, forcing it, refusals.
#include "kvant/isa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "simd/attention.h"
#include "simd/kernels.h"

namespace kvant {
namespace {

class IsaTest : public testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(force_isa(available_isas().back()).ok()); }
};

TEST_F(IsaTest, ScalarIsFirstAndTheBestIsActive) {
  const auto names = available_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), "scalar");
  EXPECT_EQ(active_isa(), names.back());
}

TEST_F(IsaTest, ForcingChangesTheKernelsThatRun) {
  for (std::string_view name : available_isas()) {
    ASSERT_TRUE(force_isa(name).ok()) << name;
    EXPECT_EQ(active_isa(), name);
    EXPECT_EQ(name == "scalar", simd::kernels().attention == simd::scalar_attention_kernels());
    EXPECT_EQ(name == "avx2", simd::kernels().attention == simd::avx2_attention_kernels());
    EXPECT_EQ(name == "avx512vnni", simd::kernels().attention == simd::avx512vnni_attention_kernels());
    EXPECT_NE(simd::kernels().encode, nullptr);
  }
}

TEST_F(IsaTest, UnknownNamesAreRefusedWithTheKnownOnes) {
  const std::string_view before = active_isa();
  const Status status = force_isa("avx1024");
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::HasSubstr("'avx1024'"));
  for (std::string_view name : available_isas())
    EXPECT_THAT(status.message(), testing::HasSubstr(std::string(name)));
  EXPECT_EQ(active_isa(), before);
}

TEST_F(IsaTest, ListedTablesAreComplete) {
  for (const simd::KernelTable* table : simd::available_kernels()) {
    const simd::AttentionKernels& k = *table->attention;
    EXPECT_NE(k.prepare_queries, nullptr);
    EXPECT_NE(k.qk_tiles, nullptr);
    EXPECT_NE(k.qk_rows, nullptr);
    EXPECT_NE(k.qk_floats, nullptr);
    EXPECT_NE(k.softmax, nullptr);
    EXPECT_NE(k.rescale, nullptr);
    EXPECT_NE(k.combine, nullptr);
    EXPECT_NE(k.pv_tiles, nullptr);
    EXPECT_NE(k.pv_rows, nullptr);
    EXPECT_NE(k.pv_floats, nullptr);
  }
}

}  // namespace
}  // namespace kvant

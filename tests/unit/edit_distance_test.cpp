#include "kvant/edit_distance.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace kvant {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsAndReplacements) {
  EXPECT_EQ(edit_distance("kv4", "kv4"), 0u);
  EXPECT_EQ(edit_distance("", "kv4"), 3u);
  EXPECT_EQ(edit_distance("kv44", "kv4"), 1u);
  EXPECT_EQ(edit_distance("exakt", "exact"), 1u);
  EXPECT_EQ(edit_distance("v4k", "kv4"), 2u);
}

TEST(Nearest, TheFirstOfTheLeastDistance) {
  EXPECT_EQ(nearest("--promt", std::vector<std::string>{"--file", "--prompt", "--port"}), "--prompt");
  EXPECT_EQ(nearest("kv", std::vector<std::string_view>{"kv8", "kv4"}), "kv8");
  EXPECT_EQ(nearest("x", std::vector<std::string>{}), "");
  EXPECT_EQ(nearest(std::string(1 << 20, 'x'), std::vector<std::string>{"a"}), "a") << "in no time";
}

}  // namespace
}  // namespace kvant

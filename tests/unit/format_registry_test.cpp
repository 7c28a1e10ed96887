#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "formats/family.h"
#include "kvant/format.h"
#include "support/format_data.h"

namespace kvant {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// Adding a family touches its own file, a test vector and one line of the registry: nothing else may know a
// family by name.
TEST(FormatRegistry, FamiliesAreNamedInTheirFileAndTheRegistryOnly) {
  const fs::path root = KVANT_SOURCE_DIR;
  std::map<std::string, std::set<std::string>> mentions;
  for (const char* symbol : {"kTokenFamily", "kChannelFamily", "kGroupFamily", "kChannelTokenFamily",
                             "kF16Family", "kStaticHeadFamily", "kStaticTensorFamily"}) {
    mentions[symbol];
  }
  int files = 0;
  for (const char* folder : {"core", "adapters", "eval", "apps", "bench", "examples"}) {
    if (!fs::exists(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".cpp" && extension != ".h") continue;
      ++files;
      const std::string text = read_file(entry.path());
      for (auto& [symbol, where] : mentions) {
        if (text.find(symbol) != std::string::npos) where.insert(entry.path().filename().string());
      }
    }
  }
  EXPECT_GT(files, 20);
  for (const auto& [symbol, where] : mentions) {
    EXPECT_EQ(where.size(), 2u) << symbol;
    EXPECT_EQ(where.count("registry.cpp"), 1u) << symbol;
  }
}

TEST(FormatRegistry, IdsAndPrefixesArePermanentAndUnique) {
  const std::map<std::string_view, int> kIds = {{"f16", 1}, {"bf16", 2}, {"t", 3}, {"c", 4},
                                                {"g", 5},   {"ct", 6},   {"s", 7}, {"st", 8}};
  std::set<int> ids;
  for (const FormatFamily* family : all_families()) {
    EXPECT_TRUE(ids.insert(family->id).second) << family->prefix;
    EXPECT_NE(family->id, 0);
    EXPECT_FALSE(family->summary.empty());
    EXPECT_FALSE(family->examples.empty()) << "tests and tables iterate the examples";
    const auto known = kIds.find(family->prefix);
    if (known != kIds.end()) {
      EXPECT_EQ(family->id, known->second) << family->prefix;
    }
  }
  EXPECT_GE(ids.size(), kIds.size());
  EXPECT_EQ(format_families().size(), ids.size());
}

TEST(FormatRegistry, EveryFamilyHasATestVector) {
  for (const FormatFamily* family : all_families()) {
    EXPECT_TRUE(fs::exists(fs::path(KVANT_GOLDEN_DIR) / (std::string(family->prefix) + ".txt")))
        << family->prefix;
  }
}

std::string table_cell(double bits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4f", bits);
  return text;
}

// docs/formats.md: one row per example, bits per value at 64, 128 and 256 channels.
TEST(FormatDocs, TableOfBitsIsTheCodes) {
  const std::string text = read_file(fs::path(KVANT_SOURCE_DIR) / "docs" / "formats.md");
  ASSERT_FALSE(text.empty());
  std::string expected;
  for (const std::string& name : format_names()) {
    std::string row = "| `" + name + "` |";
    for (int head_dim : {64, 128, 256}) {
      row += " " + table_cell(testing::must_parse(name, Side::kKey, head_dim).bits_per_value()) + " |";
    }
    EXPECT_NE(text.find(row + "\n"), std::string::npos) << "docs/formats.md should have the row\n" << row;
    expected += row + "\n";
  }
  EXPECT_NE(text.find(expected), std::string::npos) << "rows in the order of the registry:\n" << expected;
}

}  // namespace
}  // namespace kvant

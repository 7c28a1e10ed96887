// Stored bytes never change: what was written by an earlier build is read by this one, and the same input
// gives the same bytes. One file per family, PREFIX.txt, with lines
//   encode NAME SIDE HEAD_DIM HASH_OF_TILE HASH_OF_DECODED_VALUES   for every example
//   tile NAME SIDE HEAD_DIM HASH_OF_DECODED_VALUES HEX               a whole tile, of the first example
// Hashes are FNV-1a, 64 bits. KVANT_UPDATE_GOLDEN=1 writes the files; a changed line of an existing format
// means that stored caches of earlier builds can no longer be read as they were, so it needs a new tile
// version.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "support/format_data.h"

namespace kvant {
namespace {

std::string hash_of(const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

// Normal values with a few outliers, a zero token, a constant token and a dead token.
testing::Encoded encode_golden(const Format& format) {
  const int n = format.layout().head_dim;
  std::vector<float> x = testing::normal_tile(n, 77);
  for (int c = 0; c < n; ++c) {
    x[static_cast<size_t>(3) * n + c] = 0.0f;
    x[static_cast<size_t>(9) * n + c] = -3.0f;
    x[static_cast<size_t>(20) * n + c] *= 0.0625f;
  }
  for (int t = 0; t < kPageTokens; t += 7) x[static_cast<size_t>(t) * n + 5] += 12.0f;
  return testing::encode_decode(format, {.x = x.data(), .live = ~(uint64_t{1} << 40)});
}

std::string place(const Format& format) {
  return format.name() + " " + side_name(format.layout().side) + " " +
         std::to_string(format.layout().head_dim);
}

std::string hash_of_values(const std::vector<float>& x) {
  return hash_of(x.data(), x.size() * sizeof(float));
}

std::string tile_line(const Format& format) {
  const testing::Encoded out = encode_golden(format);
  std::string line = "tile " + place(format) + " " + hash_of_values(out.decoded) + " ";
  for (std::byte b : out.bytes) {
    char text[3];
    std::snprintf(text, sizeof(text), "%02x", std::to_integer<unsigned>(b));
    line += text;
  }
  return line;
}

std::vector<std::string> lines_of(const FamilyInfo& family) {
  std::vector<std::string> lines;
  for (std::string_view name : family.examples) {
    for (Side side : testing::kSides) {
      for (int head_dim : {64, 72, 128}) {
        Result<Format> format = Format::parse(name, side, head_dim);
        if (!format.ok()) continue;
        const testing::Encoded out = encode_golden(format.value());
        lines.push_back("encode " + place(format.value()) + " " +
                        hash_of(out.bytes.data(), out.bytes.size()) + " " + hash_of_values(out.decoded));
      }
    }
  }
  lines.push_back(tile_line(testing::must_parse(family.examples.front(), Side::kKey, 32)));
  return lines;
}

std::string file_of(const FamilyInfo& family) {
  return std::string(KVANT_GOLDEN_DIR) + "/" + std::string(family.prefix) + ".txt";
}

std::vector<std::string> read_lines(const std::string& path) {
  std::ifstream in(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(FormatGolden, SameInputGivesTheStoredBytes) {
  const bool update = std::getenv("KVANT_UPDATE_GOLDEN") != nullptr;
  for (const FamilyInfo& family : format_families()) {
    const std::vector<std::string> lines = lines_of(family);
    if (update) {
      std::ofstream out(file_of(family));
      for (const std::string& line : lines) out << line << "\n";
      continue;
    }
    const std::vector<std::string> stored = read_lines(file_of(family));
    ASSERT_EQ(stored.size(), lines.size()) << family.prefix;
    for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i], stored[i]);
  }
}

TEST(FormatGolden, StoredTilesAreStillRead) {
  int tiles = 0;
  for (const FamilyInfo& family : format_families()) {
    for (const std::string& line : read_lines(file_of(family))) {
      std::istringstream in(line);
      std::string kind, name, side, hash, hex;
      int head_dim = 0;
      in >> kind >> name >> side >> head_dim >> hash >> hex;
      if (kind != "tile") continue;
      const Format format = testing::must_parse(name, side == "key" ? Side::kKey : Side::kValue, head_dim);
      ASSERT_EQ(hex.size(), 2 * format.tile_bytes());
      testing::GuardedTile tile(format.tile_bytes());
      for (size_t i = 0; i < format.tile_bytes(); ++i) {
        tile.data()[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
      }
      EXPECT_TRUE(format.verify(tile.data()).ok()) << name;
      std::vector<float> x(static_cast<size_t>(kPageTokens) * head_dim);
      format.decode(tile.data(), x.data());
      EXPECT_EQ(hash_of_values(x), hash) << name;
      ++tiles;
    }
  }
  EXPECT_EQ(tiles, static_cast<int>(format_families().size()));
}

}  // namespace
}  // namespace kvant

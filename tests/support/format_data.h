// Data and buffers for tests of formats. Values are made with exact arithmetic only, so that golden bytes do
// not depend on a mathematics library.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kvant/format.h"
#include "kvant/memory.h"

namespace kvant::testing {

inline constexpr int kHeadDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256};
inline constexpr Side kSides[] = {Side::kKey, Side::kValue};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [-1, 1), a multiple of 2^-23.
  float uniform() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }
  // Close to normal with variance 1: sum of twelve uniform values, halved.
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return 0.5f * sum;
  }

 private:
  uint64_t state_;
};

// A tile between two guards of 64 bytes, filled with a poison byte.
class GuardedTile {
 public:
  explicit GuardedTile(size_t bytes, int poison = 0xaa)
      : bytes_(bytes),
        pool_({.poison = poison}),
        buffer_(&pool_, bytes + 128, Use::kTiles),
        poison_(poison) {}
  std::byte* data() { return buffer_.data() + 64; }
  std::vector<std::byte> bytes() { return {data(), data() + bytes_}; }
  bool guards_intact() {
    for (size_t i = 0; i < 64; ++i) {
      if (buffer_.data()[i] != static_cast<std::byte>(poison_)) return false;
      if (data()[bytes_ + i] != static_cast<std::byte>(poison_)) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  MemoryPool pool_;
  PoolBuffer buffer_;
  int poison_;
};

inline std::vector<float> normal_tile(int head_dim, uint64_t seed, float scale = 1.0f) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(kPageTokens) * head_dim);
  for (float& value : x) value = scale * random.normal();
  return x;
}

inline Format must_parse(std::string_view name, Side side, int head_dim) {
  Result<Format> format = Format::parse(name, side, head_dim);
  EXPECT_TRUE(format.ok()) << name << ": " << format.status().message();
  return format.value();
}

// Calls f(format) for every example of every family, both sides and every head size that the format accepts.
template <typename F>
void for_each_format(F f, std::vector<int> head_dims = {std::begin(kHeadDims), std::end(kHeadDims)}) {
  for (const std::string& name : format_names()) {
    for (Side side : kSides) {
      for (int head_dim : head_dims) {
        Result<Format> format = Format::parse(name, side, head_dim);
        if (!format.ok()) continue;
        SCOPED_TRACE(name + " " + side_name(side) + " " + std::to_string(head_dim));
        f(format.value());
      }
    }
  }
}

struct Encoded {
  EncodeStats stats;
  std::vector<std::byte> bytes;
  std::vector<float> decoded;
};

inline Encoded encode_decode(const Format& format, const EncodeInput& in, int poison = 0xaa) {
  GuardedTile tile(format.tile_bytes(), poison);
  Encoded out;
  out.stats = format.encode(in, tile.data());
  EXPECT_TRUE(tile.guards_intact());
  const Status status = format.verify(tile.data());
  EXPECT_TRUE(status.ok()) << status.message();
  out.bytes = tile.bytes();
  out.decoded.resize(static_cast<size_t>(kPageTokens) * format.layout().head_dim);
  format.decode(tile.data(), out.decoded.data());
  return out;
}

inline Encoded encode_decode(const Format& format, const std::vector<float>& x) {
  return encode_decode(format, EncodeInput{.x = x.data()});
}

}  // namespace kvant::testing

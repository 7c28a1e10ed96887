// Cases about where things lie: layout oracle, query groups, big offsets, reuse of slots.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Look;
using test::Outputs;
using test::TokenRows;

uint32_t place_hash(int layer, int head, int token, int channel) {
  uint32_t x = static_cast<uint32_t>(((layer * 64 + head) * 4096 + token) * 256 + channel) * 2654435761u;
  x = (x ^ (x >> 15)) * 2246822519u;
  x = (x ^ (x >> 13)) * 3266489917u;
  return x ^ (x >> 16);
}

// Values of neighbours differ in every direction; all are exact in binary16.
float oracle_value(int layer, int head, int token, int channel) {
  return static_cast<float>(static_cast<int>(place_hash(layer, head, token, channel) % 1999) - 999) / 32.0f;
}

float sign(int layer, int head, int token, int channel) {
  return (place_hash(layer, head, token, channel) & 1) != 0 ? 1.0f : -1.0f;
}

// Keys are sign patterns; query head h of the query at position p is the pattern of key `p % 150`.
test::Content oracle_content() {
  return [](int layer, const LayerShape& shape, int, int pos) {
    TokenRows rows;
    const int group = shape.n_query_heads / shape.n_kv_heads;
    for (int h = 0; h < shape.n_query_heads; ++h) {
      for (int c = 0; c < shape.key_dim; ++c) rows.q.push_back(sign(layer, h / group, pos % 150, c));
    }
    for (int h = 0; h < shape.n_kv_heads; ++h) {
      for (int c = 0; c < shape.key_dim; ++c) rows.k.push_back(sign(layer, h, pos, c));
      for (int c = 0; c < shape.value_dim; ++c) rows.v.push_back(oracle_value(layer, h, pos, c));
    }
    return rows;
  };
}

struct OracleCase {
  const char* scheme;
  int n_kv_heads, key_dim, value_dim;
};

class LayoutOracle : public ::testing::TestWithParam<OracleCase> {};

// C10: every value read back singly, and through attention that looks at one token only.
TEST_P(LayoutOracle, C10ReadsBackEveryValue) {
  const OracleCase& param = GetParam();
  const LayerShape shape = {.n_query_heads = 2 * param.n_kv_heads,
                            .n_kv_heads = param.n_kv_heads,
                            .key_dim = param.key_dim,
                            .value_dim = param.value_dim};
  Engine engine({.scheme = param.scheme, .shapes = {shape, shape}, .n_slots = 256}, oracle_content());
  constexpr int kTokens = 200;
  std::vector<Entry> first, second;
  for (int t = 0; t < kTokens; ++t) (t < 150 ? first : second).push_back({.pos = t, .slot = t});
  std::vector<Outputs> out;
  ASSERT_TRUE(engine.step(first, {}, &out).ok());
  // The right key gets a logit that is at least 100 larger than any other.
  ASSERT_TRUE(engine.step(second, {.scale = 400.0f / static_cast<float>(shape.key_dim)}, &out).ok());

  for (int layer = 0; layer < 2; ++layer) {
    const bool quantized = !engine.cache().layer(LayerId{layer}).heads[0].value_format.exact();
    const int width = shape.n_kv_heads * shape.value_dim;
    std::vector<uint16_t> stored(static_cast<size_t>(kTokens) * width);
    ASSERT_TRUE(
        engine.cache().read_rows(LayerId{layer}, Side::kValue, StreamId{0}, 0, kTokens, stored.data()).ok());
    std::vector<float> slot(width);
    for (int t = 0; t < kTokens; ++t) {
      ASSERT_TRUE(
          engine.cache().read_slot(LayerId{layer}, Side::kValue, StreamId{0}, t, false, slot.data()).ok());
      for (int h = 0; h < shape.n_kv_heads; ++h) {
        for (int c = 0; c < shape.value_dim; ++c) {
          const float want = oracle_value(layer, h, t, c);
          const float got = half_to_float(stored[static_cast<size_t>(t) * width + h * shape.value_dim + c]);
          // 8 bits over values up to 31: neighbours differ by more than what is lost.
          ASSERT_NEAR(got, want, quantized ? 1.0f : 0.0f)
              << "layer " << layer << " head " << h << " token " << t;
          ASSERT_NEAR(slot[h * shape.value_dim + c], got, 0.02f);
        }
      }
    }
    for (size_t i = 0; i < second.size(); ++i) {
      const int token = second[i].pos % 150;
      for (int h = 0; h < shape.n_query_heads; ++h) {
        for (int c = 0; c < shape.value_dim; ++c) {
          ASSERT_NEAR(out[layer].engine[i][h * shape.value_dim + c], oracle_value(layer, h / 2, token, c),
                      quantized ? 1.0f : 1e-4f)
              << "layer " << layer << " query head " << h << " token " << token << " channel " << c;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, LayoutOracle,
                         ::testing::Values(OracleCase{"exact", 8, 128, 128},
                                           OracleCase{"k=t4,v=t8,w=1,s=3", 8, 128, 128},
                                           OracleCase{"k=g4:s16,v=g8:s16,w=1,s=0", 8, 128, 128},
                                           OracleCase{"k=c4,v=c8,w=64,s=16", 3, 128, 64},
                                           OracleCase{"k=ct4,v=ct8,w=1,s=5", 2, 192, 80}),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// C12: head h returns the constant of its own KV head.
TEST(LayoutCases, C12EveryQueryHeadMeetsItsOwnKvHead) {
  for (const int group : {1, 3, 4, 7, 8, 16}) {
    for (const int n_kv_heads : {1, 2, 3}) {
      for (const char* scheme : {"exact", "k=t4,v=g4,vx=none,w=1,s=0", "k=c4,v=c4,w=1,s=2"}) {
        const LayerShape shape = {
            .n_query_heads = group * n_kv_heads, .n_kv_heads = n_kv_heads, .key_dim = 64, .value_dim = 32};
        Engine engine({.scheme = scheme, .shapes = {shape}, .threads = 2},
                      [](int, const LayerShape& s, int seq, int pos) {
                        TokenRows rows = test::random_content(5)(0, s, seq, pos);
                        for (size_t i = 0; i < rows.v.size(); ++i)
                          rows.v[i] = 10.0f * (1.0f + i / s.value_dim);
                        return rows;
                      });
        const Outputs out = engine.append(0, 0, 0, 140, 35);
        for (int t = 0; t < 140; ++t) {
          for (int h = 0; h < shape.n_query_heads; ++h) {
            for (int c = 0; c < shape.value_dim; ++c) {
              const float want = 10.0f * static_cast<float>(1 + h / group);
              ASSERT_NEAR(out.engine[t][h * shape.value_dim + c], want, 0.02f * want)
                  << scheme << " group " << group << " head " << h << " token " << t;
            }
          }
        }
      }
    }
  }
}

// C13: a cache whose rows would take more than 2^31 bytes a side; only its last pages are touched.
TEST(LayoutCases, C13BigOffsets) {
  constexpr int kSlots = 64 * 4200;
  const LayerShape shape = {.n_query_heads = 16, .n_kv_heads = 16, .key_dim = 256, .value_dim = 256};
  static_assert(int64_t{kSlots} * 16 * 256 * 2 > (int64_t{1} << 31));
  for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=0"}) {
    Engine engine({.scheme = scheme, .shapes = {shape}, .n_slots = kSlots, .poison = 0xFF});
    const size_t empty = engine.cache().memory().exact_row_bytes + engine.cache().memory().tile_bytes;
    EXPECT_EQ(empty, 0u);
    std::vector<Entry> entries;
    for (int i = 0; i < 130; ++i) entries.push_back({.pos = i, .slot = kSlots - 130 + i});
    std::vector<Outputs> out;
    for (int i = 0; i < 128; i += 32) {
      ASSERT_TRUE(engine.step({entries.begin() + i, entries.begin() + i + 32}, {}, &out).ok());
    }
    ASSERT_TRUE(engine.step({entries.begin() + 128, entries.end()}, {.ref = true}, &out).ok());
    const bool exact = engine.cache().layer(LayerId{0}).exact;
    EXPECT_LT(test::relative_error(out[0].engine, out[0].ref), exact ? 1e-5 : 0.3) << scheme;
    std::vector<uint16_t> row(4096);
    ASSERT_TRUE(
        engine.cache().read_rows(LayerId{0}, Side::kKey, StreamId{0}, kSlots - 1, 1, row.data()).ok());
    EXPECT_EQ(half_to_float(row[4095]), engine.original(0, Side::kKey, 0, kSlots - 1)[4095]);
    EXPECT_EQ(engine.cache().memory().exact_row_bytes, engine.walk().exact_row_bytes);
    // The three pages that hold 130 tokens, no more.
    EXPECT_LE(engine.cache().memory().exact_row_bytes, size_t{2} * 192 * 4096 * 2);
    EXPECT_EQ(engine.cache().used_slots(StreamId{0}), 130);
  }
}

// C14: what an earlier owner of slots left behind is never read.
TEST(LayoutCases, C14ReusedSlotsShowNothingOfTheirFormerOwner) {
  for (const int poison : {0xAA, 0xFF}) {
    for (const char* scheme : {"exact", "k=t4,v=t4,w=1,s=4"}) {
      Engine used({.scheme = scheme, .n_slots = 64 * 64, .poison = poison});
      used.append(0, 0, 0, 64 * 64, 512);
      used.clear();
      EXPECT_EQ(used.cache().memory().exact_row_bytes, 0u);
      EXPECT_EQ(used.cache().memory().tile_bytes, 0u);
      const Outputs after = used.append(0, 1, 0, 256, 64);
      Engine fresh({.scheme = scheme, .n_slots = 64 * 64, .poison = poison});
      const Outputs alone = fresh.append(0, 1, 0, 256, 64);
      EXPECT_TRUE(test::same_bits(after.engine, alone.engine)) << scheme;
      EXPECT_EQ(test::stream_hash(used.cache(), 0), test::stream_hash(fresh.cache(), 0));
      std::vector<uint16_t> row(64, 1);
      ASSERT_TRUE(used.cache().read_rows(LayerId{0}, Side::kKey, StreamId{0}, 256, 1, row.data()).ok());
      EXPECT_EQ(row, std::vector<uint16_t>(64, 0));
      std::vector<float> slot(64);
      EXPECT_EQ(used.cache().read_slot(LayerId{0}, Side::kKey, StreamId{0}, 256, false, slot.data()).code(),
                Code::kOutOfRange);
      // A mask that shows every slot of the stream shows only what B wrote.
      std::vector<uint16_t> mask(64 * 64, 0);
      const StreamQueries query = {.stream = StreamId{0},
                                   .n_queries = 1,
                                   .n_slots = 64 * 64,
                                   .mask = mask.data(),
                                   .mask_stride = mask.size(),
                                   .own_slot = {}};
      const std::vector<int32_t> layers = {0};
      BatchPlan plan;
      ASSERT_TRUE(used.cache().plan({&query, 1}, layers, &plan).ok());
      for (int page = 0; page < 64; ++page) {
        EXPECT_EQ(plan.streams[0].visible[page], page < 4 ? ~uint64_t{0} : 0u);
      }
      used.cache().end_batch(plan);
    }
  }
}

}  // namespace
}  // namespace kvant

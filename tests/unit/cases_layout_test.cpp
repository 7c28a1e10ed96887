// Cases about where things lie: layout oracle, query groups, big offsets, reuse of slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cache/side_page.h"
#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Look;
using test::Outputs;
using test::TokenRows;

constexpr int kOracleTokens = 200;
constexpr int kOraclePrompt = 150;  // the queries of the other tokens look at one of these each

uint32_t place_hash(Side side, int layer, int head, int token, int channel) {
  const int place = (((static_cast<int>(side) * 4 + layer) * 16 + head) * 4096 + token) * 256 + channel;
  uint32_t x = static_cast<uint32_t>(place) * 2654435761u;
  x = (x ^ (x >> 15)) * 2246822519u;
  x = (x ^ (x >> 13)) * 3266489917u;
  return x ^ (x >> 16);
}

// Neighbours in every direction differ, and so do any two rows; all values are exact in binary16.
float oracle_value(Side side, int layer, int head, int token, int channel) {
  return static_cast<float>(static_cast<int>(place_hash(side, layer, head, token, channel) % 1999) - 999) /
         32.0f;
}

// Query head h of the query at position p is the key of token p % 150 of its KV head.
test::Content oracle_content() {
  return [](int layer, const LayerShape& shape, int, int pos) {
    TokenRows rows;
    const int group = shape.n_query_heads / shape.n_kv_heads;
    for (int h = 0; h < shape.n_query_heads; ++h) {
      for (int c = 0; c < shape.key_dim; ++c)
        rows.q.push_back(oracle_value(Side::kKey, layer, h / group, pos % kOraclePrompt, c));
    }
    for (int h = 0; h < shape.n_kv_heads; ++h) {
      for (int c = 0; c < shape.key_dim; ++c) rows.k.push_back(oracle_value(Side::kKey, layer, h, pos, c));
      for (int c = 0; c < shape.value_dim; ++c)
        rows.v.push_back(oracle_value(Side::kValue, layer, h, pos, c));
    }
    return rows;
  };
}

struct OracleCase {
  const char* scheme;
  int n_kv_heads, key_dim, value_dim;
  float key_loss, value_loss;  // the most that a stored channel may differ
};

class LayoutOracle : public ::testing::TestWithParam<OracleCase> {};

// By rows and by slots; `stored` is what attention reads, [token][n_kv_heads * key_dim].
void expect_oracle_rows(Engine& engine, int layer, Side side, float loss, std::vector<float>* stored) {
  const LayerShape& shape = engine.shape(layer);
  const int dim = dim_of(shape, side);
  const int width = shape.n_kv_heads * dim;
  std::vector<uint16_t> rows(static_cast<size_t>(kOracleTokens) * width);
  ASSERT_TRUE(
      engine.cache().read_rows(LayerId{layer}, side, StreamId{0}, 0, kOracleTokens, rows.data()).ok());
  stored->resize(rows.size());
  for (int t = 0; t < kOracleTokens; ++t) {
    float* slot = stored->data() + static_cast<size_t>(t) * width;
    ASSERT_TRUE(engine.cache().read_slot(LayerId{layer}, side, StreamId{0}, t, false, slot).ok());
    for (int h = 0; h < shape.n_kv_heads; ++h) {
      for (int c = 0; c < dim; ++c) {
        const float want = oracle_value(side, layer, h, t, c);
        const float got = half_to_float(rows[static_cast<size_t>(t) * width + h * dim + c]);
        ASSERT_NEAR(got, want, loss) << side_name(side) << ", layer " << layer << " head " << h << " token "
                                     << t << " channel " << c;
        ASSERT_NEAR(slot[h * dim + c], got, 0.03f);
      }
    }
  }
}

// How far the logit of the wanted key lies above that of every other, of what is stored.
double least_lead(const LayerShape& shape, const std::vector<float>& keys, int layer, int head, int token,
                  float scale) {
  const int width = shape.n_kv_heads * shape.key_dim;
  double wanted = 0;
  double other = -HUGE_VAL;
  for (int t = 0; t < kOracleTokens; ++t) {
    double logit = 0;
    for (int c = 0; c < shape.key_dim; ++c) {
      logit += static_cast<double>(oracle_value(Side::kKey, layer, head, token, c)) *
               keys[static_cast<size_t>(t) * width + head * shape.key_dim + c];
    }
    if (t == token) {
      wanted = logit;
    } else {
      other = std::max(other, logit);
    }
  }
  return scale * (wanted - other);
}

// C10: every key and value read back singly, and through attention that looks at one token only.
TEST_P(LayoutOracle, C10ReadsBackEveryKeyAndValue) {
  const OracleCase& param = GetParam();
  const LayerShape shape = {.n_query_heads = 2 * param.n_kv_heads,
                            .n_kv_heads = param.n_kv_heads,
                            .key_dim = param.key_dim,
                            .value_dim = param.value_dim};
  Engine engine({.scheme = param.scheme, .shapes = {shape, shape}, .n_slots = 256}, oracle_content());
  std::vector<Entry> first, second;
  for (int t = 0; t < kOracleTokens; ++t)
    (t < kOraclePrompt ? first : second).push_back({.pos = t, .slot = t});
  std::vector<Outputs> out;
  ASSERT_TRUE(engine.step(first, {}, &out).ok());
  const float scale = 4.0f / static_cast<float>(shape.key_dim);
  ASSERT_TRUE(engine.step(second, {.scale = scale}, &out).ok());

  for (int layer = 0; layer < 2; ++layer) {
    std::vector<float> keys, values;
    ASSERT_NO_FATAL_FAILURE(expect_oracle_rows(engine, layer, Side::kKey, param.key_loss, &keys));
    ASSERT_NO_FATAL_FAILURE(expect_oracle_rows(engine, layer, Side::kValue, param.value_loss, &values));
    for (size_t i = 0; i < second.size(); ++i) {
      const int token = second[i].pos % kOraclePrompt;
      for (int h = 0; h < shape.n_query_heads; ++h) {
        ASSERT_GT(least_lead(shape, keys, layer, h / 2, token, scale), 100.0);
        for (int c = 0; c < shape.value_dim; ++c) {
          ASSERT_NEAR(out[layer].engine[i][h * shape.value_dim + c],
                      oracle_value(Side::kValue, layer, h / 2, token, c), std::max(param.value_loss, 1e-4f))
              << "layer " << layer << " query head " << h << " token " << token << " channel " << c;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, LayoutOracle,
                         ::testing::Values(OracleCase{"exact", 8, 128, 128, 0, 0},
                                           OracleCase{"k=t8,v=t8,w=1,s=3", 8, 128, 128, 1.0f, 1.0f},
                                           OracleCase{"k=t4,v=t8,w=1,s=3", 8, 128, 128, 12.0f, 1.0f},
                                           OracleCase{"k=g8:s16,v=g8:s16,w=1,s=0", 8, 128, 128, 1.0f, 1.0f},
                                           OracleCase{"k=c8,v=c8,w=64,s=16", 3, 128, 64, 0.2f, 0.2f},
                                           OracleCase{"k=c4,v=c8,w=64,s=16", 3, 128, 64, 6.0f, 0.2f},
                                           OracleCase{"k=ct8,v=ct8,w=1,s=5", 2, 192, 80, 1.0f, 1.0f}),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// C10: two numbers below 1024, exact in binary16, name each place of the cache; every place has its own pair.
TEST(LayoutCases, C10EveryPlaceHasItsOwnNumber) {
  const LayerShape shape = {.n_query_heads = 8, .n_kv_heads = 8, .key_dim = 128, .value_dim = 128};
  const auto place = [](Side side, int layer, int head, int token, int channel) {
    return (((static_cast<int>(side) * 2 + layer) * 8 + head) * kOracleTokens + token) * 128 + channel;
  };
  constexpr int kPlaces = 2 * 2 * 8 * kOracleTokens * 128;
  static_assert(kPlaces <= 1024 * 1024);
  // Both digits: the exact scheme, and rows that stay exact in a scheme that would quantize.
  for (const char* scheme : {"exact", "k=t4,v=c4,w=200,s=0"}) {
    std::vector<int> found(kPlaces, 0);
    for (const int unit : {1, 1024}) {
      Engine engine({.scheme = scheme, .shapes = {shape, shape}, .n_slots = 256},
                    [&](int layer, const LayerShape&, int, int pos) {
                      TokenRows rows;
                      rows.q.assign(size_t{8} * 128, 0.0f);
                      for (int h = 0; h < 8; ++h) {
                        for (int c = 0; c < 128; ++c) {
                          const auto digit = [&](Side side) {
                            return static_cast<float>(place(side, layer, h, pos, c) / unit % 1024);
                          };
                          rows.k.push_back(digit(Side::kKey));
                          rows.v.push_back(digit(Side::kValue));
                        }
                      }
                      return rows;
                    });
      engine.append(0, 0, 0, kOracleTokens, 50, {.seal_only = true});
      std::vector<float> row(size_t{8} * 128);
      for (int i = 0; i < kPlaces; ++i) {
        const int token = i / 128 % kOracleTokens, head = i / (128 * kOracleTokens) % 8;
        const int layer = i / (128 * kOracleTokens * 8) % 2;
        const Side side = i / (128 * kOracleTokens * 16) == 0 ? Side::kKey : Side::kValue;
        if (i % 128 == 0) {
          ASSERT_TRUE(
              engine.cache().read_slot(LayerId{layer}, side, StreamId{0}, token, false, row.data()).ok());
        }
        found[i] += unit * static_cast<int>(row[static_cast<size_t>(head) * 128 + i % 128]);
      }
    }
    for (int i = 0; i < kPlaces; ++i) ASSERT_EQ(found[i], i) << scheme;
  }
}

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

// C13: the functions that say where things lie, with sums and products past 2^31 and 2^32.
TEST(LayoutCases, C13AddressesPast32Bits) {
  constexpr int64_t k32 = int64_t{1} << 32;
  const SlotPlace first = place_of(0, 1000);
  EXPECT_EQ(first.stream, 0);
  EXPECT_EQ(first.page, 0);
  EXPECT_EQ(first.t, 0);
  for (const int64_t slot : {(int64_t{1} << 31) - 1, int64_t{1} << 31, k32 + 77, 40 * k32 + 12345}) {
    const int n_pages = 1 << 21;
    const SlotPlace place = place_of(slot, n_pages);
    EXPECT_LT(place.page, n_pages);
    EXPECT_LT(place.t, kPageTokens);
    EXPECT_EQ((static_cast<int64_t>(place.stream) * n_pages + place.page) * kPageTokens + place.t, slot);
  }
  // 100 layers of 512 streams of 2^20 pages: the last page's place, and a stride of one in every direction.
  const int n_streams = 512, n_pages = 1 << 20;
  const auto index = [&](int layer, int stream, int page, Side side) {
    return side_page_index(layer, stream, page, side, n_streams, n_pages);
  };
  EXPECT_EQ(index(99, 511, n_pages - 1, Side::kValue), size_t{100} * 512 * (1 << 20) * 2 - 1);
  EXPECT_EQ(index(99, 511, n_pages - 1, Side::kKey) + 1, index(99, 511, n_pages - 1, Side::kValue));
  EXPECT_EQ(index(99, 510, n_pages - 1, Side::kValue) + 1, index(99, 511, 0, Side::kKey));
  EXPECT_EQ(index(98, 511, n_pages - 1, Side::kValue) + 1, index(99, 0, 0, Side::kKey));
  // Words of a row: 2^17 heads of 64 rows of 256 channels are 2^31 words, 2^32 bytes.
  EXPECT_EQ(row_index(1 << 17, 0, kPageTokens, 256), size_t{1} << 31);
  EXPECT_EQ(row_index((1 << 20) - 1, 63, kPageTokens, 256), (size_t{1} << 34) - 256);
  EXPECT_EQ(row_index(3, 5, 17, 80), size_t{(3 * 17 + 5) * 80});
  const LayerShape wide = {.n_query_heads = 1 << 17, .n_kv_heads = 1 << 17, .key_dim = 256, .value_dim = 128};
  EXPECT_EQ(row_page_bytes(wide, Side::kKey), size_t{1} << 32);
  EXPECT_EQ(row_page_bytes(wide, Side::kValue), size_t{1} << 31);
  EXPECT_EQ(kept_bytes(wide, Side::kKey, 64), size_t{1} << 32);
}

// C13: the most slots that a stream can have, and one more.
TEST(LayoutCases, C13MostSlotsOfAStream) {
  EXPECT_EQ(kMaxSlots, std::numeric_limits<int32_t>::max() - 63);
  EXPECT_EQ(pages_for(std::numeric_limits<int32_t>::max()), 1 << 25);
  EXPECT_EQ(pages_for(kMaxSlots), (1 << 25) - 1);
  EXPECT_EQ(pages_for(65), 2);
  Result<LayerScheme> layer = resolve_layer(parse_scheme("k=t4,v=t4").value(), {2, 1, 64, 64});
  ASSERT_TRUE(layer.ok());
  const SlotCache::Options most = {
      .layers = {layer.value()}, .n_slots = kMaxSlots, .memory = {.limit_bytes = size_t{1} << 20}};
  EXPECT_EQ(SlotCache::create(most).status().code(), Code::kPoolExhausted);
  const MemoryReport planned = plan_memory(most, kMaxSlots);
  EXPECT_GT(planned.table_bytes, size_t{12} * kMaxSlots);
  EXPECT_GT(planned.tile_bytes, size_t{2 * 32} * (kMaxSlots - 256));
  SlotCache::Options more = most;
  more.n_slots = kMaxSlots + 1;
  const Status refused = SlotCache::create(more).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_NE(refused.message().find(std::to_string(kMaxSlots)), std::string::npos) << refused.message();

  Engine engine({.n_slots = 128});
  std::vector<uint16_t> rows(64);
  for (const auto& [slot, count] : {std::pair{1, std::numeric_limits<int32_t>::max()},
                                    {std::numeric_limits<int32_t>::max(), 1},
                                    {129, 0}}) {
    EXPECT_EQ(engine.cache().read_rows(LayerId{0}, Side::kKey, StreamId{0}, slot, count, rows.data()).code(),
              Code::kOutOfRange);
    EXPECT_EQ(engine.cache().write_rows(LayerId{0}, Side::kKey, StreamId{0}, slot, count, rows.data()).code(),
              Code::kOutOfRange);
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

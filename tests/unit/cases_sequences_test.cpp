// Cases about several sequences and about how work is cut: the same bits whatever runs beside a sequence.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::EngineOptions;
using test::Entry;
using test::Look;
using test::Outputs;

constexpr const char* kSchemes[] = {"exact", "k=t4,v=t4,w=64,s=3", "k=c4,v=g3,w=1,s=0",
                                    "k=t5-3,v=ct4,w=128,s=16"};
// Here the widths of keys differ from head to head.
constexpr const char* kWidthsPerHead = "k=t6-4-3-3,v=t4,w=64,s=3";

// C30: four sequences appended round-robin: alone, batched, copied to a fresh stream.
TEST(SequenceCases, C30InterleavedSequences) {
  for (const char* scheme : kSchemes) {
    for (const std::vector<int>& lengths :
         {std::vector<int>{5, 17, 33, 64}, std::vector<int>{70, 130, 200, 257}}) {
      const EngineOptions options = {
          .scheme = scheme, .shapes = {{4, 2, 64, 64}}, .n_slots = 320, .n_streams = 5, .threads = 2};
      Engine together(options);
      std::vector<std::vector<std::vector<float>>> batched(4);
      for (int t = 0; t < lengths.back(); ++t) {
        std::vector<Entry> entries;
        for (int seq = 0; seq < 4; ++seq) {
          if (t < lengths[seq]) entries.push_back({.stream = seq, .seq = seq, .pos = t, .slot = t});
        }
        std::vector<Outputs> out;
        ASSERT_TRUE(together.step(entries, {}, &out).ok());
        for (size_t i = 0; i < entries.size(); ++i) batched[entries[i].seq].push_back(out[0].engine[i]);
      }
      for (int seq = 0; seq < 4; ++seq) {
        const std::string what = std::string(scheme) + " length " + std::to_string(lengths[seq]);
        Engine alone({.scheme = scheme, .shapes = {{4, 2, 64, 64}}, .n_slots = 320, .poison = 0xFF});
        const Outputs single = alone.append(0, seq, 0, lengths[seq], 1);
        EXPECT_TRUE(test::same_bits(batched[seq], single.engine)) << what;
        EXPECT_EQ(test::stream_hash(together.cache(), seq), test::stream_hash(alone.cache(), 0)) << what;
        together.copy_stream(seq, 4);
        const Entry last = {.stream = seq, .seq = seq, .pos = lengths[seq] - 1, .slot = lengths[seq] - 1};
        Entry copied = last;
        copied.stream = 4;
        EXPECT_TRUE(test::same_bits(together.attend({copied}, {}).engine, together.attend({last}, {}).engine))
            << what;
        // The copy goes on like its source would.
        const Outputs next = together.append(4, seq, lengths[seq], 40, 40);
        EXPECT_TRUE(test::same_bits(next.engine, alone.append(0, seq, lengths[seq], 40, 1).engine)) << what;
      }
    }
  }
}

// C56: one sequence of 200 (700) tokens, whatever else goes on.
class Invariance : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  EngineOptions options(int streams, int threads) const {
    return {.scheme = std::get<0>(GetParam()),
            .shapes = {{6, 2, 64, 80}},
            .n_slots = 704,
            .n_streams = streams,
            .threads = threads,
            .poison = threads % 2 != 0 ? 0xAA : 0xFF,
            .adjust = std::get<0>(GetParam()) == kWidthsPerHead ? test::vary_key_widths : nullptr};
  }
  int tokens() const { return std::get<1>(GetParam()); }
  std::vector<std::vector<float>> alone() const {
    Engine engine(options(1, 1));
    return engine.append(0, 3, 0, tokens(), 1).engine;
  }
};

TEST_P(Invariance, C56ChunksAndThreads) {
  const auto want = alone();
  for (const int threads : {1, 2, 4}) {
    for (const int chunk : {1, 7, 64, 200}) {
      Engine engine(options(1, threads));
      EXPECT_TRUE(test::same_bits(engine.append(0, 3, 0, tokens(), chunk).engine, want))
          << "threads " << threads << " chunk " << chunk;
    }
  }
}

TEST_P(Invariance, C56InABatchOfEight) {
  const auto want = alone();
  for (const int threads : {1, 4}) {
    Engine engine(options(8, threads));
    std::vector<std::vector<float>> got;
    // Sequence 3 in stream 5; the others are ahead of it by different lengths.
    for (int stream = 0; stream < 8; ++stream) {
      if (stream != 5) engine.append(stream, stream + 10, 0, 1 + 37 * stream % 150, 64);
    }
    for (int t = 0; t < tokens(); t += 20) {
      std::vector<Entry> entries;
      for (int stream = 0; stream < 8; ++stream) {
        const int at = stream == 5 ? t : 1 + 37 * stream % 150 + t / 20;
        for (int i = 0; i < (stream == 5 ? 20 : 1) && at + i < (stream == 5 ? tokens() : 704); ++i) {
          entries.push_back(
              {.stream = stream, .seq = stream == 5 ? 3 : stream + 10, .pos = at + i, .slot = at + i});
        }
      }
      std::vector<Outputs> out;
      ASSERT_TRUE(engine.step(entries, {}, &out).ok());
      for (size_t i = 0; i < entries.size(); ++i) {
        if (entries[i].stream == 5) got.push_back(out[0].engine[i]);
      }
    }
    EXPECT_TRUE(test::same_bits(got, want)) << "threads " << threads;
  }
}

TEST_P(Invariance, C56AfterOtherTraffic) {
  const auto want = alone();
  Engine engine(options(3, 2));
  engine.append(0, 1, 0, 500, 100);
  engine.append(1, 2, 0, 333, 50);
  engine.clear();
  engine.append(2, 8, 0, 150, 30);
  EXPECT_TRUE(test::same_bits(engine.append(0, 3, 0, tokens(), 50).engine, want));
  // Warm: the first 100 tokens come from a copy of another stream.
  Engine warm(options(2, 2));
  warm.append(0, 3, 0, 100, 100);
  warm.copy_stream(0, 1);
  const auto rest = warm.append(1, 3, 100, tokens() - 100, 40).engine;
  EXPECT_TRUE(test::same_bits(rest, {want.begin() + 100, want.end()}));
}

INSTANTIATE_TEST_SUITE_P(Schemes, Invariance,
                         ::testing::Combine(::testing::ValuesIn(kSchemes), ::testing::Values(200, 700)),
                         [](const auto& info) { return "case" + std::to_string(info.index); });
INSTANTIATE_TEST_SUITE_P(WidthsPerHead, Invariance, ::testing::Values(std::tuple(kWidthsPerHead, 700)));

// A stream that three sequences share, their tokens interleaved: each has its own window.
TEST(UnifiedStream, WindowsArePerSequence) {
  for (const char* scheme : {"k=t4,v=t4,w=40,s=3", "k=c4,v=g4,w=100,s=8", "k=t4,v=c4,w=1,s=0"}) {
    const int window = scheme[10] == '4' ? 40 : scheme[10] == '1' && scheme[11] == '0' ? 100 : 1;
    Engine engine({.scheme = scheme, .shapes = {{4, 2, 64, 64}}, .n_slots = 704, .threads = 2});
    int next_slot = 0;
    int length[3] = {0, 0, 0};
    std::vector<std::vector<int>> slots(3);
    // Sequence 0 pauses from step 30 to 60, sequence 2 starts at step 20; chunks of 3, 1 and 4 tokens.
    for (int step = 0; step < 80; ++step) {
      std::vector<Entry> entries;
      for (int seq = 0; seq < 3; ++seq) {
        if ((seq == 0 && step >= 30 && step < 60) || (seq == 2 && step < 20)) continue;
        for (int i = 0; i < (seq == 0 ? 3 : seq == 1 ? 1 : 4); ++i) {
          slots[seq].push_back(next_slot);
          entries.push_back({.seq = seq, .pos = length[seq]++, .slot = next_slot++});
        }
      }
      std::vector<Outputs> out;
      ASSERT_TRUE(
          engine.step(entries, {.path = AttentionPath::kDequantize, .dqref = true, .ref = true}, &out).ok());
      ASSERT_LT(test::relative_error(out[0].engine, out[0].dqref), 1e-5) << scheme << " step " << step;
      ASSERT_LT(test::relative_error(out[0].engine, out[0].ref), 0.3) << scheme << " step " << step;
      std::vector<float> row(128);
      for (int seq = 0; seq < 3; ++seq) {
        const bool active = !((seq == 0 && step >= 30 && step < 60) || (seq == 2 && step < 20));
        if (!active) continue;
        for (size_t k = slots[seq].size() > static_cast<size_t>(window) ? slots[seq].size() - window : 0;
             k < slots[seq].size(); ++k) {
          const int slot = slots[seq][k];
          const SidePage& page = engine.cache().side_page(LayerId{0}, StreamId{0}, slot / 64, Side::kValue);
          ASSERT_TRUE(((page.row_mask >> (slot % 64)) & 1) != 0)
              << scheme << " seq " << seq << " slot " << slot;
          ASSERT_TRUE(
              engine.cache().read_slot(LayerId{0}, Side::kValue, StreamId{0}, slot, false, row.data()).ok());
          ASSERT_TRUE(test::same_bits(row, engine.original(0, Side::kValue, 0, slot)));
        }
      }
    }
    EXPECT_GT(engine.cache().sealed_tiles(), 0u) << scheme;
    // The paused sequence came back to its own window exact although others wrote hundreds of tokens
    // meanwhile.
    EXPECT_EQ(engine.cache().used_slots(StreamId{0}), next_slot);
  }
}

}  // namespace
}  // namespace kvant

// Test models are written, read back, planned.
#include "kvant/model_shape.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "kvant/test_model.h"

namespace kvant::eval {
namespace {

class TestModel : public testing::Test {
 protected:
  std::string path(const std::string& name) {
    paths_.push_back(testing::TempDir() + "kvant-" + std::to_string(getpid()) + "-" + name);
    return paths_.back();
  }
  void TearDown() override {
    for (const std::string& p : paths_) std::remove(p.c_str());
  }
  std::vector<std::string> paths_;
};

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(TestModel, ShapeIsReadBack) {
  TestModelOptions o{.kind = TestModelKind::kShapes,
                     .path = path("shapes.gguf"),
                     .layers = 3,
                     .heads = 6,
                     .kv_heads = 2,
                     .head_dim = 80};
  ASSERT_TRUE(write_test_model(o).ok());
  const Result<ModelShape> shape = read_model_shape(o.path);
  ASSERT_TRUE(shape.ok()) << shape.status().message();
  EXPECT_EQ(shape.value().architecture, "llama");
  EXPECT_EQ(shape.value().train_context, 32768);
  ASSERT_EQ(shape.value().layers.size(), 3U);
  for (const ShapeLayer& layer : shape.value().layers) {
    EXPECT_EQ(layer.shape.n_query_heads, 6);
    EXPECT_EQ(layer.shape.n_kv_heads, 2);
    EXPECT_EQ(layer.shape.key_dim, 80);
    EXPECT_EQ(layer.shape.value_dim, 80);
    EXPECT_FALSE(layer.windowed);
  }
}

TEST_F(TestModel, SlidingWindows) {
  TestModelOptions o{.kind = TestModelKind::kShapes,
                     .path = path("windows.gguf"),
                     .layers = 7,
                     .heads = 2,
                     .kv_heads = 1,
                     .sliding_window = 512};
  ASSERT_TRUE(write_test_model(o).ok());
  const Result<ModelShape> shape = read_model_shape(o.path);
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape.value().sliding_window, 512);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(shape.value().layers[i].windowed, i != 5) << i;
  // At 100,000 tokens only the one full layer has grown beyond 1,024 slots.
  const Result<Plan> plan = plan_model(shape.value(), {.scheme = "exact", .context = 100000});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan.value().f16_bytes, (100000U + 6U * 1024U) * 2 * 64 * 2);
}

// What programs were seen to hold: rows of the newest 128 tokens lie in up to three pages, the third one
// beside its tile; sinks are overwritten. A window of 128 or less is never seen beyond the exact one.
TEST_F(TestModel, SlidingWindowsThatHaveGoneRound) {
  const auto memory = [](int sliding_window, int context) {
    ModelShape shape;
    shape.sliding_window = sliding_window;
    shape.layers = {
        {.shape = {.n_query_heads = 2, .n_kv_heads = 1, .key_dim = 64, .value_dim = 64}, .windowed = true}};
    const Result<Plan> plan = plan_model(shape, {.scheme = "k=t4,v=t4,w=128,s=16", .context = context});
    EXPECT_TRUE(plan.ok());
    return plan.value().memory;
  };
  const size_t page = 2U * 64 * 64 * 2, tile = 64 * 64 / 2 + 64;
  const auto tiles = [&](int pages) { return static_cast<size_t>(pages) * 2 * tile; };
  EXPECT_EQ(memory(512, 1024).exact_row_bytes, 2 * page + 2U * 16 * 64 * 2);
  EXPECT_EQ(memory(512, 1024).tile_bytes, tiles(14));
  EXPECT_EQ(memory(512, 4096).exact_row_bytes, 3 * page);
  EXPECT_EQ(memory(512, 4096).tile_bytes, tiles(14));
  EXPECT_EQ(memory(128, 4096).exact_row_bytes, 12 * page);
  EXPECT_EQ(memory(128, 4096).tile_bytes, 0U);
  EXPECT_EQ(memory(128, 300).exact_row_bytes, 5 * page);
  EXPECT_EQ(memory(512, 4096).workspace_bytes, memory(512, 1024).workspace_bytes);
}

TEST_F(TestModel, TheSameSeedGivesTheSameFile) {
  TestModelOptions o{.path = path("a.gguf")};
  ASSERT_TRUE(write_test_model(o).ok());
  const std::string first = bytes_of(o.path);
  o.path = path("b.gguf");
  ASSERT_TRUE(write_test_model(o).ok());
  EXPECT_EQ(first, bytes_of(o.path));
  o.path = path("c.gguf");
  o.seed = 2;
  ASSERT_TRUE(write_test_model(o).ok());
  EXPECT_NE(first, bytes_of(o.path));
}

TEST_F(TestModel, RefusesWhatCannotBe) {
  EXPECT_EQ(write_test_model({.path = path("d.gguf"), .heads = 4, .kv_heads = 3}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(write_test_model({.path = path("e.gguf"), .head_dim = 33}).code(), Code::kInvalidArgument);
  EXPECT_EQ(write_test_model({.path = "/nowhere/f.gguf"}).code(), Code::kIo);
}

TEST_F(TestModel, FilesThatAreNoModels) {
  EXPECT_EQ(read_model_shape("/nowhere/m.gguf").status().code(), Code::kIo);
  const std::string text = path("text.gguf");
  std::ofstream(text) << "not a model at all";
  EXPECT_EQ(read_model_shape(text).status().code(), Code::kIo);
}

TEST(Plan, SlotsAreLlamaCpps) {
  EXPECT_EQ(full_slots(1), 256);
  EXPECT_EQ(full_slots(4096), 4096);
  EXPECT_EQ(full_slots(4097), 4352);
  EXPECT_EQ(windowed_slots(32768, 512), 1024);
  EXPECT_EQ(windowed_slots(300, 512), 512);
}

TEST(Plan, SumsPartsAndBits) {
  ModelShape shape;
  shape.layers.assign(4, {.shape = {.n_query_heads = 4, .n_kv_heads = 2, .key_dim = 64, .value_dim = 64}});
  const Result<Plan> exact = plan_model(shape, {.scheme = "exact", .context = 1024, .sequences = 3});
  ASSERT_TRUE(exact.ok());
  EXPECT_EQ(exact.value().f16_bytes, 3U * 1024 * 4 * 2 * 128 * 2);
  EXPECT_EQ(exact.value().memory.exact_row_bytes, exact.value().f16_bytes);
  EXPECT_EQ(exact.value().memory.tile_bytes, 0U);
  EXPECT_EQ(exact.value().bits, 16);
  const Result<Plan> packed = plan_model(shape, {.scheme = "k=c4,v=t4", .context = 1024, .sequences = 3});
  ASSERT_TRUE(packed.ok());
  EXPECT_LT(packed.value().memory.total(), exact.value().memory.total());
  EXPECT_DOUBLE_EQ(packed.value().bits, (packed.value().bits_k + packed.value().bits_v) / 2);
  EXPECT_FALSE(plan_model(shape, {.scheme = "kv99"}).ok());
}

}  // namespace
}  // namespace kvant::eval

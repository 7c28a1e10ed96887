// Small graphs computed by the KVANT device and by ggml's CPU backend: every attention parameter that a node
// can carry, masks that are inputs or computed, layers that stay ggml's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "kvant/ggml_backend.h"
#include "support/format_data.h"

namespace kvant::ggml {
namespace {

constexpr int kSlots = 256;

struct GraphCase {
  int key_dim = 64;
  int value_dim = 64;
  int heads = 4;
  int kv_heads = 2;
  int streams = 1;
  int tokens = 5;
  float soft_cap = 0;
  float max_bias = 0;
  bool sinks = false;
  bool computed_mask = false;
  bool values_in_keys = false;  // latent attention: V is a view of K
};

struct Free {
  void operator()(ggml_context* p) const { ggml_free(p); }
  void operator()(ggml_backend* p) const { ggml_backend_free(p); }
  void operator()(ggml_backend_buffer* p) const { ggml_backend_buffer_free(p); }
};

std::unique_ptr<ggml_context, Free> make_context() {
  return std::unique_ptr<ggml_context, Free>(
      ggml_init({.mem_size = size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true}));
}

void fill(ggml_tensor* tensor, uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> values(ggml_nelements(tensor));
  for (float& v : values) v = random.normal();
  ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
}

// A causal mask over the first slots; with max_bias, minus the distance.
void fill_mask(ggml_tensor* mask, const GraphCase& c) {
  std::vector<float> values(ggml_nelements(mask));
  for (size_t i = 0; i < values.size(); ++i) {
    const int slot = static_cast<int>(i % kSlots), token = static_cast<int>(i / kSlots) % c.tokens;
    values[i] = slot > token ? -INFINITY : c.max_bias > 0 ? static_cast<float>(slot - token) : 0.0f;
  }
  if (mask->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(mask, values.data(), 0, ggml_nbytes(mask));
    return;
  }
  std::vector<ggml_fp16_t> halves(values.size());
  ggml_fp32_to_fp16_row(values.data(), halves.data(), static_cast<int64_t>(values.size()));
  ggml_backend_tensor_set(mask, halves.data(), 0, ggml_nbytes(mask));
}

ggml_tensor* cache_view(ggml_context* ctx, ggml_tensor* base, int dim, int heads) {
  ggml_tensor* view = ggml_view_4d(ctx, base, dim, heads, kSlots, base->ne[2], sizeof(uint16_t) * dim,
                                   base->nb[1], base->nb[2], 0);
  return ggml_permute(ctx, view, 0, 2, 1, 3);
}

// Writes c.tokens tokens per stream and attends over them; empty when the device refused.
std::vector<float> attend(ggml_backend_t backend, const GraphCase& c) {
  auto cache_ctx = make_context(), ctx = make_context();
  const int rows = c.tokens * c.streams;
  ggml_tensor* k =
      ggml_new_tensor_3d(cache_ctx.get(), GGML_TYPE_F16, c.key_dim * c.kv_heads, kSlots, c.streams);
  ggml_set_name(k, "cache_k_l3");
  ggml_tensor* v = nullptr;
  if (!c.values_in_keys) {
    v = ggml_new_tensor_3d(cache_ctx.get(), GGML_TYPE_F16, c.value_dim * c.kv_heads, kSlots, c.streams);
    ggml_set_name(v, "cache_v_l3");
  }
  std::unique_ptr<ggml_backend_buffer, Free> cache(ggml_backend_alloc_ctx_tensors(cache_ctx.get(), backend));
  ggml_backend_buffer_clear(cache.get(), 0);

  ggml_tensor* new_k = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k->ne[0], rows);
  ggml_tensor* new_v = v != nullptr ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, v->ne[0], rows) : nullptr;
  ggml_tensor* q = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, c.key_dim, c.heads, c.tokens, c.streams);
  ggml_tensor* indices = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, rows);
  ggml_tensor* mask = ggml_new_tensor_4d(ctx.get(), c.computed_mask ? GGML_TYPE_F32 : GGML_TYPE_F16, kSlots,
                                         c.tokens, 1, c.streams);
  ggml_tensor* sinks = c.sinks ? ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, c.heads) : nullptr;
  auto store = [&](ggml_tensor* base, ggml_tensor* values) {
    ggml_tensor* flat =
        ggml_reshape_2d(ctx.get(), base, base->ne[0], static_cast<int64_t>(kSlots) * c.streams);
    return ggml_set_rows(ctx.get(), flat, values, indices);
  };
  ggml_cgraph* graph = ggml_new_graph(ctx.get());
  ggml_build_forward_expand(graph, store(k, new_k));
  if (v != nullptr) ggml_build_forward_expand(graph, store(v, new_v));
  ggml_tensor* used_mask = c.computed_mask ? ggml_cast(ctx.get(), mask, GGML_TYPE_F16) : mask;
  ggml_tensor* values =
      cache_view(ctx.get(), v != nullptr ? v : k, c.value_dim, v != nullptr ? c.kv_heads : 1);
  ggml_tensor* out = ggml_flash_attn_ext(ctx.get(), ggml_permute(ctx.get(), q, 0, 2, 1, 3),
                                         cache_view(ctx.get(), k, c.key_dim, c.kv_heads), values, used_mask,
                                         0.125f, c.max_bias, c.soft_cap);
  ggml_flash_attn_ext_add_sinks(out, sinks);
  out = ggml_scale(ctx.get(), out, 2.0f);  // a node of ggml's that reads what ours wrote
  ggml_build_forward_expand(graph, out);

  std::unique_ptr<ggml_backend_buffer, Free> buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
  fill(new_k, 1);
  if (new_v != nullptr) fill(new_v, 2);
  fill(q, 3);
  if (sinks != nullptr) fill(sinks, 4);
  fill_mask(mask, c);
  std::vector<int64_t> slots;
  for (int s = 0; s < c.streams; ++s) {
    for (int t = 0; t < c.tokens; ++t) slots.push_back(static_cast<int64_t>(s) * kSlots + t);
  }
  ggml_backend_tensor_set(indices, slots.data(), 0, ggml_nbytes(indices));
  if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) return {};
  std::vector<float> result(ggml_nelements(out));
  ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
  return result;
}

class Graphs : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ggml_backend_load_all_from_path(KVANT_LLAMA_BIN_DIR);
    ggml_backend_register(backend_reg());
  }
  void SetUp() override {
    ASSERT_TRUE(configure({.scheme = "exact", .quiet = true}).ok());
    kvant_.reset(ggml_backend_init_by_name("KVANT", nullptr));
    cpu_.reset(ggml_backend_init_by_name("CPU", nullptr));
    ASSERT_NE(kvant_, nullptr);
    ASSERT_NE(cpu_, nullptr);
  }
  // ggml rounds queries to 16 bits and adds values up in 16 bits.
  void expect_close(const GraphCase& c, float tolerance = 0.02f) {
    const std::vector<float> want = attend(cpu_.get(), c), have = attend(kvant_.get(), c);
    ASSERT_EQ(want.size(), have.size());
    float worst = 0, largest = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      worst = std::max(worst, std::fabs(want[i] - have[i]));
      largest = std::max(largest, std::fabs(want[i]));
    }
    EXPECT_LE(worst, tolerance);
    EXPECT_GT(largest, 0.5f);
  }
  std::unique_ptr<ggml_backend, Free> kvant_, cpu_;
};

TEST_F(Graphs, PlainAttention) { expect_close({}); }
TEST_F(Graphs, OneToken) { expect_close({.tokens = 1}); }
TEST_F(Graphs, KeyAndValueSizesDiffer) { expect_close({.key_dim = 96, .value_dim = 64}); }
TEST_F(Graphs, HeadSize256OneKvHead) { expect_close({.key_dim = 256, .value_dim = 256, .kv_heads = 1}); }
TEST_F(Graphs, ManyTokens) { expect_close({.tokens = 150}); }
TEST_F(Graphs, SeveralStreams) { expect_close({.streams = 3}); }
TEST_F(Graphs, SoftCap) { expect_close({.soft_cap = 0.7f}); }
TEST_F(Graphs, Alibi) { expect_close({.tokens = 9, .max_bias = 8.0f}); }
TEST_F(Graphs, AlibiWithHeadsThatAreNoPowerOfTwo) {
  expect_close({.heads = 6, .tokens = 9, .max_bias = 8.0f});
}
TEST_F(Graphs, LearnedSinks) { expect_close({.sinks = true}); }
TEST_F(Graphs, MaskComputedByTheGraph) { expect_close({.tokens = 40, .computed_mask = true}); }

// These parameters change the result: the comparisons above would not notice if both sides ignored them.
TEST_F(Graphs, ParametersMatter) {
  const std::vector<float> plain = attend(kvant_.get(), {.tokens = 9});
  EXPECT_NE(plain, attend(kvant_.get(), {.tokens = 9, .soft_cap = 0.7f}));
  EXPECT_NE(plain, attend(kvant_.get(), {.tokens = 9, .max_bias = 8.0f}));
  EXPECT_NE(plain, attend(kvant_.get(), {.tokens = 9, .sinks = true}));
  EXPECT_EQ(plain, attend(kvant_.get(), {.tokens = 9, .computed_mask = true}));
}

TEST_F(Graphs, LayersThatKvantCannotHoldStayGgmls) {
  for (const GraphCase& c :
       {GraphCase{.key_dim = 24, .value_dim = 24},
        GraphCase{.key_dim = 192, .value_dim = 128, .kv_heads = 1, .values_in_keys = true}}) {
    const std::vector<float> want = attend(cpu_.get(), c);
    EXPECT_FALSE(want.empty());
    EXPECT_EQ(attend(kvant_.get(), c), want);
    ASSERT_TRUE(configure({.scheme = "exact"}).ok());
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(attend(kvant_.get(), c), want);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("1 layers run differently than asked for"), std::string::npos) << said;
    ASSERT_TRUE(configure({.scheme = "exact", .strict = true, .quiet = true}).ok());
    EXPECT_TRUE(attend(kvant_.get(), c).empty());
    ASSERT_TRUE(configure({.scheme = "exact", .quiet = true}).ok());
  }
}

}  // namespace
}  // namespace kvant::ggml

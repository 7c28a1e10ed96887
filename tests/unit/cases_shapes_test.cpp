// C11: every registered format in every head size, on both sides, key and value heads of different size:
// right, or refused when the layer is resolved, with the smallest head and the nearest format that work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Outputs;

constexpr int kHeadDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256};
constexpr int kTail = 33;  // tokens of the page that is never sealed

std::string quoted_after(const std::string& text, const std::string& label) {
  const size_t at = text.find(label + "'");
  if (at == std::string::npos) return "";
  const size_t first = at + label.size() + 1;
  return text.substr(first, text.find('\'', first) - first);
}

// The format itself where it fits; else, after a look at what the refusal names, its alternative.
std::string fitting_format(const std::string& name, Side side, const LayerShape& shape) {
  const int dim = dim_of(shape, side);
  if (Format::parse(name, side, dim).ok()) return name;
  Scheme scheme = parse_scheme("exact").value();
  (side == Side::kKey ? scheme.key_format : scheme.value_format) = name;
  const Result<LayerScheme> layer = resolve_layer(scheme, shape);
  EXPECT_FALSE(layer.ok());
  EXPECT_EQ(layer.status().code(), Code::kUnsupported);
  const std::string& message = layer.status().message();
  int smallest = 0;
  for (int d = kMinHeadDim; d <= kMaxHeadDim && smallest == 0; d += 8) {
    if (Format::parse(name, side, d).ok()) smallest = d;
  }
  EXPECT_GT(smallest, dim) << name;
  EXPECT_NE(message.find("the smallest that they fit has " + std::to_string(smallest) + ";"),
            std::string::npos)
      << message;
  const std::string nearest = quoted_after(message, "nearest: ");
  EXPECT_TRUE(Format::parse(nearest, side, dim).ok()) << message;
  return nearest;
}

class EveryFormat : public ::testing::TestWithParam<std::string> {};

void expect_right(const LayerShape& shape, int poison) {
  const std::string& name = EveryFormat::GetParam();
  const std::string scheme = "k=" + fitting_format(name, Side::kKey, shape) +
                             ",v=" + fitting_format(name, Side::kValue, shape) + ",w=1,s=3";
  const std::string what =
      scheme + " D=" + std::to_string(shape.key_dim) + "/" + std::to_string(shape.value_dim);
  Engine engine({.scheme = scheme, .shapes = {shape}, .n_slots = 128, .poison = poison});
  // T = 33: nothing is sealed.
  const Outputs open = engine.append(0, 0, 0, kTail, kTail, {.dqref = true, .ref = true});
  EXPECT_LT(test::relative_error(open.engine, open.dqref), 1e-5) << what;
  EXPECT_LT(test::relative_error(open.engine, open.ref), 1e-5) << what;
  // A page and a tail of 33: the page is read from its tiles.
  engine.append(0, 0, kTail, kPageTokens - 8, kPageTokens, {.seal_only = true});
  const Outputs fused = engine.append(0, 0, kTail + kPageTokens - 8, 8, 8, {.dqref = true});
  const HeadScheme& head = engine.cache().layer(LayerId{0}).heads[0];
  for (const Side side : {Side::kKey, Side::kValue}) {
    EXPECT_EQ(engine.cache().side_page(LayerId{0}, StreamId{0}, 0, side).tile_mask,
              format_of(head, side).exact() ? 0 : ~uint64_t{0})
        << what;
  }
  EXPECT_LT(test::relative_error(fused.engine, fused.dqref),
            test::engine_tolerance(engine.cache(), 0, AttentionPath::kFused))
      << what;
  std::vector<Entry> newest;
  for (int t = kTail + kPageTokens - 8; t < kTail + kPageTokens; ++t) newest.push_back({.pos = t, .slot = t});
  const Outputs plain = engine.attend(newest, {.path = AttentionPath::kDequantize});
  EXPECT_LT(test::relative_error(plain.engine, fused.dqref), 1e-5) << what;
}

TEST_P(EveryFormat, C11IsRightOrRefusedForEveryHeadSize) {
  constexpr int kCount = std::size(kHeadDims);
  for (int i = 0; i < kCount; ++i) {
    // Every head size once as keys and once as values.
    const LayerShape shape = {.n_query_heads = 2,
                              .n_kv_heads = 1,
                              .key_dim = kHeadDims[i],
                              .value_dim = kHeadDims[(i + 3) % kCount]};
    expect_right(shape, i % 2 == 0 ? 0xAA : 0xFF);
    if (HasFailure()) return;
  }
}

// Sizes that no format has.
TEST_P(EveryFormat, C11OtherHeadSizesAreRefused) {
  for (const auto& [dim, nearest] : {std::pair{24, 32}, {36, 40}, {66, 64}, {264, 256}}) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const LayerShape shape = {.n_query_heads = 2,
                                .n_kv_heads = 1,
                                .key_dim = side == Side::kKey ? dim : 64,
                                .value_dim = side == Side::kKey ? 64 : dim};
      const Result<Scheme> scheme = parse_scheme("k=" + GetParam() + ",v=" + GetParam());
      ASSERT_TRUE(scheme.ok());
      const Result<LayerScheme> layer = resolve_layer(scheme.value(), shape);
      ASSERT_FALSE(layer.ok()) << dim;
      EXPECT_EQ(layer.status().code(), Code::kUnsupported);
      EXPECT_TRUE(layer.status().message().ends_with("nearest is " + std::to_string(nearest)))
          << layer.status().message();
    }
  }
}

std::string test_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(format_names()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace kvant

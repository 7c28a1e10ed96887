// Random shapes, formats, masks and cuts: the engine against DQREF, and the same bits for other threads.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "support/harness.h"

namespace kvant {
namespace {

using test::Engine;
using test::Entry;
using test::Look;
using test::Outputs;

std::string any_format(Side side, int dim) {
  static const std::vector<std::string> names = format_names();
  const std::string name = *rc::gen::elementOf(names);
  return Format::parse(name, side, dim).ok() ? name : "t4";
}

LayerShape any_shape() {
  LayerShape shape;
  shape.n_kv_heads = *rc::gen::inRange(1, 4);
  shape.n_query_heads = shape.n_kv_heads * *rc::gen::inRange(1, 9);
  shape.key_dim = 8 * *rc::gen::inRange(4, 33);
  shape.value_dim = *rc::gen::arbitrary<bool>() ? shape.key_dim : 8 * *rc::gen::inRange(4, 33);
  return shape;
}

Look any_look(int n_query_heads) {
  Look look;
  if (*rc::gen::inRange(0, 4) == 0) look.soft_cap = static_cast<float>(*rc::gen::inRange(1, 40));
  if (*rc::gen::inRange(0, 4) == 0) look.bias = true;
  if (*rc::gen::inRange(0, 4) == 0) look.sliding_window = *rc::gen::inRange(1, 200);
  for (int h = 0; h < n_query_heads && look.soft_cap > 20; ++h)
    look.alibi_slopes.push_back(1.0f / (2.0f + h));
  for (int h = 0; h < n_query_heads && look.bias; ++h)
    look.sink_logits.push_back(static_cast<float>(h % 5 - 2));
  return look;
}

std::string any_bands(int dim) {
  static const std::vector<std::string> names = {"t4",       "t2-2",     "t5-3",   "t4-3-2",
                                                 "t6-4-3-3", "t4-2-2-2", "t2-2:s8"};
  const std::string name = *rc::gen::elementOf(names);
  return Format::parse(name, Side::kKey, dim).ok() ? name : "t4";
}

// `per_head`: each head has key widths of its own.
void engine_equals_dqref(bool per_head) {
  const std::string what = per_head ? "engine equals DQREF, widths per head" : "engine equals DQREF";
  EXPECT_TRUE(rc::check(what, [per_head] {
    const LayerShape shape = any_shape();
    std::ostringstream scheme;
    scheme << "k=" << (per_head ? any_bands(shape.key_dim) : any_format(Side::kKey, shape.key_dim))
           << ",v=" << any_format(Side::kValue, shape.value_dim) << ",w=" << *rc::gen::inRange(0, 150)
           << ",s=" << *rc::gen::inRange(0, 20);
    RC_TAG(scheme.str().substr(2, 1));
    const int tokens = *rc::gen::inRange(2, 320);
    const int sequences = *rc::gen::inRange(1, 4);
    const int chunk = *rc::gen::inRange(1, 130);
    const int run = *rc::gen::inRange(1, 50);
    Engine engine({.scheme = scheme.str(),
                   .shapes = {shape},
                   .n_slots = 640,
                   .threads = 3,
                   .poison = *rc::gen::element(0xAA, 0xFF),
                   .adjust = per_head ? test::vary_key_widths : nullptr},
                  test::random_content(static_cast<uint64_t>(tokens)));
    // Runs of `run` tokens of each sequence in turn, from a slot that need not start a page.
    const int first_slot = *rc::gen::inRange(0, 300);
    std::vector<int> next(sequences, 0);
    std::vector<Entry> all;
    for (int i = 0; i < tokens; ++i) {
      const int seq = i / run % sequences;
      all.push_back({.seq = seq, .pos = next[seq]++, .slot = first_slot + i});
    }
    for (int at = 0; at < tokens; at += chunk) {
      std::vector<Outputs> out;
      const std::vector<Entry> batch(all.begin() + at, all.begin() + std::min(tokens, at + chunk));
      RC_ASSERT(engine.step(batch, {.seal_only = true}, &out).ok());
    }
    Look look = any_look(shape.n_query_heads);
    const std::vector<Entry> last(all.end() - std::min(tokens, 5), all.end());
    look.path = AttentionPath::kDequantize;
    look.dqref = true;
    const Outputs plain = engine.attend(last, look);
    RC_ASSERT(test::relative_error(plain.engine, plain.dqref) < 1e-5);
    look.path = AttentionPath::kFused;
    const Outputs fused = engine.attend(last, look);
    // Few keys and few outputs: more scatter than over a long context.
    RC_ASSERT(test::relative_error(fused.engine, fused.dqref) <
              3 * test::engine_tolerance(engine.cache(), 0, AttentionPath::kFused));
    look.dqref = false;
    look.threads = 1;
    RC_ASSERT(test::same_bits(engine.attend(last, look).engine, fused.engine));
    // Alone, each query gives what it gave among the others.
    const Outputs alone = engine.attend({last.front()}, look);
    RC_ASSERT(test::same_bits(alone.engine[0], fused.engine[0]));
  }));
}

TEST(AttentionProperty, EngineEqualsDqref) { engine_equals_dqref(false); }
TEST(AttentionProperty, EngineEqualsDqrefWithWidthsPerHead) { engine_equals_dqref(true); }

}  // namespace
}  // namespace kvant

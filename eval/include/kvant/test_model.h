// Small models with random weights in llama.cpp's file format, for tests and benchmarks.
#pragma once

#include <cstdint>
#include <string>

#include "ggml.h"
#include "kvant/status.h"

namespace kvant::eval {

enum class TestModelKind : uint8_t {
  kKeyBias,  // Qwen2 family; key biases of +-key_bias in the slowest rope pairs
  kPlanted,  // `weights_from` (llama family) with such biases in its first and last layer
  kShapes,   // Llama family, or Gemma 3 family when there is a sliding window; any head sizes
};

struct TestModelOptions {
  TestModelKind kind = TestModelKind::kKeyBias;
  std::string path = {};
  std::string tokenizer_from = {};  // model file; empty: one token per byte
  std::string weights_from = {};    // kPlanted: model file
  int layers = 2;
  int heads = 4;
  int kv_heads = 2;   // divides heads
  int head_dim = 64;  // even
  int sliding_window = 0;
  int context = 32768;
  int embedding = 0;  // channels of the residual; 0: 256, or heads * head_dim with key biases
  int feed_forward = 256;
  ggml_type weights = GGML_TYPE_F32;  // of matrices; or GGML_TYPE_Q8_0
  float key_bias = 60.0f;
  int biased_pairs = 4;  // per KV head
  uint64_t seed = 1;
};

// The same options give the same file. Weights are scaled so that attention is peaked (standard deviation of
// logits about 3) and outweighs the residual: errors of the cache reach the output. kInvalidArgument, kIo.
Status write_test_model(const TestModelOptions& options);
// kPlanted: the other options but key_bias and biased_pairs do not matter. kIo, kUnsupported.
Status write_planted_bias_model(const TestModelOptions& options);

}  // namespace kvant::eval

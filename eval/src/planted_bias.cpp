// A model's own weights with key biases planted in its first and last layer.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "ggml.h"
#include "gguf.h"
#include "kvant/test_model.h"

namespace kvant::eval {
namespace {

using GgufPtr = std::unique_ptr<gguf_context, void (*)(gguf_context*)>;
using GgmlPtr = std::unique_ptr<ggml_context, void (*)(ggml_context*)>;

int64_t number(const gguf_context* file, const std::string& key) {
  const int64_t id = gguf_find_key(file, key.c_str());
  return id >= 0 && gguf_get_kv_type(file, id) == GGUF_TYPE_UINT32
             ? static_cast<int64_t>(gguf_get_val_u32(file, id))
             : 0;
}

}  // namespace

// Neighbouring channels turn together in this family and the last pairs of a head are the slowest: a bias
// there survives rope as a nearly constant part of every key.
Status write_planted_bias_model(const TestModelOptions& o) {
  ggml_context* data = nullptr;
  const GgufPtr from(gguf_init_from_file(o.weights_from.c_str(), {.no_alloc = false, .ctx = &data}),
                     gguf_free);
  const GgmlPtr weights(data, ggml_free);
  if (from == nullptr) return {Code::kIo, "model " + o.weights_from + " is not a GGUF file"};
  const int64_t arch = gguf_find_key(from.get(), "general.architecture");
  if (arch < 0 || std::string(gguf_get_val_str(from.get(), arch)) != "llama") {
    return {Code::kUnsupported,
            "model " + o.weights_from + ": only the llama family can be given key biases"};
  }
  const int64_t layers = number(from.get(), "llama.block_count");
  const int64_t heads = number(from.get(), "llama.attention.head_count");
  const int64_t kv_heads = number(from.get(), "llama.attention.head_count_kv");
  const ggml_tensor* keys = ggml_get_tensor(weights.get(), "blk.0.attn_k.weight");
  if (layers < 1 || heads < 1 || kv_heads < 1 || keys == nullptr || keys->ne[1] % kv_heads != 0) {
    return {Code::kUnsupported, "model " + o.weights_from + ": its attention has no usual key projection"};
  }
  const int64_t dim = keys->ne[1] / kv_heads;
  const GgufPtr out(gguf_init_empty(), gguf_free);
  gguf_set_kv(out.get(), from.get());
  for (int64_t i = 0; i < gguf_get_n_tensors(from.get()); ++i) {
    gguf_add_tensor(out.get(), ggml_get_tensor(weights.get(), gguf_get_tensor_name(from.get(), i)));
  }
  const GgmlPtr added(
      ggml_init({.mem_size = 2 * (ggml_tensor_overhead() + static_cast<size_t>(keys->ne[1]) * 4 + 256),
                 .mem_buffer = nullptr,
                 .no_alloc = false}),
      ggml_free);
  for (const int64_t layer : {int64_t{0}, layers - 1}) {
    ggml_tensor* bias = ggml_new_tensor_1d(added.get(), GGML_TYPE_F32, keys->ne[1]);
    ggml_format_name(bias, "blk.%d.attn_k.bias", static_cast<int>(layer));
    auto* x = static_cast<float*>(bias->data);
    for (int64_t i = 0; i < keys->ne[1]; ++i) {
      const bool biased = i % dim >= dim - 2 * o.biased_pairs;
      x[i] = biased ? (i * 2654435761 >> 7 & 1 ? o.key_bias : -o.key_bias) : 0.0f;
    }
    gguf_add_tensor(out.get(), bias);
    if (layers == 1) break;
  }
  if (!gguf_write_to_file(out.get(), o.path.c_str(), /*only_meta=*/false)) {
    return {Code::kIo, o.path + " cannot be written"};
  }
  return {};
}

}  // namespace kvant::eval

#include "kvant/test_model.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "ggml.h"
#include "gguf.h"

namespace kvant::eval {
namespace {

using GgufPtr = std::unique_ptr<gguf_context, void (*)(gguf_context*)>;
using GgmlPtr = std::unique_ptr<ggml_context, void (*)(ggml_context*)>;

// Standard deviation of query and key channels: logits are q . k / sqrt(dim), so theirs is the square,
// about 3.
constexpr float kQueryKeyGain = 1.8f;
// Attention's output against a residual of about 1.
constexpr float kOutputGain = 2.0f;
constexpr float kLogitGain = 3.0f;

// SplitMix64, and normal variates by Box and Muller (1958): the same file everywhere up to libm's last digit.
class Normal {
 public:
  explicit Normal(uint64_t seed) : state_(seed) {}
  float next() {
    const double u = (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53,
                 v = static_cast<double>(bits() >> 11) * 0x1p-53;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v));
  }
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

class Writer {
 public:
  explicit Writer(const TestModelOptions& o)
      : o_(o),
        file_(gguf_init_empty(), gguf_free),
        random_(o.seed),
        tensors_(
            ggml_init({.mem_size = ggml_tensor_overhead() * 4096, .mem_buffer = nullptr, .no_alloc = true}),
            ggml_free) {
    embedding_ = o.embedding;
    if (embedding_ == 0) embedding_ = o.kind == TestModelKind::kKeyBias ? o.heads * o.head_dim : 256;
    if (o.kind == TestModelKind::kKeyBias) {
      architecture_ = "qwen2";
    } else {
      architecture_ = o.sliding_window > 0 ? "gemma3" : "llama";
    }
  }

  Status write() {
    KVANT_RETURN_IF_ERROR(add_tokenizer());
    add_metadata();
    add_tensors();
    if (!gguf_write_to_file(file_.get(), o_.path.c_str(), /*only_meta=*/false)) {
      return {Code::kIo, o_.path + " cannot be written"};
    }
    return {};
  }

 private:
  Status add_tokenizer();
  void add_byte_tokenizer();
  void add_metadata();
  void add_tensors();
  void add_layer(int layer);
  void u32(const char* key, uint32_t value) {
    gguf_set_val_u32(file_.get(), (architecture_ + "." + key).c_str(), value);
  }
  void f32(const char* key, float value) {
    gguf_set_val_f32(file_.get(), (architecture_ + "." + key).c_str(), value);
  }

  void tensor(const std::string& name, int64_t in, int64_t out, const std::function<float(int64_t)>& value) {
    const ggml_type type = out > 0 ? o_.weights : GGML_TYPE_F32;
    ggml_tensor* t = out > 0 ? ggml_new_tensor_2d(tensors_.get(), type, in, out)
                             : ggml_new_tensor_1d(tensors_.get(), type, in);
    ggml_set_name(t, name.c_str());
    std::vector<float> values(ggml_nelements(t));
    for (size_t i = 0; i < values.size(); ++i) values[i] = value(static_cast<int64_t>(i));
    auto data = std::make_unique<std::vector<std::byte>>(ggml_nbytes(t));
    if (type == GGML_TYPE_F32) {
      std::memcpy(data->data(), values.data(), data->size());
    } else {
      ggml_quantize_chunk(type, values.data(), data->data(), 0, out, in, nullptr);
    }
    t->data = data->data();
    data_.push_back(std::move(data));
    gguf_add_tensor(file_.get(), t);
  }
  // Rows of unit gain times `gain`.
  void matrix(const std::string& name, int64_t in, int64_t out, float gain) {
    const float scale = gain / std::sqrt(static_cast<float>(in));
    tensor(name, in, out, [&](int64_t) { return scale * random_.next(); });
  }
  void constant(const std::string& name, int64_t n, float value) {
    tensor(name, n, 0, [value](int64_t) { return value; });
  }
  // Gemma keeps norm weights as they are in the file.
  void norm(const std::string& name, int64_t n, float value = 1.0f) { constant(name, n, value); }
  void key_bias(const std::string& name);

  const TestModelOptions& o_;
  GgufPtr file_;
  Normal random_;
  GgmlPtr tensors_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> data_;
  std::string architecture_;
  int embedding_ = 0;
  int n_vocab_ = 0;
};

void Writer::add_byte_tokenizer() {
  // SentencePiece's byte fallback and its sign for a space; types: 1 normal, 2 unknown, 3 control, 6 byte.
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "\xE2\x96\x81"};
  std::vector<int32_t> types = {2, 3, 3, 1};
  for (int b = 0; b < 256; ++b) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", static_cast<unsigned>(b));
    tokens.emplace_back(text);
    types.push_back(6);
  }
  std::vector<const char*> pointers;
  pointers.reserve(tokens.size());
  for (const std::string& t : tokens) pointers.push_back(t.c_str());
  const std::vector<float> scores(tokens.size(), 0.0f);
  gguf_set_val_str(file_.get(), "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(file_.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  gguf_set_arr_data(file_.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  gguf_set_arr_data(file_.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_val_u32(file_.get(), "tokenizer.ggml.bos_token_id", 1);
  gguf_set_val_u32(file_.get(), "tokenizer.ggml.eos_token_id", 2);
  gguf_set_val_u32(file_.get(), "tokenizer.ggml.unknown_token_id", 0);
  gguf_set_val_bool(file_.get(), "tokenizer.ggml.add_bos_token", true);
  gguf_set_val_bool(file_.get(), "tokenizer.ggml.add_space_prefix", false);
  n_vocab_ = static_cast<int>(tokens.size());
}

Status Writer::add_tokenizer() {
  if (o_.tokenizer_from.empty()) {
    add_byte_tokenizer();
    return {};
  }
  const GgufPtr from(gguf_init_from_file(o_.tokenizer_from.c_str(), {.no_alloc = true, .ctx = nullptr}),
                     gguf_free);
  if (from == nullptr) return {Code::kIo, "model " + o_.tokenizer_from + " is not a GGUF file"};
  gguf_set_kv(file_.get(), from.get());
  for (int64_t i = gguf_get_n_kv(file_.get()) - 1; i >= 0; --i) {
    const std::string key = gguf_get_key(file_.get(), i);
    if (!key.starts_with("tokenizer.")) gguf_remove_key(file_.get(), key.c_str());
  }
  const int64_t tokens = gguf_find_key(file_.get(), "tokenizer.ggml.tokens");
  if (tokens < 0) return {Code::kIo, "model " + o_.tokenizer_from + " has no tokenizer"};
  n_vocab_ = static_cast<int>(gguf_get_arr_n(file_.get(), tokens));
  return {};
}

void Writer::add_metadata() {
  gguf_set_val_str(file_.get(), "general.architecture", architecture_.c_str());
  gguf_set_val_str(file_.get(), "general.name",
                   o_.kind == TestModelKind::kKeyBias ? "random weights, key biases" : "random weights");
  gguf_set_val_u32(file_.get(), "general.file_type", o_.weights == GGML_TYPE_F32 ? 0 : 7);
  u32("block_count", o_.layers);
  u32("context_length", o_.context);
  u32("embedding_length", embedding_);
  u32("feed_forward_length", o_.feed_forward);
  u32("attention.head_count", o_.heads);
  u32("attention.head_count_kv", o_.kv_heads);
  if (o_.kind == TestModelKind::kShapes) {
    u32("attention.key_length", o_.head_dim);
    u32("attention.value_length", o_.head_dim);
    u32("rope.dimension_count", o_.head_dim);
  }
  if (o_.sliding_window > 0) u32("attention.sliding_window", o_.sliding_window);
  f32("attention.layer_norm_rms_epsilon", 1e-6f);
  // Qwen2's base: its slowest pairs hardly turn within any context.
  f32("rope.freq_base", o_.kind == TestModelKind::kKeyBias ? 1e6f : 1e4f);
}

// Rope pairs are (i, i + dim / 2) in this family; the last pairs are the slowest.
void Writer::key_bias(const std::string& name) {
  const int half = o_.head_dim / 2;
  tensor(name, static_cast<int64_t>(o_.kv_heads) * o_.head_dim, 0, [&](int64_t i) {
    const int pair = static_cast<int>(i % half);
    const float small = 0.1f * random_.next();
    return pair >= half - o_.biased_pairs ? ((random_.bits() & 1) != 0 ? o_.key_bias : -o_.key_bias) : small;
  });
}

void Writer::add_layer(int layer) {
  const std::string b = "blk." + std::to_string(layer) + ".";
  const int64_t e = embedding_, ff = o_.feed_forward, q = static_cast<int64_t>(o_.heads) * o_.head_dim,
                kv = static_cast<int64_t>(o_.kv_heads) * o_.head_dim;
  const bool gemma = architecture_ == "gemma3";
  norm(b + "attn_norm.weight", e);
  matrix(b + "attn_q.weight", e, q, kQueryKeyGain);
  matrix(b + "attn_k.weight", e, kv, kQueryKeyGain);
  matrix(b + "attn_v.weight", e, kv, 1.0f);
  if (o_.kind == TestModelKind::kKeyBias) {
    constant(b + "attn_q.bias", q, 0.0f);
    key_bias(b + "attn_k.bias");
    constant(b + "attn_v.bias", kv, 0.0f);
  }
  matrix(b + "attn_output.weight", q, e, kOutputGain);
  norm(b + "ffn_norm.weight", e);
  matrix(b + "ffn_gate.weight", e, ff, 1.0f);
  matrix(b + "ffn_up.weight", e, ff, 1.0f);
  matrix(b + "ffn_down.weight", ff, e, 0.5f);
  if (!gemma) return;
  // Queries and keys are normalized per head, then scaled by these.
  norm(b + "attn_q_norm.weight", o_.head_dim, kQueryKeyGain);
  norm(b + "attn_k_norm.weight", o_.head_dim, kQueryKeyGain);
  norm(b + "post_attention_norm.weight", e, kOutputGain);
  norm(b + "post_ffw_norm.weight", e, 0.5f);
}

void Writer::add_tensors() {
  const bool gemma = architecture_ == "gemma3";
  // Gemma multiplies embeddings by sqrt(embedding).
  const float gain = gemma ? 1.0f / std::sqrt(static_cast<float>(embedding_)) : 1.0f;
  tensor("token_embd.weight", embedding_, n_vocab_, [&](int64_t) { return gain * random_.next(); });
  for (int layer = 0; layer < o_.layers; ++layer) add_layer(layer);
  norm("output_norm.weight", embedding_);
  matrix("output.weight", embedding_, n_vocab_, kLogitGain);
}

}  // namespace

Status write_test_model(const TestModelOptions& o) {
  if (o.kind == TestModelKind::kPlanted) return write_planted_bias_model(o);
  if (o.heads % o.kv_heads != 0) {
    int below = o.kv_heads;
    while (o.heads % below != 0) --below;
    return {Code::kInvalidArgument, "--kv-heads " + std::to_string(o.kv_heads) + " does not divide --heads " +
                                        std::to_string(o.heads) + "; nearest is " + std::to_string(below)};
  }
  if (o.head_dim % 2 != 0) {
    return {Code::kInvalidArgument, "--head-dim " + std::to_string(o.head_dim) + " is odd; nearest is " +
                                        std::to_string(o.head_dim + 1)};
  }
  if (o.kind == TestModelKind::kKeyBias && o.sliding_window > 0) {
    return {Code::kInvalidArgument, "--swa needs --kind shapes"};
  }
  for (const int n : {o.embedding, o.feed_forward, o.heads * o.head_dim}) {
    if (o.weights != GGML_TYPE_F32 && n % ggml_blck_size(o.weights) != 0) {
      return {Code::kInvalidArgument,
              std::string("--weights ") + ggml_type_name(o.weights) + " needs rows of a multiple of " +
                  std::to_string(ggml_blck_size(o.weights)) + ", not " + std::to_string(n)};
    }
  }
  return Writer(o).write();
}

}  // namespace kvant::eval

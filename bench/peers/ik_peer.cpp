// ik_llama.cpp beside kvant: one cache per process, driven over pipes so that rounds of all caches
// interleave.
//
//   kvant-peer-ik decode MODEL TYPE DEPTH CONTEXT BATCH THREADS
//   kvant-peer-ik attention TYPE KEYS HEAD_DIM KV_HEADS GROUP LAYERS THREADS
//
// Prints "ready BYTES" once the cache is filled (BYTES: of the cache, of one layer for attention), then
// answers each line of its input with one line of seconds, until its input ends:
//
//   step N      N decode steps            -> N numbers
//   prefill N   one batch of N tokens     -> 1 number
//   run N       N graphs of all layers    -> N numbers
//
// "error TEXT" and exit code 1 when something cannot run. Quantized caches run with the Hadamard option on.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ggml.h"
#include "llama.h"

namespace {

constexpr int kSeedTokens = 512;

[[noreturn]] void fail(const std::string& text) {
  std::printf("error %s\n", text.c_str());
  std::exit(1);
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ggml_type parse_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q6_0, GGML_TYPE_Q5_1,
                               GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL}) {
    if (name == ggml_type_name(type)) return type;
  }
  fail("'" + name + "' is not a cache type of ik_llama.cpp");
}

void print_seconds(const std::vector<double>& seconds) {
  for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.9f", i == 0 ? "" : " ", seconds[i]);
  std::printf("\n");
  std::fflush(stdout);
}

// --- whole steps
// ---------------------------------------------------------------------------------------------

// A sequence state: number of cells, per cell position and number of sequences (none in a state of one
// sequence), transposed, layers, then per layer type, row size and rows: keys, then values; last whether
// recurrent states follow.
std::vector<uint8_t> repeat_state(const std::vector<uint8_t>& in, uint32_t tokens) {
  std::vector<uint8_t> out;
  size_t at = 0;
  auto bytes = [&](size_t n) {
    if (n > in.size() - at) fail("the sequence state is shorter than expected");
    at += n;
    return in.data() + at - n;
  };
  auto put = [&](const void* p, size_t n) {
    out.insert(out.end(), static_cast<const uint8_t*>(p), static_cast<const uint8_t*>(p) + n);
  };
  auto take32 = [&] {
    uint32_t v = 0;
    std::memcpy(&v, bytes(4), 4);
    return v;
  };
  const uint32_t cells = take32();
  if (cells == 0) fail("the sequence state is empty");
  put(&tokens, 4);
  for (uint32_t i = 0; i < cells; ++i) {
    take32();
    if (take32() != 0) fail("the sequence state lists sequences");
  }
  for (uint32_t i = 0; i < tokens; ++i) {
    const uint32_t cell[2] = {i, 0};
    put(cell, sizeof cell);
  }
  const uint32_t transposed = take32();
  const uint32_t layers = take32();
  if (transposed != 0) fail("values are stored transposed");
  put(&transposed, 4);
  put(&layers, 4);
  for (uint32_t side = 0; side < 2 * layers; ++side) {
    put(bytes(4), 4);
    uint64_t row = 0;
    std::memcpy(&row, bytes(8), 8);
    put(&row, 8);
    const uint8_t* rows = bytes(row * cells);
    for (uint32_t left = tokens; left > 0;) {
      const uint32_t n = std::min(left, cells);
      put(rows, row * n);
      left -= n;
    }
  }
  const uint32_t recurrent = take32();
  if (recurrent != 0 || at != in.size()) fail("the sequence state has another layout");
  put(&recurrent, 4);
  return out;
}

class Decoder {
 public:
  Decoder(const std::string& path, ggml_type type, int depth, int context, int batch, int threads) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    model_.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
    if (!model_) fail("model " + path + " cannot be loaded");
    llama_context_params p = llama_context_default_params();
    p.n_ctx = context;
    p.n_batch = p.n_ubatch = batch;
    p.n_threads = p.n_threads_batch = threads;
    p.type_k = p.type_v = type;
    p.flash_attn = true;
    p.k_cache_hadamard = p.v_cache_hadamard = ggml_is_quantized(type);
    context_.reset(llama_init_from_model(model_.get(), p));
    if (!context_) fail("no context with this cache type");
    batch_ = llama_batch_init(batch, 0, 1);
    vocab_ = std::min(llama_n_vocab(model_.get()), 32000);
    fill(depth);
    steps(1);
  }
  ~Decoder() { llama_batch_free(batch_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  std::vector<double> steps(int n) {
    std::vector<double> seconds;
    for (int i = 0; i < n; ++i) seconds.push_back(decode(1));
    return seconds;
  }
  double decode(int n) {
    batch_.n_tokens = n;
    for (int i = 0; i < n; ++i) {
      batch_.token[i] = ((position_ + i) % kSeedTokens * 7919 + 13) % vocab_;
      batch_.pos[i] = position_ + i;
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = 0;
      batch_.logits[i] = i + 1 == n;
    }
    const double start = now_seconds();
    if (llama_decode(context_.get(), batch_) != 0) fail("a batch could not be computed");
    if (llama_get_logits_ith(context_.get(), n - 1) == nullptr) fail("no logits");
    position_ += n;
    return now_seconds() - start;
  }
  size_t cache_bytes() const { return cache_bytes_; }

 private:
  void fill(int depth) {
    if (depth == 0) return;
    const int seed = std::min(kSeedTokens, depth);
    decode(seed);
    std::vector<uint8_t> state(llama_state_seq_get_size(context_.get(), 0, 0));
    if (llama_state_seq_get_data(context_.get(), state.data(), state.size(), 0, 0) != state.size()) {
      fail("no sequence state");
    }
    const std::vector<uint8_t> filled = repeat_state(state, depth);
    cache_bytes_ = filled.size();
    llama_kv_cache_clear(context_.get());
    if (llama_state_seq_set_data(context_.get(), filled.data(), filled.size(), 0, 0) == 0) {
      fail("the repeated sequence state was refused");
    }
    position_ = depth;
  }

  struct Free {
    void operator()(llama_model* m) const { llama_free_model(m); }
    void operator()(llama_context* c) const { llama_free(c); }
  };
  std::unique_ptr<llama_model, Free> model_;
  std::unique_ptr<llama_context, Free> context_;
  llama_batch batch_{};
  int vocab_ = 0;
  int position_ = 0;
  size_t cache_bytes_ = 0;
};

// --- attention alone
// -----------------------------------------------------------------------------------------

struct Shape {
  int keys, head_dim, kv_heads, group, layers, threads;
};

class Attention {
 public:
  Attention(ggml_type type, const Shape& s) : threads_(s.threads) {
    const size_t row = ggml_row_size(type, static_cast<int64_t>(s.head_dim) * s.kv_heads);
    bytes_ = 2 * row * s.keys;
    const size_t mask_bytes = static_cast<size_t>(s.keys) * GGML_KQ_MASK_PAD * 2;
    ggml_init_params params{};
    params.mem_size = s.layers * (bytes_ + (1 << 20)) + mask_bytes + (64 << 20);
    ctx_.reset(ggml_init(params));
    if (!ctx_) fail("no memory for the caches");
    graph_ = ggml_new_graph(ctx_.get());
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    ggml_tensor* q = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, s.head_dim, 1, s.kv_heads * s.group);
    for (int64_t i = 0; i < ggml_nelements(q); ++i) static_cast<float*>(q->data)[i] = normal(rng);
    ggml_tensor* mask = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F16, s.keys, GGML_KQ_MASK_PAD);
    std::memset(mask->data, 0, ggml_nbytes(mask));
    for (int l = 0; l < s.layers; ++l) {
      ggml_tensor* k = filled(type, s, &rng);
      ggml_tensor* v = filled(type, s, &rng);
      ggml_tensor* out = ggml_flash_attn_ext(ctx_.get(), q, k, v, mask,
                                             1.0f / std::sqrt(static_cast<float>(s.head_dim)), 0.0f, 0.0f);
      ggml_build_forward_expand(graph_, out);
    }
    ggml_cplan plan = ggml_graph_plan(graph_, threads_);
    work_.resize(plan.work_size + 64);
    run();
  }
  double run() {
    ggml_cplan plan = ggml_graph_plan(graph_, threads_);
    plan.work_data = work_.data();
    const double start = now_seconds();
    if (ggml_graph_compute(graph_, &plan) != GGML_STATUS_SUCCESS) fail("attention could not be computed");
    return now_seconds() - start;
  }
  size_t bytes() const { return bytes_; }

 private:
  // Token-major rows of all KV heads. 64 rows are drawn and repeated: time does not depend on what they say.
  ggml_tensor* filled(ggml_type type, const Shape& s, std::mt19937* rng) {
    const int64_t width = static_cast<int64_t>(s.head_dim) * s.kv_heads;
    std::normal_distribution<float> normal;
    std::vector<float> rows(64 * width);
    for (float& x : rows) x = normal(*rng);
    ggml_tensor* t = ggml_new_tensor_2d(ctx_.get(), type, width, s.keys);
    for (int i = 0; i < s.keys; ++i) {
      char* to = static_cast<char*>(t->data) + static_cast<size_t>(i) * t->nb[1];
      const float* from = rows.data() + (i % 64) * width;
      if (type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(from, reinterpret_cast<ggml_fp16_t*>(to), width);
      } else {
        ggml_quantize_chunk(type, from, to, 0, 1, width, nullptr);
      }
    }
    return ggml_view_3d(ctx_.get(), t, s.head_dim, s.keys, s.kv_heads, t->nb[1],
                        ggml_row_size(type, s.head_dim), 0);
  }

  struct Free {
    void operator()(ggml_context* c) const { ggml_free(c); }
  };
  std::unique_ptr<ggml_context, Free> ctx_;
  ggml_cgraph* graph_ = nullptr;
  std::vector<uint8_t> work_;
  int threads_;
  size_t bytes_ = 0;
};

// Reads commands until the input ends.
template <typename F>
void serve(size_t bytes, const F& answer) {
  std::printf("ready %zu\n", bytes);
  std::fflush(stdout);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command;
    int n = 0;
    if (!(words >> command >> n) || n < 1) fail("'" + line + "' is not a command");
    print_seconds(answer(command, n));
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto number = [&](int i) { return std::atoi(argv[i]); };
  if (argc == 8 && std::string(argv[1]) == "decode") {
    Decoder decoder(argv[2], parse_type(argv[3]), number(4), number(5), number(6), number(7));
    serve(decoder.cache_bytes(), [&](const std::string& command, int n) -> std::vector<double> {
      if (command == "step") return decoder.steps(n);
      if (command == "prefill") return {decoder.decode(n)};
      fail("'" + command + "' is not known");
    });
    return 0;
  }
  if (argc == 9 && std::string(argv[1]) == "attention") {
    Attention attention(parse_type(argv[2]), {.keys = number(3),
                                              .head_dim = number(4),
                                              .kv_heads = number(5),
                                              .group = number(6),
                                              .layers = number(7),
                                              .threads = number(8)});
    serve(attention.bytes(), [&](const std::string& command, int n) {
      if (command != "run") fail("'" + command + "' is not known");
      std::vector<double> seconds;
      for (int i = 0; i < n; ++i) seconds.push_back(attention.run());
      return seconds;
    });
    return 0;
  }
  std::fprintf(stderr,
               "usage: kvant-peer-ik decode MODEL TYPE DEPTH CONTEXT BATCH THREADS\n"
               "       kvant-peer-ik attention TYPE KEYS HEAD_DIM KV_HEADS GROUP LAYERS THREADS\n");
  return 2;
}

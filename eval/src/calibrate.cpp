#include "kvant/calibrate.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "error_model.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace kvant::eval {
namespace {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;

// Sums over tokens of one head's vectors.
struct Moments {
  int64_t n = 0;
  float largest = 0;
  Vector sum;
  Matrix outer;
  void add(const Eigen::MatrixXf& columns) {  // [dim][tokens]
    const Matrix x = columns.cast<double>();
    if (n == 0) {
      sum = Vector::Zero(x.rows());
      outer = Matrix::Zero(x.rows(), x.rows());
    }
    n += x.cols();
    largest = std::max(largest, columns.cwiseAbs().maxCoeff());
    sum += x.rowwise().sum();
    outer.noalias() += x * x.transpose();
  }
  Vector mean() const { return sum / static_cast<double>(n); }
  Matrix second_moment() const { return outer / static_cast<double>(n); }
  Matrix covariance() const { return second_moment() - mean() * mean().transpose(); }
};

struct LayerMoments {
  int key_dim = 0, value_dim = 0;
  std::vector<Moments> keys, values;                      // [n_kv_heads]
  std::vector<Moments> queries;                           // [n_kv_heads], over the query heads that share it
  std::vector<Eigen::MatrixXf> key_sample, value_sample;  // [n_kv_heads], vectors of the newest chunk
  double logit_scale = 1;                                 // softmax scale of the layer
};

// Sees every attention node of the graph while the text runs through the model.
class Collector {
 public:
  explicit Collector(int skip) : skip_(skip) {}
  void start_window() { first_ = 0; }
  void end_chunk(int tokens) { first_ += tokens; }
  std::map<int, LayerMoments>& layers() { return layers_; }

  static bool callback(ggml_tensor* t, bool ask, void* self) {
    if (t->op != GGML_OP_FLASH_ATTN_EXT) return !ask;
    int layer = -1;
    if (std::sscanf(cache_name(t->src[1]), "cache_k_l%d", &layer) != 1) return !ask;
    if (!ask) static_cast<Collector*>(self)->take(t, layer);
    return true;
  }

 private:
  static const char* cache_name(const ggml_tensor* t) {
    while (t->view_src != nullptr) t = t->view_src;
    return t->name;
  }

  // q [dim, tokens, heads]; k, v views of the cache [dim, slots, kv heads], tokens of a window in slot order.
  void take(const ggml_tensor* t, int layer) {
    const ggml_tensor* q = t->src[0];
    const int64_t n_tokens = q->ne[1];
    const int64_t skip = std::max<int64_t>(0, skip_ - first_);
    if (skip >= n_tokens) return;
    LayerMoments& m = layers_[layer];
    const int64_t kv_heads = t->src[1]->ne[2];
    const int64_t group = q->ne[2] / kv_heads;
    m.key_dim = static_cast<int>(t->src[1]->ne[0]);
    m.value_dim = static_cast<int>(t->src[2]->ne[0]);
    m.keys.resize(kv_heads);
    m.values.resize(kv_heads);
    m.queries.resize(kv_heads);
    m.key_sample.resize(kv_heads);
    m.value_sample.resize(kv_heads);
    float logit_scale = 1;
    std::memcpy(&logit_scale, t->op_params, sizeof logit_scale);
    m.logit_scale = static_cast<double>(logit_scale);
    for (int64_t h = 0; h < kv_heads; ++h) {
      m.key_sample[h] = cache_columns(t->src[1], h, first_ + skip, n_tokens - skip);
      m.value_sample[h] = cache_columns(t->src[2], h, first_ + skip, n_tokens - skip);
      m.keys[h].add(m.key_sample[h]);
      m.values[h].add(m.value_sample[h]);
      for (int64_t g = 0; g < group; ++g) {
        Eigen::MatrixXf x(q->ne[0], n_tokens - skip);
        for (int64_t i = 0; i < x.cols(); ++i) {
          std::memcpy(x.col(i).data(),
                      static_cast<const char*>(q->data) + (i + skip) * q->nb[1] + (h * group + g) * q->nb[2],
                      q->ne[0] * sizeof(float));
        }
        m.queries[h].add(x);
      }
    }
  }

  static Eigen::MatrixXf cache_columns(const ggml_tensor* cache, int64_t head, int64_t first, int64_t count) {
    // A window cache of the model may hold fewer slots than the text has tokens: its newest ones then.
    const int64_t slots = cache->ne[1];
    if (first + count > slots) first = std::max<int64_t>(0, slots - count);
    count = std::min(count, slots - first);
    Eigen::MatrixXf x(cache->ne[0], count);
    for (int64_t i = 0; i < count; ++i) {
      const auto* row = reinterpret_cast<const ggml_fp16_t*>(
          static_cast<const char*>(cache->data) + (first + i) * cache->nb[1] + head * cache->nb[2]);
      ggml_fp16_to_fp32_row(row, x.col(i).data(), cache->ne[0]);
    }
    return x;
  }

  int skip_;
  int64_t first_ = 0;
  std::map<int, LayerMoments> layers_;
};

Matrix ridged(const Matrix& m, double ridge) {
  return m + Matrix::Identity(m.rows(), m.cols()) * (m.trace() / static_cast<double>(m.rows()) * ridge);
}

// A as in the header, rows by falling lambda. Signs are fixed (largest entry of a row positive), so that the
// file is reproducible.
std::vector<float> closed_form(const Matrix& covariance, const Matrix& weight, double ridge) {
  const Matrix c = ridged(covariance, ridge);
  const Matrix h = ridged(weight, ridge);
  const Eigen::SelfAdjointEigenSolver<Matrix> ec(c);
  const double floor = ec.eigenvalues().maxCoeff() * 1e-6;
  const Vector values = ec.eigenvalues().cwiseMax(floor);
  const Matrix root = ec.eigenvectors() * values.cwiseSqrt().asDiagonal() * ec.eigenvectors().transpose();
  const Matrix inverse_root =
      ec.eigenvectors() * values.cwiseSqrt().cwiseInverse().asDiagonal() * ec.eigenvectors().transpose();
  const Eigen::SelfAdjointEigenSolver<Matrix> em(root * h * root);
  const Vector lambda = em.eigenvalues().cwiseMax(em.eigenvalues().maxCoeff() * 1e-9);
  const Matrix a =
      lambda.array().pow(0.25).matrix().asDiagonal() * (em.eigenvectors().transpose() * inverse_root);
  const Eigen::Index n = a.rows();
  std::vector<float> out(static_cast<size_t>(n) * n);
  for (Eigen::Index i = 0; i < n; ++i) {
    const Vector row = a.row(n - 1 - i);
    Eigen::Index top = 0;
    row.cwiseAbs().maxCoeff(&top);
    const double sign = row[top] < 0 ? -1.0 : 1.0;
    for (Eigen::Index j = 0; j < n; ++j) out[i * n + j] = static_cast<float>(sign * row[j]);
  }
  return out;
}

// Sum of W_O^T W_O over the query heads of each KV head; identity when the model has no such tensor.
class OutputWeights {
 public:
  explicit OutputWeights(const std::string& path) {
    file_ = gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &meta_});
    stream_ = std::fopen(path.c_str(), "rb");
  }
  OutputWeights(const OutputWeights&) = delete;
  OutputWeights& operator=(const OutputWeights&) = delete;
  ~OutputWeights() {
    if (stream_ != nullptr) std::fclose(stream_);
    if (file_ != nullptr) gguf_free(file_);
    if (meta_ != nullptr) ggml_free(meta_);
  }

  std::vector<Matrix> value_weights(int layer, int kv_heads, int group, int dim) const {
    std::vector<Matrix> out(kv_heads, Matrix::Identity(dim, dim));
    if (file_ == nullptr || stream_ == nullptr) return out;
    const std::string name = "blk." + std::to_string(layer) + ".attn_output.weight";
    const int64_t id = gguf_find_tensor(file_, name.c_str());
    const ggml_tensor* t = ggml_get_tensor(meta_, name.c_str());
    if (id < 0 || t == nullptr || t->ne[0] != static_cast<int64_t>(kv_heads) * group * dim) return out;
    const size_t row_bytes = ggml_row_size(t->type, t->ne[0]);
    const auto* traits = ggml_get_type_traits(t->type);
    if (t->type != GGML_TYPE_F32 && traits->to_float == nullptr) return out;
    for (Matrix& m : out) m.setZero();
    std::vector<char> bytes(row_bytes);
    Eigen::VectorXf row(t->ne[0]);
    std::fseek(stream_, static_cast<long>(gguf_get_data_offset(file_) + gguf_get_tensor_offset(file_, id)),
               SEEK_SET);
    for (int64_t r = 0; r < t->ne[1]; ++r) {
      if (std::fread(bytes.data(), 1, row_bytes, stream_) != row_bytes) break;
      if (t->type == GGML_TYPE_F32) {
        std::memcpy(row.data(), bytes.data(), row_bytes);
      } else {
        traits->to_float(bytes.data(), row.data(), t->ne[0]);
      }
      for (int h = 0; h < kv_heads * group; ++h) {
        const Vector w = row.segment(static_cast<Eigen::Index>(h) * dim, dim).cast<double>();
        out[h / group].noalias() += w * w.transpose();
      }
    }
    return out;
  }

 private:
  gguf_context* file_ = nullptr;
  ggml_context* meta_ = nullptr;
  std::FILE* stream_ = nullptr;
};

struct ModelDeleter {
  void operator()(llama_model* p) const { llama_model_free(p); }
};
struct ContextDeleter {
  void operator()(llama_context* p) const { llama_free(p); }
};

Result<std::vector<llama_token>> tokenize(const llama_model* model, const CalibrateOptions& options) {
  // Four characters a token is a lower bound on any text; twice that is read so that enough is left.
  const std::string text = options.text.substr(0, static_cast<size_t>(options.tokens) * 16);
  std::vector<llama_token> tokens(text.size() + 8);
  const int n = llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<int32_t>(text.size()),
                               tokens.data(), static_cast<int32_t>(tokens.size()), false, false);
  if (n < options.window_tokens) {
    return Status(Code::kInvalidArgument, "calibration text: " + std::to_string(std::max(n, 0)) +
                                              " tokens, at least " + std::to_string(options.window_tokens) +
                                              " are needed");
  }
  tokens.resize(std::min(n, options.tokens) / options.window_tokens * options.window_tokens);
  return tokens;
}

Status run_text(llama_model* model, const CalibrateOptions& options, const std::vector<llama_token>& tokens,
                Collector* collector) {
  constexpr int kChunk = 512;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(options.window_tokens);
  params.n_batch = params.n_ubatch = kChunk;
  params.n_seq_max = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.swa_full = true;
  params.n_threads = params.n_threads_batch =
      options.threads > 0 ? options.threads : static_cast<int32_t>(std::thread::hardware_concurrency());
  params.cb_eval = Collector::callback;
  params.cb_eval_user_data = collector;
  const std::unique_ptr<llama_context, ContextDeleter> ctx(llama_init_from_model(model, params));
  if (!ctx) return {Code::kInternal, "llama.cpp could not create a context for calibration"};
  for (size_t at = 0; at < tokens.size(); at += kChunk) {
    if (options.cancelled && options.cancelled()) return {Code::kCancelled, "calibration was cancelled"};
    if (at % options.window_tokens == 0) {
      llama_memory_clear(llama_get_memory(ctx.get()), true);
      collector->start_window();
    }
    const auto n = static_cast<int32_t>(std::min<size_t>(kChunk, tokens.size() - at));
    llama_batch batch = llama_batch_get_one(const_cast<llama_token*>(tokens.data() + at), n);
    if (llama_decode(ctx.get(), batch) != 0)
      return {Code::kInternal, "llama.cpp failed on the calibration text"};
    llama_synchronize(ctx.get());
    collector->end_chunk(n);
    if (options.progress) options.progress(static_cast<double>(at + n) / static_cast<double>(tokens.size()));
  }
  return {};
}

// `weight` is what the basis is made for; `cost_scale` brings e^T weight e to the units of ErrorModel.
std::shared_ptr<const CalibratedBasis> make_basis(HeadStatistics* head, double cost_scale, double ridge,
                                                  bool centred) {
  auto basis = std::make_shared<CalibratedBasis>();
  basis->dim = static_cast<int>(head->covariance.rows());
  basis->forward = closed_form(head->covariance, head->weight, ridge);
  if (centred) {
    const Eigen::VectorXf mu = head->mean.cast<float>();
    basis->centre.assign(mu.data(), mu.data() + mu.size());
  }
  head->weight *= cost_scale;
  basis->error = make_error_model(*head, *basis);
  return basis;
}

HeadStatistics statistics_of(const Moments& m, const Matrix& weight, const Eigen::MatrixXf& sample) {
  return {.covariance = m.covariance(),
          .second_moment = m.second_moment(),
          .mean = m.mean(),
          .weight = weight,
          .sample = sample,
          .largest = m.largest};
}

void add_layer(int layer, const LayerMoments& m, const OutputWeights& output, double ridge,
               CalibrationResult* out) {
  const int kv_heads = static_cast<int>(m.keys.size());
  const int group = static_cast<int>(m.queries[0].n / m.keys[0].n);
  const std::vector<Matrix> value_weight = output.value_weights(layer, kv_heads, group, m.value_dim);
  LayerCalibration& c = out->calibration.layers[layer];
  for (int h = 0; h < kv_heads; ++h) {
    HeadStatistics keys = statistics_of(m.keys[h], m.queries[h].second_moment(), m.key_sample[h]);
    c.key.push_back(make_basis(&keys, m.logit_scale * m.logit_scale, ridge, true));
    find_outliers(keys, Side::kKey, layer, h, &out->outliers);
  }
  for (int h = 0; h < kv_heads; ++h) {
    HeadStatistics values = statistics_of(m.values[h], value_weight[h], m.value_sample[h]);
    const double output_power = (values.second_moment * values.weight).trace();
    c.value.push_back(make_basis(&values, output_power > 0 ? 1 / output_power : 0, ridge, false));
    find_outliers(values, Side::kValue, layer, h, &out->outliers);
  }
}

Status check_finite(const std::vector<std::shared_ptr<const CalibratedBasis>>& heads, Side side, int layer) {
  using ggml::all_finite;
  for (size_t h = 0; h < heads.size(); ++h) {
    const CalibratedBasis& head = *heads[h];
    if (all_finite(head.forward) && all_finite(head.centre) && all_finite(head.error.spectrum)) continue;
    return {Code::kBadValue, std::string("NaN or Inf in a ") + side_name(side) + " of layer " +
                                 std::to_string(layer) + ", KV head " + std::to_string(h)};
  }
  return {};
}

}  // namespace

Result<CalibrationResult> calibrate(const CalibrateOptions& options) {
  if (options.window_tokens < 256 || options.tokens < options.window_tokens) {
    return Status(Code::kInvalidArgument, "--tokens " + std::to_string(options.tokens) +
                                              " is less than one --window of " +
                                              std::to_string(options.window_tokens) + "; nearest is " +
                                              std::to_string(std::max(options.window_tokens, 256)));
  }
  const Result<uint64_t> fingerprint = ggml::model_fingerprint(options.model_path);
  if (!fingerprint.ok()) return fingerprint.status();
  if (fingerprint.value() == 0) {
    return Status(Code::kUnsupported,
                  options.model_path + ": the model has no attention norm weights to know it by");
  }
  llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  ggml_backend_dev_t no_devices[] = {nullptr};
  model_params.devices = no_devices;
  const std::unique_ptr<llama_model, ModelDeleter> model(
      llama_model_load_from_file(options.model_path.c_str(), model_params));
  if (!model) return Status(Code::kIo, options.model_path + ": llama.cpp cannot load it");
  const Result<std::vector<llama_token>> tokens = tokenize(model.get(), options);
  if (!tokens.ok()) return tokens.status();
  Collector collector(options.skip_tokens);
  KVANT_RETURN_IF_ERROR(run_text(model.get(), options, tokens.value(), &collector));

  CalibrationResult result;
  ggml::Calibration& calibration = result.calibration;
  calibration.fingerprint = fingerprint.value();
  calibration.text_hash = XXH3_64bits(options.text.data(), options.text.size());
  calibration.tokens = static_cast<int64_t>(tokens.value().size());
  char name[128] = "";
  llama_model_meta_val_str(model.get(), "general.name", name, sizeof name);
  calibration.model = name;
  const OutputWeights output(options.model_path);
  for (auto& [layer, m] : collector.layers()) {
    if (m.key_dim > kMaxHeadDim || m.value_dim > kMaxHeadDim) continue;
    add_layer(layer, m, output, options.ridge, &result);
    for (const Side side : {Side::kKey, Side::kValue}) {
      const LayerCalibration& made = calibration.layers.at(layer);
      KVANT_RETURN_IF_ERROR(check_finite(side == Side::kKey ? made.key : made.value, side, layer));
    }
  }
  if (calibration.layers.empty()) {
    return Status(Code::kUnsupported,
                  options.model_path + ": no layer uses a key/value cache that kvant handles");
  }
  return result;
}

}  // namespace kvant::eval

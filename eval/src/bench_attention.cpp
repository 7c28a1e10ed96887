#include "kvant/bench_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "kvant/attention.h"
#include "kvant/candidate.h"
#include "kvant/half.h"
#include "kvant/isa.h"
#include "kvant/llama_session.h"
#include "kvant/slot_cache.h"
#include "peer_process.h"
#include "timing.h"

namespace kvant::eval {
namespace {

constexpr double kErrorBound = 0.02;

// Gaussian rows with a few strong channels and a spread of norms, as keys have. One page is drawn and reused
// with a sign pattern per page: drawing gigabytes would take longer than measuring.
class RowSource {
 public:
  RowSource(int width, uint32_t seed) : width_(width), rows_(static_cast<size_t>(kPageTokens) * width) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (float& x : rows_) x = normal(rng);
  }
  void fill(int first_token, int count, float* out) const {
    for (int i = 0; i < count; ++i) {
      const int token = first_token + i;
      const float sign = (token / kPageTokens * 2654435761u >> 16) & 1 ? 1.0f : -1.0f;
      const float* row = rows_.data() + static_cast<size_t>(token % kPageTokens) * width_;
      for (int c = 0; c < width_; ++c)
        out[static_cast<size_t>(i) * width_ + c] = sign * row[(c + token / 7) % width_];
    }
  }

 private:
  int width_;
  std::vector<float> rows_;
};

// One cache that can be attended: a graph with one attention per layer on the CPU backend.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual Status build(const BenchAttentionOptions& options, int length) = 0;
  virtual Status run(ggml_backend_t cpu, double* seconds) {
    before_run();
    const double start = now_seconds();
    ggml_backend_graph_compute(cpu, graph_);
    *seconds = now_seconds() - start;
    return {};
  }
  virtual double bytes_per_layer() const = 0;
  virtual Status check(ggml_backend_t, double*) { return {}; }
  std::string note;

 protected:
  virtual void before_run() {}
  ggml_tensor* new_queries(const BenchAttentionOptions& o) {
    ggml_tensor* q = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, o.head_dim, o.forks, o.kv_heads * o.group);
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < ggml_nelements(q); ++i) static_cast<float*>(q->data)[i] = normal(rng);
    return q;
  }
  ggml_context_ptr ctx_;
  ggml_cgraph* graph_ = nullptr;
};

class KvantSubject : public Subject {
 public:
  explicit KvantSubject(std::string scheme) : scheme_(std::move(scheme)) {}

  Status build(const BenchAttentionOptions& o, int length) override {
    const Result<Scheme> scheme = parse_scheme(scheme_);
    if (!scheme.ok()) return scheme.status();
    const LayerShape shape{.n_query_heads = o.kv_heads * o.group,
                           .n_kv_heads = o.kv_heads,
                           .key_dim = o.head_dim,
                           .value_dim = o.head_dim};
    const Result<LayerScheme> layer = resolve_layer(scheme.value(), shape);
    if (!layer.ok()) return layer.status();
    SlotCache::Options options;
    options.layers.assign(o.layers, layer.value());
    options.n_slots = length - 1 + o.forks;
    options.window = scheme.value().window;
    options.sinks = scheme.value().sinks;
    options.max_threads = o.threads;
    Result<std::unique_ptr<SlotCache>> cache = SlotCache::create(options);
    if (!cache.ok()) return cache.status();
    cache_ = std::move(cache.value());
    Result<std::unique_ptr<AttentionWorkspace>> workspace = AttentionWorkspace::create(cache_.get());
    if (!workspace.ok()) return workspace.status();
    workspace_ = std::move(workspace.value());
    KVANT_RETURN_IF_ERROR(fill(o, length));
    return build_graph(o, length);
  }

  double bytes_per_layer() const override {
    const MemoryReport m = cache_->memory();
    return static_cast<double>(m.tile_bytes + m.exact_row_bytes) / cache_->n_layers();
  }

  Status check(ggml_backend_t cpu, double* error) override {
    double seconds = 0;
    KVANT_RETURN_IF_ERROR(run(cpu, &seconds));
    const size_t n = ggml_nelements(outputs_[0]);
    std::vector<float> reference(n);
    AttentionArgs args = args_of(0);
    args.out = reference.data();
    KVANT_RETURN_IF_ERROR(reference_attention(*cache_, args));
    double worst = 0;
    double top = 0;
    for (size_t i = 0; i < n; ++i) {
      worst = std::max(
          worst, std::abs(static_cast<double>(static_cast<float*>(outputs_[0]->data)[i]) - reference[i]));
      top = std::max(top, std::abs(static_cast<double>(reference[i])));
    }
    *error = worst / top;
    if (!(*error < kErrorBound)) {
      return {Code::kInternal,
              scheme_ + ": attention differs from DQREF by " + std::to_string(*error * 100) + " %"};
    }
    return {};
  }

 private:
  // `count` tokens from `first` on, of one sequence, unless `queries` say who sees what.
  Status append(const BenchAttentionOptions& o, int first, int count, StreamQueries queries) {
    const int width = o.kv_heads * o.head_dim;
    const RowSource source(width, 1);
    std::vector<float> rows(static_cast<size_t>(count) * width);
    std::vector<int32_t> layers(o.layers);
    for (int l = 0; l < o.layers; ++l) layers[l] = l;
    std::vector<int64_t> slots(count);
    for (int i = 0; i < count; ++i) slots[i] = first + i;
    KVANT_RETURN_IF_ERROR(cache_->begin_batch(slots, layers));
    KVANT_RETURN_IF_ERROR(cache_->plan({&queries, 1}, layers, &plan_));
    source.fill(first, count, rows.data());
    std::vector<SealItem> items;
    for (int l = 0; l < o.layers; ++l) {
      for (const Side side : {Side::kKey, Side::kValue}) {
        cache_->write(LayerId{l}, side, slots, rows.data(), width, {});
      }
      cache_->seal_items(LayerId{l}, plan_, &items);
      for (const SealItem& item : items) cache_->seal_page(item);
    }
    return cache_->take_error();
  }

  // The plan of the last batch is what is timed: one query per fork, which sees all common keys and its own.
  Status fill(const BenchAttentionOptions& o, int length) {
    constexpr int kStep = 512;
    const int common = length - 1;
    for (int at = 0; at < common; at += kStep) {
      const int n = std::min(kStep, common - at);
      const int32_t own[] = {at + n - 1};
      KVANT_RETURN_IF_ERROR(append(o, at, n,
                                   {.stream = StreamId{0},
                                    .n_queries = 1,
                                    .n_slots = at + n,
                                    .mask = nullptr,
                                    .mask_stride = 0,
                                    .own_slot = own}));
      cache_->end_batch(plan_);
    }
    constexpr uint16_t kHidden = 0xFC00;  // -inf
    const int slots = common + o.forks;
    mask_.assign(static_cast<size_t>(o.forks) * slots, 0);
    std::vector<int32_t> own(o.forks);
    for (int f = 0; f < o.forks; ++f) {
      own[f] = common + f;
      for (int other = 0; other < o.forks; ++other) {
        if (other != f) mask_[static_cast<size_t>(f) * slots + common + other] = kHidden;
      }
    }
    return append(o, common, o.forks,
                  {.stream = StreamId{0},
                   .n_queries = o.forks,
                   .n_slots = slots,
                   .mask = mask_.data(),
                   .mask_stride = static_cast<size_t>(slots),
                   .own_slot = own});
  }

  AttentionArgs args_of(int layer) const {
    const size_t dim = static_cast<size_t>(outputs_[layer]->ne[0]);
    return {.layer = LayerId{layer},
            .plan = &plan_,
            .q = static_cast<const float*>(q_->data),
            .q_head = dim * static_cast<size_t>(q_->ne[1]),
            .q_token = dim,
            .out = static_cast<float*>(outputs_[layer]->data),
            .out_head = dim,
            .out_token = dim * static_cast<size_t>(q_->ne[2]),
            .scale = 1.0f / std::sqrt(static_cast<float>(dim))};
  }

  Status build_graph(const BenchAttentionOptions& o, int) {
    ctx_.reset(
        ggml_init({.mem_size = static_cast<size_t>(o.layers + 4) * (ggml_tensor_overhead() + 512 * 1024) +
                               ggml_graph_overhead(),
                   .mem_buffer = nullptr,
                   .no_alloc = false}));
    graph_ = ggml_new_graph(ctx_.get());
    q_ = new_queries(o);
    jobs_ = std::vector<AttentionJob>(o.layers);
    for (int l = 0; l < o.layers; ++l) {
      ggml_tensor* args[] = {q_};
      ggml_tensor* out = ggml_custom_4d(
          ctx_.get(), GGML_TYPE_F32, o.head_dim, o.kv_heads * o.group, o.forks, 1, args, 1,
          [](ggml_tensor*, int ith, int nth, void* job) {
            static_cast<AttentionJob*>(job)->run({ith, nth});
          },
          GGML_N_TASKS_MAX, &jobs_[l]);
      outputs_.push_back(out);
      ggml_build_forward_expand(graph_, out);
    }
    return {};
  }

  void before_run() override {
    for (size_t l = 0; l < jobs_.size(); ++l) {
      (void)jobs_[l].prepare(cache_.get(), workspace_.get(), args_of(static_cast<int>(l)));
    }
  }

  std::string scheme_;
  std::unique_ptr<SlotCache> cache_;
  std::unique_ptr<AttentionWorkspace> workspace_;
  BatchPlan plan_;
  std::vector<uint16_t> mask_;
  std::vector<AttentionJob> jobs_;
  ggml_tensor* q_ = nullptr;
  std::vector<ggml_tensor*> outputs_;
};

class LlamaSubject : public Subject {
 public:
  LlamaSubject(ggml_type type, bool flash) : type_(type), flash_(flash) {
    if (!flash) note = "flash attention off";
  }

  Status build(const BenchAttentionOptions& o, int length) override {
    const size_t side = ggml_row_size(type_, o.head_dim) * o.kv_heads * static_cast<size_t>(length);
    bytes_ = 2.0 * static_cast<double>(side);
    const size_t scores = static_cast<size_t>(length) * o.kv_heads * o.group * 4;
    const size_t mask = static_cast<size_t>(length) * 4;
    ctx_.reset(ggml_init({.mem_size = o.layers * (2 * side + 3 * scores + (1 << 20)) + mask + (8 << 20),
                          .mem_buffer = nullptr,
                          .no_alloc = false}));
    graph_ = ggml_new_graph(ctx_.get());
    ggml_tensor* q = new_queries(o);
    ggml_tensor* m = ggml_new_tensor_4d(ctx_.get(), flash_ ? GGML_TYPE_F16 : GGML_TYPE_F32, length, 1, 1, 1);
    std::memset(m->data, 0, ggml_nbytes(m));
    const float scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim));
    for (int l = 0; l < o.layers; ++l) {
      // Token-major rows of all heads, as llama.cpp keeps them.
      ggml_tensor* k = filled(o, length, false);
      ggml_tensor* v = filled(o, length, !flash_);
      ggml_tensor* out = nullptr;
      if (flash_) {
        out = ggml_flash_attn_ext(ctx_.get(), q, k, v, m, scale, 0.0f, 0.0f);
        ggml_prec_set_acc(out, GGML_PREC_F32);
      } else {
        ggml_tensor* kq = ggml_mul_mat(ctx_.get(), k, q);
        kq = ggml_soft_max_ext(ctx_.get(), kq, m, scale, 0.0f);
        out = ggml_mul_mat(ctx_.get(), v, kq);
      }
      ggml_build_forward_expand(graph_, out);
    }
    return {};
  }

  double bytes_per_layer() const override { return bytes_; }

 private:
  // [head_dim, length, kv_heads] view of token-major rows; transposed: [length, head_dim, kv_heads],
  // channel-major.
  ggml_tensor* filled(const BenchAttentionOptions& o, int length, bool transposed) {
    const int64_t d = o.head_dim;
    const int64_t width = d * o.kv_heads;
    std::vector<float> row(width);
    const RowSource source(static_cast<int>(width), 1);
    if (transposed) {
      ggml_tensor* t = ggml_new_tensor_3d(ctx_.get(), type_, length, d, o.kv_heads);
      for (int i = 0; i < length; ++i) {
        source.fill(i, 1, row.data());
        for (int64_t c = 0; c < width; ++c) {
          static_cast<ggml_fp16_t*>(t->data)[c * length + i] = ggml_fp32_to_fp16(row[c]);
        }
      }
      return t;
    }
    ggml_tensor* t = ggml_new_tensor_2d(ctx_.get(), type_, width, length);
    for (int i = 0; i < length; ++i) {
      source.fill(i, 1, row.data());
      ggml_quantize_chunk(type_, row.data(), static_cast<char*>(t->data) + i * t->nb[1], 0, 1, width,
                          nullptr);
    }
    return ggml_view_3d(ctx_.get(), t, d, length, o.kv_heads, t->nb[1], ggml_row_size(type_, d), 0);
  }

  ggml_type type_;
  bool flash_;
  double bytes_ = 0;
};

class IkSubject : public Subject {
 public:
  explicit IkSubject(std::string type) : type_(std::move(type)) {}
  Status build(const BenchAttentionOptions& o, int length) override {
    Result<std::unique_ptr<PeerProcess>> process = PeerProcess::start(
        {"attention", type_, std::to_string(length), std::to_string(o.head_dim), std::to_string(o.kv_heads),
         std::to_string(o.group), std::to_string(o.layers), std::to_string(o.threads)});
    if (!process.ok()) return process.status();
    process_ = std::move(process.value());
    return {};
  }
  Status run(ggml_backend_t, double* seconds) override {
    const Result<std::vector<double>> answer = process_->ask("run 1");
    if (!answer.ok()) return answer.status();
    *seconds = answer.value().front();
    return {};
  }
  double bytes_per_layer() const override { return static_cast<double>(process_->cache_bytes()); }

 private:
  std::string type_;
  std::unique_ptr<PeerProcess> process_;
};

// Plain reads by `threads` threads of a buffer beyond every cache.
class ReadStream {
 public:
  explicit ReadStream(int threads) : threads_(threads), data_(kBytes / 8, 1), sums_(threads) {}

  // The first of two passes warms up.
  void take_turn() {
    pass();
    passes_.push_back(pass());
  }
  bool measured() const { return !passes_.empty(); }
  double bytes_per_s() const { return median(passes_); }

 private:
  static constexpr size_t kBytes = size_t{512} << 20;
  static constexpr int kLanes = 8;

  // Bytes per second.
  double pass() {
    std::vector<std::thread> pool;
    pool.reserve(threads_);
    const size_t words = data_.size() / threads_ / kLanes * kLanes;
    const double start = now_seconds();
    for (int t = 0; t < threads_; ++t) {
      pool.emplace_back([this, t, words] { sums_[t] = sum(data_.data() + words * t, words); });
    }
    for (std::thread& thread : pool) thread.join();
    const double seconds = now_seconds() - start;
    const bool read = std::all_of(sums_.begin(), sums_.end(), [&](uint64_t s) { return s == words; });
    return read ? static_cast<double>(words) * threads_ * 8 / seconds : 0.0;
  }

  static uint64_t sum(const uint64_t* data, size_t words) {
    uint64_t lanes[kLanes] = {};
    for (size_t i = 0; i < words; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes[j] += data[i + j];
    }
    return std::accumulate(std::begin(lanes), std::end(lanes), uint64_t{0});
  }

  int threads_;
  std::vector<uint64_t> data_;
  std::vector<uint64_t> sums_;
  std::vector<double> passes_;
};

Result<std::vector<std::unique_ptr<Subject>>> make_subjects(const std::string& name) {
  const Result<std::vector<Candidate>> parsed = parse_bench_candidates(name);
  if (!parsed.ok()) return parsed.status();
  const Candidate& c = parsed.value().front();
  std::vector<std::unique_ptr<Subject>> subjects;
  if (!c.ik_type.empty()) {
    subjects.push_back(std::make_unique<IkSubject>(c.ik_type));
  } else if (!c.peer) {
    subjects.push_back(std::make_unique<KvantSubject>(name));
  } else if (c.type_k == c.type_v) {
    subjects.push_back(std::make_unique<LlamaSubject>(c.type_k, true));
    if (c.baseline()) subjects.push_back(std::make_unique<LlamaSubject>(c.type_k, false));
  } else {
    return Status(Code::kUnsupported, "'" + name + "': keys and values of one type are measured here");
  }
  return subjects;
}

struct Timed {
  std::string cache;
  std::unique_ptr<Subject> subject;
  std::vector<double> seconds;
  double error = 0;
};

// A turn's first runs do not count: threads of the engine before may still spin on the cores, those of this
// one wake up, and cores that slept take milliseconds to reach their clock. Of what follows the median
// counts.
constexpr double kWarmSeconds = 0.015;
constexpr double kTimedSeconds = 0.005;

Status turn(Subject* subject, ggml_backend_t cpu, double* seconds) {
  double spent = 0;
  while (spent < kWarmSeconds) {
    KVANT_RETURN_IF_ERROR(subject->run(cpu, seconds));
    spent += *seconds;
  }
  std::vector<double> timed;
  spent = 0;
  while (spent < kTimedSeconds) {
    KVANT_RETURN_IF_ERROR(subject->run(cpu, &timed.emplace_back()));
    spent += timed.back();
  }
  *seconds = median(timed);
  return {};
}

// `stream` takes its turn in every round, so that the memory is as busy for it as for the caches; null: not
// asked for.
Status run_length(const BenchAttentionOptions& o, int length, ggml_backend_t cpu, ReadStream* stream,
                  AttentionBench* out) {
  std::vector<Timed> timed;
  for (const std::string& name : o.caches) {
    Result<std::vector<std::unique_ptr<Subject>>> subjects = make_subjects(name);
    if (!subjects.ok()) return subjects.status();
    for (auto& subject : subjects.value()) {
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      if (o.progress) o.progress(0, name + " at " + std::to_string(length));
      Timed t;
      t.cache = name;
      t.subject = std::move(subject);
      KVANT_RETURN_IF_ERROR(t.subject->build(o, length));
      if (length <= o.check_keys) KVANT_RETURN_IF_ERROR(t.subject->check(cpu, &t.error));
      timed.push_back(std::move(t));
    }
  }
  for (int round = 0; round < o.repeats; ++round) {
    for (Timed& t : timed) {
      if (o.cancelled && o.cancelled()) return {Code::kCancelled, "interrupted"};
      KVANT_RETURN_IF_ERROR(turn(t.subject.get(), cpu, &t.seconds.emplace_back()));
      if (o.progress)
        o.progress(static_cast<double>(round + 1) / o.repeats, t.cache + " at " + std::to_string(length));
    }
    if (stream != nullptr) stream->take_turn();
  }
  for (const Timed& t : timed) {
    const double seconds = median(t.seconds) / o.layers;
    AttentionRow row;
    row.cache = t.cache;
    row.length = length;
    row.seconds = seconds;
    row.ns_per_head_key = seconds * 1e9 / (static_cast<double>(length) * o.kv_heads * o.group * o.forks);
    row.cache_bytes = t.subject->bytes_per_layer();
    row.gigabytes_per_s = row.cache_bytes / seconds * 1e-9;
    row.max_error = t.error;
    row.note = t.subject->note;
    AttentionRow* last = out->rows.empty() ? nullptr : &out->rows.back();
    if (last != nullptr && last->cache == row.cache && last->length == length) {
      if (row.ns_per_head_key < last->ns_per_head_key) *last = row;
      continue;
    }
    out->rows.push_back(row);
  }
  return {};
}

}  // namespace

Status bench_attention(const BenchAttentionOptions& options, AttentionBench* out) {
  KVANT_RETURN_IF_ERROR(init_backends());
  for (const std::string& name : options.caches) {
    if (options.forks > 1 && (name.starts_with("llama:") || name.starts_with("ik:"))) {
      return {Code::kUnsupported, name + ": sequences that share keys are measured of kvant's caches only"};
    }
  }
  *out = {};
  out->isa = active_isa();
  const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  if (!cpu) return {Code::kInternal, "ggml has no CPU backend"};
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu.get()));
  auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
  if (set_threads != nullptr) set_threads(cpu.get(), options.threads);
  const auto stream = options.stream ? std::make_unique<ReadStream>(options.threads) : nullptr;
  for (const int length : options.lengths) {
    KVANT_RETURN_IF_ERROR(run_length(options, length, cpu.get(), stream.get(), out));
  }
  if (stream == nullptr || !stream->measured()) return {};
  out->stream_gigabytes_per_s = stream->bytes_per_s() * 1e-9;
  for (AttentionRow& row : out->rows) row.stream_share = row.gigabytes_per_s / out->stream_gigabytes_per_s;
  return {};
}

}  // namespace kvant::eval

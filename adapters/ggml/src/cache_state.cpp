#include "cache_state.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "kvant/calibration_lookup.h"
#include "kvant/isa.h"
#include "kvant/scheme.h"
#include "norm_tracker.h"

namespace kvant::ggml {
namespace {

std::vector<CacheState*>& live_caches() {
  static std::vector<CacheState*> caches;
  return caches;
}

int64_t rows_of(const ggml_tensor* base) { return base->ne[1] * base->ne[2]; }
size_t stream_bytes(const ggml_tensor* base) { return base->nb[2]; }

// What an attention node says about one side of its layer; empty when the view is the usual one.
std::string check_view(const ggml_tensor* view, const ggml_tensor* base) {
  const bool usual = view->nb[1] == base->nb[1] && view->nb[2] == view->ne[0] * sizeof(uint16_t) &&
                     view->ne[0] * view->ne[2] == base->ne[0] && view->nb[3] == base->nb[2] &&
                     view->view_offs % stream_bytes(base) == 0;
  return usual ? "" : "its attention reads the cache in an unusual layout";
}

std::string check_head_size(int64_t dim, const char* what) {
  if (dim >= kMinHeadDim && dim <= kMaxHeadDim && dim % 8 == 0) return "";
  return std::string(what) + " head size " + std::to_string(dim) +
         " is not a multiple of 8 between 32 and 256";
}

// Whole system pages inside the range go back to the system; they read as zeros afterwards.
void give_back(void* data, size_t bytes) {
  constexpr size_t kSystemPage = 4096;
  const size_t skip = (kSystemPage - reinterpret_cast<uintptr_t>(data) % kSystemPage) % kSystemPage;
  if (skip >= bytes) return;
  const size_t whole = (bytes - skip) / kSystemPage * kSystemPage;
  if (whole > 0) madvise(static_cast<char*>(data) + skip, whole, MADV_DONTNEED);
}

}  // namespace

std::mutex& live_caches_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::vector<CacheState*> live_caches_locked() { return live_caches(); }

bool parse_cache_name(const char* name, Side* side, int* model_layer) {
  const bool key = std::strncmp(name, "cache_k_l", 9) == 0;
  if (!key && std::strncmp(name, "cache_v_l", 9) != 0) return false;
  const char* digits = name + 9;
  int value = 0;
  for (const char* c = digits; *c != 0; ++c) {
    if (*c < '0' || *c > '9' || c - digits > 5) return false;
    value = 10 * value + (*c - '0');
  }
  if (*digits == 0) return false;
  *side = key ? Side::kKey : Side::kValue;
  *model_layer = value;
  return true;
}

CacheState::CacheState(Options options) : options_(std::move(options)) {
  const std::lock_guard<std::mutex> lock(live_caches_mutex());
  live_caches().push_back(this);
}

CacheState::~CacheState() {
  const std::lock_guard<std::mutex> lock(live_caches_mutex());
  std::erase(live_caches(), this);
}

Status CacheState::add_tensor(ggml_tensor* tensor, Side side, int model_layer) {
  if (tensor->type != GGML_TYPE_F16) {
    return {Code::kUnsupported, std::string("the cache was asked for with type ") +
                                    ggml_type_name(tensor->type) +
                                    "; kvant needs -ctk f16 -ctv f16 (KVANT_KV sets its own formats)"};
  }
  auto it = std::find_if(layers_.begin(), layers_.end(),
                         [&](const CacheLayer& layer) { return layer.model_layer == model_layer; });
  if (it == layers_.end()) {
    it = layers_.insert(layers_.end(), CacheLayer());
    it->model_layer = model_layer;
  }
  it->tensors[static_cast<int>(side)] = tensor;
  tensors_.push_back(std::make_unique<CacheTensor>(
      CacheTensor{.state = this, .layer = static_cast<int>(it - layers_.begin()), .side = side}));
  tensor->extra = tensors_.back().get();
  return {};
}

void CacheState::set_norms(const std::vector<const ggml_tensor*>& norms) {
  if (!created() && norms.size() > norms_.size()) norms_ = norms;
}

void CacheState::learn(const ggml_tensor* attention) {
  const ggml_tensor* q = attention->src[0];
  const ggml_tensor* k = attention->src[1];
  const ggml_tensor* v = attention->src[2];
  const auto* tensor = static_cast<const CacheTensor*>(k->view_src->extra);
  CacheLayer& layer = layers_[tensor->layer];
  if (layer.kind != LayerKind::kUnseen || created()) return;
  const ggml_tensor* values = layer.tensors[static_cast<int>(Side::kValue)];
  if (values == nullptr) {
    layer.reason = "its values are a part of its keys (multi-head latent attention)";
  } else if (v->view_src != values || tensor->side != Side::kKey) {
    layer.reason = "its attention does not read its own keys and values";
  } else if (q->type != GGML_TYPE_F32) {
    layer.reason = std::string("its queries are ") + ggml_type_name(q->type);
  } else {
    layer.reason = check_view(k, k->view_src);
    if (layer.reason.empty()) layer.reason = check_view(v, v->view_src);
    if (layer.reason.empty()) layer.reason = check_head_size(k->ne[0], "key");
    if (layer.reason.empty()) layer.reason = check_head_size(v->ne[0], "value");
  }
  layer.shape = {.n_query_heads = static_cast<int>(q->ne[2]),
                 .n_kv_heads = static_cast<int>(k->ne[2]),
                 .key_dim = static_cast<int>(k->ne[0]),
                 .value_dim = static_cast<int>(v->ne[0])};
  layer.kind = layer.reason.empty() ? LayerKind::kManaged : LayerKind::kPlain;
}

Status CacheState::check_strict() const {
  if (!options_.strict) return {};
  for (const CacheLayer& layer : layers_) {
    if (layer.kind != LayerKind::kPlain) continue;
    return {Code::kUnsupported, "layer " + std::to_string(layer.model_layer) + " would stay f16 (" +
                                    layer.reason + ") and KVANT_STRICT=1 forbids that"};
  }
  return {};
}

Status CacheState::make_layers(const Scheme& scheme, const std::optional<Calibration>& calibration,
                               std::vector<LayerScheme>* out) {
  layer_ids_.clear();
  std::vector<LayerRequest> requests;
  for (CacheLayer& layer : layers_) {
    if (layer.kind != LayerKind::kManaged) continue;
    const LayerCalibration* basis = nullptr;
    if (calibration.has_value()) {
      const auto found = calibration->layers.find(layer.model_layer);
      if (found != calibration->layers.end()) basis = &found->second;
    }
    layer.id = LayerId{static_cast<int32_t>(layer_ids_.size())};
    layer_ids_.push_back(layer.id.value);
    requests.push_back({layer.shape, basis, "layer " + std::to_string(layer.model_layer)});
  }
  Result<std::vector<LayerScheme>> resolved = resolve_layers(scheme, requests);
  if (!resolved.ok()) {
    return {resolved.status().code(),
            "KVANT_KV=" + options_.scheme + ", " + resolved.status().message() +
                (calibration.has_value() ? " (KVANT_RECIPE=none leaves the calibration out)" : "")};
  }
  for (size_t i = 0; options_.strict && i < requests.size(); ++i) {
    const LayerScheme& layer = resolved.value()[i];
    if (layer.reason.empty()) continue;
    return {Code::kUnsupported, requests[i].name + " would run " + layer.effective + " (" + layer.reason +
                                    ") and KVANT_STRICT=1 forbids that"};
  }
  *out = std::move(resolved.value());
  return {};
}

Status CacheState::create_cache(int n_threads, uint64_t fingerprint) {
  if (created()) return {};
  KVANT_RETURN_IF_ERROR(check_strict());
  const auto managed = std::find_if(layers_.begin(), layers_.end(), [](const CacheLayer& layer) {
    return layer.kind == LayerKind::kManaged;
  });
  if (managed == layers_.end()) return {};
  if (!norms_.empty()) fingerprint = norms_fingerprint(norms_);
  Result<std::optional<Calibration>> calibration = find_calibration(options_, fingerprint);
  if (!calibration.ok()) return calibration.status();
  Result<Scheme> scheme = parse_scheme(options_.scheme, calibration.value().has_value());
  if (!scheme.ok()) return scheme.status();
  std::vector<LayerScheme> schemes;
  KVANT_RETURN_IF_ERROR(make_layers(scheme.value(), calibration.value(), &schemes));
  const ggml_tensor* base = managed->tensors[0];
  const std::lock_guard<std::mutex> lock(mutex_);
  Result<std::unique_ptr<SlotCache>> made = SlotCache::create(
      {.layers = std::move(schemes),
       .n_slots = static_cast<int>(base->ne[1]),
       .n_streams = static_cast<int>(base->ne[2]),
       .window = scheme.value().window,
       .sinks = scheme.value().sinks,
       .max_threads = std::max(n_threads, static_cast<int>(std::thread::hardware_concurrency())),
       .memory = {.limit_bytes = options_.limit_bytes}});
  if (!made.ok()) return made.status();
  Result<std::unique_ptr<AttentionWorkspace>> workspace = AttentionWorkspace::create(made.value().get());
  if (!workspace.ok()) return workspace.status();
  cache_ = std::move(made.value());
  workspace_ = std::move(workspace.value());
  batch_slots_.clear();
  batch_written_.assign(layer_ids_.size() * 2, false);
  return load_staged();
}

// Moves rows that were set before the cache existed, run by run, and gives their memory back.
Status CacheState::load_staged() {
  for (CacheLayer& layer : layers_) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      std::vector<bool> staged = std::move(layer.staged[static_cast<int>(side)]);
      layer.staged[static_cast<int>(side)].clear();
      if (layer.kind != LayerKind::kManaged || staged.empty()) continue;
      const ggml_tensor* base = layer.tensors[static_cast<int>(side)];
      const int64_t slots = base->ne[1];
      for (int64_t row = 0; row < rows_of(base);) {
        if (!staged[row]) {
          ++row;
          continue;
        }
        int64_t end = row + 1;
        while (end < rows_of(base) && end % slots != 0 && staged[end]) ++end;
        const auto* data =
            reinterpret_cast<const uint16_t*>(static_cast<const char*>(base->data) + row * base->nb[1]);
        KVANT_RETURN_IF_ERROR(cache_->write_rows(layer.id, side, StreamId{static_cast<int32_t>(row / slots)},
                                                 static_cast<int>(row % slots), static_cast<int>(end - row),
                                                 data));
        row = end;
      }
      give_back(base->data, ggml_nbytes(base));
    }
  }
  return {};
}

Status CacheState::open_batch(std::span<const int64_t> slots, std::span<const LayerSide> writes) {
  auto written = [&](const LayerSide& w) {
    return static_cast<size_t>(w.layer.value) * 2 + static_cast<size_t>(w.side);
  };
  const bool again = std::any_of(writes.begin(), writes.end(),
                                 [&](const LayerSide& w) { return batch_written_[written(w)]; });
  if (again || !std::equal(slots.begin(), slots.end(), batch_slots_.begin(), batch_slots_.end())) {
    batch_slots_.clear();
    KVANT_RETURN_IF_ERROR(cache_->begin_batch(slots, layer_ids_));
    batch_slots_.assign(slots.begin(), slots.end());
    batch_written_.assign(batch_written_.size(), false);
  }
  for (const LayerSide& w : writes) batch_written_[written(w)] = true;
  return {};
}

void CacheState::cancel_batch() {
  batch_slots_.clear();
  if (created()) cache_->cancel_batch();
}

bool CacheState::in_cache(const CacheTensor& tensor) const {
  return created() && layers_[tensor.layer].kind == LayerKind::kManaged;
}

// Calls whole(stream, slot, count, data) for runs of whole rows and part(stream, slot, begin, bytes, data)
// for pieces of a row.
template <typename Bytes, typename Whole, typename Part>
Status CacheState::for_rows(const ggml_tensor* base, size_t offset, size_t bytes, Bytes* data, Whole whole,
                            Part part) {
  const size_t row_bytes = base->nb[1];
  while (bytes > 0) {
    const StreamId stream{static_cast<int32_t>(offset / stream_bytes(base))};
    const size_t in_stream = offset % stream_bytes(base);
    const int slot = static_cast<int>(in_stream / row_bytes);
    const size_t in_row = in_stream % row_bytes;
    size_t done = 0;
    if (in_row == 0 && bytes >= row_bytes) {
      const size_t count =
          std::min(bytes / row_bytes, static_cast<size_t>(base->ne[1]) - static_cast<size_t>(slot));
      KVANT_RETURN_IF_ERROR(whole(stream, slot, static_cast<int>(count), data));
      done = count * row_bytes;
    } else {
      done = std::min(bytes, row_bytes - in_row);
      KVANT_RETURN_IF_ERROR(part(stream, slot, in_row, done, data));
    }
    offset += done;
    data += done;
    bytes -= done;
  }
  return {};
}

Status CacheState::read(const CacheTensor& tensor, size_t offset, size_t bytes, void* out) {
  const CacheLayer& layer = layers_[tensor.layer];
  const ggml_tensor* base = layer.tensors[static_cast<int>(tensor.side)];
  if (!in_cache(tensor)) {
    std::memcpy(out, static_cast<const char*>(base->data) + offset, bytes);
    return {};
  }
  row_.resize(base->ne[0]);
  return for_rows(
      base, offset, bytes, static_cast<char*>(out),
      [&](StreamId stream, int slot, int count, char* to) {
        return cache_->read_rows(layer.id, tensor.side, stream, slot, count, reinterpret_cast<uint16_t*>(to));
      },
      [&](StreamId stream, int slot, size_t begin, size_t n, char* to) {
        Status status = cache_->read_rows(layer.id, tensor.side, stream, slot, 1, row_.data());
        if (status.ok()) std::memcpy(to, reinterpret_cast<const char*>(row_.data()) + begin, n);
        return status;
      });
}

Status CacheState::write(const CacheTensor& tensor, size_t offset, size_t bytes, const void* in) {
  CacheLayer& layer = layers_[tensor.layer];
  const ggml_tensor* base = layer.tensors[static_cast<int>(tensor.side)];
  if (!in_cache(tensor)) {
    std::memcpy(static_cast<char*>(base->data) + offset, in, bytes);
    if (created() || layer.kind == LayerKind::kPlain || bytes == 0) return {};
    std::vector<bool>& staged = layer.staged[static_cast<int>(tensor.side)];
    staged.resize(rows_of(base), false);
    const size_t first = offset / base->nb[1], last = (offset + bytes - 1) / base->nb[1];
    std::fill(staged.begin() + static_cast<int64_t>(first), staged.begin() + static_cast<int64_t>(last) + 1,
              true);
    return {};
  }
  batch_slots_.clear();
  row_.resize(base->ne[0]);
  return for_rows(
      base, offset, bytes, static_cast<const char*>(in),
      [&](StreamId stream, int slot, int count, const char* from) {
        return cache_->write_rows(layer.id, tensor.side, stream, slot, count,
                                  reinterpret_cast<const uint16_t*>(from));
      },
      [&](StreamId stream, int slot, size_t begin, size_t n, const char* from) {
        KVANT_RETURN_IF_ERROR(cache_->read_rows(layer.id, tensor.side, stream, slot, 1, row_.data()));
        std::memcpy(reinterpret_cast<char*>(row_.data()) + begin, from, n);
        return cache_->write_rows(layer.id, tensor.side, stream, slot, 1, row_.data());
      });
}

bool CacheState::copy_stream(const CacheTensor& tensor, size_t from_offset, size_t to_offset, size_t bytes,
                             Status* status) {
  CacheLayer& layer = layers_[tensor.layer];
  const ggml_tensor* base = layer.tensors[static_cast<int>(tensor.side)];
  const size_t whole = stream_bytes(base);
  if (bytes != whole || from_offset % whole != 0 || to_offset % whole != 0) return false;
  const StreamId from{static_cast<int32_t>(from_offset / whole)}, to{static_cast<int32_t>(to_offset / whole)};
  batch_slots_.clear();
  if (in_cache(tensor)) {
    *status = cache_->copy_stream_side(layer.id, tensor.side, from, to);
    return true;
  }
  const std::vector<bool>& staged = layer.staged[static_cast<int>(tensor.side)];
  if (created() || layer.kind == LayerKind::kPlain) return false;
  for (int64_t slot = 0; !staged.empty() && slot < base->ne[1]; ++slot) {
    if (!staged[from.value * base->ne[1] + slot]) continue;
    const size_t row = static_cast<size_t>(slot) * base->nb[1];
    *status =
        write(tensor, to_offset + row, base->nb[1], static_cast<const char*>(base->data) + from_offset + row);
    if (!status->ok()) break;
  }
  return true;
}

void CacheState::clear() {
  batch_slots_.clear();
  broken_ = {};
  for (CacheLayer& layer : layers_) {
    for (std::vector<bool>& staged : layer.staged) staged.clear();
  }
  if (created()) cache_->clear();
}

CacheReport CacheState::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return last_report_;
  CacheReport r;
  for (const CacheLayer& layer : layers_) {
    if (layer.kind == LayerKind::kManaged) {
      // Not yet, or refused: memory limit, strictness.
      if (!created()) continue;
      r.layers.push_back(cache_->layer(layer.id));
    } else if (layer.kind == LayerKind::kPlain) {
      LayerScheme& plain = r.layers.emplace_back();
      plain.shape = layer.shape;
      plain.requested = options_.scheme;
      plain.effective = kEngineLayer;
      plain.reason = layer.reason;
      for (const ggml_tensor* base : layer.tensors) r.engine_bytes += base != nullptr ? ggml_nbytes(base) : 0;
    } else {
      continue;
    }
    r.model_layers.push_back(layer.model_layer);
  }
  r.isa = active_isa();
  if (!created()) return r;
  const SlotCache::Options& o = cache_->options();
  r.n_slots = o.n_slots;
  r.n_streams = o.n_streams;
  r.window = o.window;
  r.sinks = o.sinks;
  for (int s = 0; s < o.n_streams; ++s) r.used_slots += cache_->used_slots(StreamId{s});
  r.memory = cache_->memory();
  r.peak_bytes = cache_->pool().peak_bytes();
  const ReadCounters& counters = cache_->counters();
  r.pairs_total = counters.pairs_total.load();
  r.pairs_quantized = counters.pairs_quantized.load();
  r.pairs_quantized_v = counters.pairs_quantized_v.load();
  r.pairs_skipped = counters.pairs_skipped.load();
  r.sealed_tiles = cache_->sealed_tiles();
  return r;
}

void CacheState::reset_counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!created()) return;
  ReadCounters& counters = cache_->counters();
  counters.pairs_total = 0;
  counters.pairs_quantized = 0;
  counters.pairs_quantized_v = 0;
  counters.pairs_skipped = 0;
}

void CacheState::close() {
  CacheReport report = this->report();
  {
    const std::lock_guard<std::mutex> lock(live_caches_mutex());
    std::erase(live_caches(), this);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  last_report_ = std::move(report);
  closed_ = true;
  workspace_.reset();
  cache_.reset();
}

}  // namespace kvant::ggml

// A stream (ggml calls it backend): computes graphs, by way of their shadows.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "messages.h"
#include "shadow_graph.h"

namespace kvant::ggml {
namespace {

// Splits of one graph, prompt and generation: few are alive at a time.
constexpr size_t kShadows = 8;

struct Stream {
  CpuStream cpu;
  std::vector<std::unique_ptr<ShadowGraph>> shadows;  // most recently used last
  std::vector<std::shared_ptr<CacheState>> caches;    // that this stream has used
  std::string last_error;                             // the same line is not printed for every token
};

Stream& stream_of(ggml_backend_t backend) { return *static_cast<Stream*>(backend->context); }

void say_error(Stream* stream, const std::string& message) {
  if (message == stream->last_error) return;
  stream->last_error = message;
  print_failure(message);
}

bool in_slot_cache(const LayerScheme& layer) { return layer.effective != kEngineLayer; }

bool has_slot_cache(const CacheReport& cache) {
  return std::any_of(cache.layers.begin(), cache.layers.end(), in_slot_cache);
}

// One line for all caches of a model (those with window layers have two); one more when layers stay f16.
void announce(const std::vector<CacheReport>& caches) {
  CacheReport all = caches.front();
  for (size_t i = 1; i < caches.size(); ++i) {
    all.layers.insert(all.layers.end(), caches[i].layers.begin(), caches[i].layers.end());
  }
  if (has_slot_cache(all)) print_note(describe_scheme(all));
  std::string reason;
  int n = 0;
  for (const LayerScheme& layer : all.layers) {
    if (!layer.reason.empty() && n++ == 0) reason = layer.reason;
  }
  if (n > 0) print_note(std::to_string(n) + " layers run differently than asked for: " + reason);
}

void note_caches(Stream* stream, const ShadowGraph& shadow) {
  std::vector<CacheReport> fresh;
  for (const std::shared_ptr<CacheState>& state : shadow.caches()) {
    if (std::find(stream->caches.begin(), stream->caches.end(), state) != stream->caches.end()) continue;
    CacheReport report = state->report();
    if (report.layers.empty()) continue;
    stream->caches.push_back(state);
    fresh.push_back(std::move(report));
  }
  if (!fresh.empty()) announce(fresh);
}

ShadowGraph* find_shadow(Stream* stream, const ggml_cgraph& graph, Status* error) {
  std::vector<std::unique_ptr<ShadowGraph>>& shadows = stream->shadows;
  const auto it =
      std::find_if(shadows.rbegin(), shadows.rend(), [&](const auto& s) { return s->is_for(graph); });
  if (it != shadows.rend()) {
    std::rotate(it.base() - 1, it.base(), shadows.end());
    return shadows.back().get();
  }
  Result<std::unique_ptr<ShadowGraph>> built = ShadowGraph::build(graph, stream->cpu.n_threads());
  if (!built.ok()) {
    *error = built.status();
    return nullptr;
  }
  if (shadows.size() == kShadows) shadows.erase(shadows.begin());
  shadows.push_back(std::move(built.value()));
  note_caches(stream, *shadows.back());
  return shadows.back().get();
}

ggml_status stream_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  Stream& stream = stream_of(backend);
  Status error;
  ShadowGraph* shadow = find_shadow(&stream, *graph, &error);
  const ggml_status status =
      shadow != nullptr ? shadow->compute(*graph, stream.cpu, &error) : GGML_STATUS_FAILED;
  if (error.code() == Code::kPoolExhausted)
    error = Status(error.code(), error.message() + " (KVANT_LIMIT_MIB or --limit raises it)");
  if (!error.ok()) {
    keep_failure(error);
    say_error(&stream, error.message());
  } else if (status == GGML_STATUS_SUCCESS) {
    stream.last_error.clear();
  }
  return status;
}

const char* stream_name(ggml_backend_t) { return "KVANT"; }

void stream_free(ggml_backend_t backend) {
  Stream* stream = &stream_of(backend);
  std::vector<CacheReport> reports;
  for (const auto& state : stream->caches) {
    CacheReport report = state->report();
    if (has_slot_cache(report)) reports.push_back(std::move(report));
  }
  if (!reports.empty()) print_note(describe_use(reports));
  delete stream;
  delete backend;
}

}  // namespace

ggml_backend_t make_stream(ggml_backend_dev_t device) {
  static ggml_guid guid = {0x6b, 0x76, 0x61, 0x6e, 0x74, 0x2d, 0x67, 0x67,
                           0x6d, 0x6c, 0x2d, 0x73, 0x74, 0x72, 0x6d, 0x31};
  auto stream = std::make_unique<Stream>();
  if (!stream->cpu.ok()) {
    print_error("ggml's CPU backend is not loaded; the KVANT device needs it");
    return nullptr;
  }
  ggml_backend_i interface = {};
  interface.get_name = stream_name;
  interface.free = stream_free;
  interface.graph_compute = stream_compute;
  return new ggml_backend{.guid = &guid, .iface = interface, .device = device, .context = stream.release()};
}

void set_stream_threads(ggml_backend_t backend, int n_threads) {
  stream_of(backend).cpu.set_n_threads(n_threads);
}

void set_stream_abort(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  if (cpu_device().set_abort_callback != nullptr) {
    cpu_device().set_abort_callback(stream_of(backend).cpu.backend(), callback, data);
  }
}

}  // namespace kvant::ggml

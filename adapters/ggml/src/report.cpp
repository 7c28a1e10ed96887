// What runs and what it used: as structs, as JSON, as lines for people.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "buffer.h"
#include "messages.h"
#include "settings.h"

namespace kvant::ggml {
namespace {

constexpr double kMib = 1024.0 * 1024.0;

std::mutex failure_mutex;
Status last_failure;  // until it is taken
std::atomic<bool> failures_are_printed = true;

std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

bool in_slot_cache(const LayerScheme& layer) { return layer.effective != kEngineLayer; }

struct Bits {
  double key = 0, value = 0, mean = 16;
};

// Weighted by values: layers may differ in heads and head sizes.
Bits bits_of(const CacheReport& cache) {
  double keys = 0, values = 0, key_bits = 0, value_bits = 0;
  for (const LayerScheme& layer : cache.layers) {
    if (!in_slot_cache(layer)) continue;
    const double nk = static_cast<double>(layer.shape.n_kv_heads) * layer.shape.key_dim;
    const double nv = static_cast<double>(layer.shape.n_kv_heads) * layer.shape.value_dim;
    keys += nk;
    values += nv;
    key_bits += nk * layer.key_bits();
    value_bits += nv * layer.value_bits();
  }
  if (keys == 0) return {};
  return {key_bits / keys, value_bits / values, (key_bits + value_bits) / (keys + values)};
}

size_t f16_bytes_per_slot(const CacheReport& cache) {
  size_t bytes = 0;
  for (const LayerScheme& layer : cache.layers) {
    if (!in_slot_cache(layer)) continue;
    bytes += sizeof(uint16_t) * static_cast<size_t>(layer.shape.n_kv_heads) *
             static_cast<size_t>(layer.shape.key_dim + layer.shape.value_dim);
  }
  return bytes;
}

nlohmann::json layer_json(const LayerScheme& layer, int model_layer) {
  return {{"layer", model_layer},
          {"query_heads", layer.shape.n_query_heads},
          {"kv_heads", layer.shape.n_kv_heads},
          {"key_dim", layer.shape.key_dim},
          {"value_dim", layer.shape.value_dim},
          {"requested", layer.requested},
          {"effective", layer.effective},
          {"reason", layer.reason},
          {"bits_k", layer.key_bits()},
          {"bits_v", layer.value_bits()}};
}

nlohmann::json cache_json(const CacheReport& cache) {
  const Bits bits = bits_of(cache);
  nlohmann::json layers = nlohmann::json::array();
  for (size_t i = 0; i < cache.layers.size(); ++i) {
    layers.push_back(layer_json(cache.layers[i], cache.model_layers[i]));
  }
  return {{"slots", cache.n_slots},
          {"streams", cache.n_streams},
          {"window", cache.window},
          {"sinks", cache.sinks},
          {"used_slots", cache.used_slots},
          {"bits_k", bits.key},
          {"bits_v", bits.value},
          {"bits_per_value", bits.mean},
          {"bytes",
           {{"packed", cache.memory.tile_bytes},
            {"exact_rows", cache.memory.exact_row_bytes},
            {"tables", cache.memory.table_bytes},
            {"workspace", cache.memory.workspace_bytes},
            {"total", cache.memory.total()},
            {"peak", cache.peak_bytes},
            {"engine_f16", cache.engine_bytes}}},
          {"pairs_total", cache.pairs_total},
          {"pairs_quantized_k", cache.pairs_quantized},
          {"pairs_quantized_v", cache.pairs_quantized_v},
          {"pairs_skipped", cache.pairs_skipped},
          {"sealed_tiles", cache.sealed_tiles},
          {"isa", cache.isa},
          {"layers", layers}};
}

}  // namespace

std::vector<CacheReport> report() {
  const std::lock_guard<std::mutex> lock(live_caches_mutex());
  std::vector<CacheReport> reports;
  for (const CacheState* state : live_caches_locked()) {
    CacheReport r = state->report();
    if (!r.layers.empty()) reports.push_back(std::move(r));
  }
  return reports;
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(live_caches_mutex());
  for (CacheState* state : live_caches_locked()) state->reset_counters();
}

std::string report_json() {
  nlohmann::json caches = nlohmann::json::array();
  for (const CacheReport& cache : report()) caches.push_back(cache_json(cache));
  return nlohmann::json{{"version", 1}, {"caches", caches}}.dump();
}

std::string describe_scheme(const CacheReport& cache) {
  std::string name, effective = "exact";
  int inside = 0;
  for (const LayerScheme& layer : cache.layers) {
    if (!in_slot_cache(layer)) continue;
    if (inside++ == 0) effective = layer.effective;
    if (effective == layer.effective) continue;
    const std::string& asked = layer.requested;
    effective = asked.ends_with("fit=1") ? asked.substr(0, asked.find(",w=")) + " fitted" : "mixed formats";
  }
  const Bits bits = bits_of(cache);
  return format(
      "%s, %.2f bits per value (k %.2f, v %.2f), window %d, sinks %d, %.1f times smaller than f16, isa %s, "
      "%d layers",
      effective.c_str(), bits.mean, bits.key, bits.value, cache.window, cache.sinks, 16.0 / bits.mean,
      cache.isa.c_str(), inside);
}

std::string describe_use(const std::vector<CacheReport>& caches) {
  MemoryReport sum;
  size_t peak = 0, f16 = 0;
  int used = 0;
  uint64_t pairs = 0, quantized = 0, skipped = 0;
  for (const CacheReport& c : caches) {
    sum.tile_bytes += c.memory.tile_bytes;
    sum.exact_row_bytes += c.memory.exact_row_bytes;
    sum.table_bytes += c.memory.table_bytes;
    sum.workspace_bytes += c.memory.workspace_bytes;
    peak += c.peak_bytes;
    f16 += f16_bytes_per_slot(c) * static_cast<size_t>(c.used_slots);
    used = std::max(used, c.used_slots);
    pairs += c.pairs_total;
    quantized += c.pairs_quantized;
    skipped += c.pairs_skipped;
  }
  const auto share = [pairs](uint64_t n) {
    return pairs == 0 ? 0.0 : 100.0 * static_cast<double>(n) / static_cast<double>(pairs);
  };
  std::string line = format(
      "%d slots in %.2f MiB (packed %.2f, exact rows %.2f, tables %.2f, workspace %.2f; f16 rows alone: "
      "%.2f), peak %.2f MiB, %.1f %% of key reads from packed tiles",
      used, sum.total() / kMib, sum.tile_bytes / kMib, sum.exact_row_bytes / kMib, sum.table_bytes / kMib,
      sum.workspace_bytes / kMib, f16 / kMib, peak / kMib, share(quantized));
  if (skipped != 0) line += format(", %.2f %% of value reads skipped", share(skipped));
  return line;
}

void print_error(const std::string& message) { std::fprintf(stderr, "kvant: %s\n", message.c_str()); }

void print_note(const std::string& message) {
  if (!options().quiet) std::fprintf(stderr, "kvant: %s\n", message.c_str());
}

void keep_failure(const Status& status) {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  last_failure = status;
}

void print_failure(const std::string& message) {
  if (failures_are_printed) print_error(message);
}

Status take_error() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  return std::exchange(last_failure, Status());
}

void print_errors(bool on) { failures_are_printed = on; }

}  // namespace kvant::ggml

// The ggml backend: device "KVANT", whose cache tensors are SlotCaches. Works in process (register
// backend_reg() with ggml_backend_register) and as a module (libggml-kvant.so through GGML_BACKEND_PATH).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "kvant/attention.h"
#include "kvant/slot_cache.h"
#include "kvant/status.h"

namespace kvant::ggml {

// What stock programs set through KVANT_* variables and kvant sets through configure(). Applies to caches
// that are created afterwards.
struct Options {
  std::string scheme = "kv4";        // KVANT_KV
  AttentionPath attention = AttentionPath::kFused;  // KVANT_ATTENTION=fused|dequant
  std::string isa;                   // KVANT_ISA; empty: the best of this CPU
  std::string recipe;                // KVANT_RECIPE: calibration folder or file; empty: look in the cache dir
  bool strict = false;               // KVANT_STRICT=1: requested != effective is an error
  bool quiet = false;                // KVANT_QUIET=1: no lines on stderr
  size_t limit_bytes = SIZE_MAX;     // KVANT_LIMIT_MIB
};

ggml_backend_reg_t backend_reg();
// Checks everything that can be checked without a model. Names the option and the nearest legal value.
Status configure(const Options& options);
Options options();
// Options from KVANT_* variables over `base`; the first malformed variable is the error.
Status options_from_environment(Options base, Options* out);

// One live cache (one llama.cpp cache object; models with window layers have two).
struct CacheReport {
  std::vector<LayerScheme> layers;
  std::vector<int> model_layers;  // layer number in the model, per entry of `layers`
  int n_slots = 0;
  int n_streams = 0;
  int window = 0;
  int sinks = 0;
  int used_slots = 0;             // slots that hold something
  MemoryReport memory;
  size_t peak_bytes = 0;
  uint64_t pairs_total = 0, pairs_quantized = 0, pairs_quantized_v = 0;
  uint64_t sealed_tiles = 0;
  std::string isa;
};
std::vector<CacheReport> report();
void reset_counters();

}  // namespace kvant::ggml

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
  std::string scheme = "kv4";                       // KVANT_KV
  AttentionPath attention = AttentionPath::kFused;  // KVANT_ATTENTION=fused|dequant
  std::string isa = {};                             // KVANT_ISA; empty: the best of this CPU
  std::string recipe = {};        // KVANT_RECIPE: calibration file, folder, "none"; empty: the cache dir
  bool strict = false;            // KVANT_STRICT=1: requested != effective is an error
  bool quiet = false;             // KVANT_QUIET=1: no lines on stderr
  bool skip = true;               // KVANT_SKIP=0: read values even where weights cannot matter
  size_t limit_bytes = SIZE_MAX;  // KVANT_LIMIT_MIB
};

// Registered once with ggml_backend_register(); ggml's CPU backend must be registered before the device is
// used. Functions by name (ggml_backend_reg_get_proc_address), for programs that load the module themselves:
//   kvant_configure    const char* (*)(const char* text)   "kv=kv4,w=256;attention=fused;isa=avx2;strict=1"
//                      gives null, or the error
//   kvant_report_json  const char* (*)(void)               report_json()
// What they return is valid until the next call of this thread.
ggml_backend_reg_t backend_reg();
// Whether the ggml that runs is the one this was built for; the message names both versions.
Status check_ggml();
// Checks everything that can be checked without a model. Names the option and the nearest legal value.
Status configure(const Options& options);
Options options();
// Options from KVANT_* variables over `base`; the first malformed variable is the error.
Status options_from_environment(Options base, Options* out);
// A line for each KVANT_* variable that nothing reads, with the nearest that something does; without those
// that are errors of options_from_environment().
std::vector<std::string> unknown_variables();

// One live cache (one llama.cpp cache object; models with window layers have two).
struct CacheReport {
  std::vector<LayerScheme> layers;
  std::vector<int> model_layers;  // layer number in the model, per entry of `layers`
  int n_slots = 0;
  int n_streams = 0;
  int window = 0;
  int sinks = 0;
  int used_slots = 0;  // slots that hold something
  MemoryReport memory;
  size_t peak_bytes = 0;
  size_t engine_bytes = 0;  // f16 address space of layers that stay llama.cpp's (see their `reason`)
  uint64_t pairs_total = 0, pairs_quantized = 0, pairs_quantized_v = 0, pairs_skipped = 0;
  uint64_t sealed_tiles = 0;
  std::string isa;
};
// Safe from any thread.
std::vector<CacheReport> report();
void reset_counters();

// Why the last graph that failed could not be computed, of any stream, or what else failed since; ok when
// nothing failed since the last call. Engines only see that a graph failed.
Status take_error();
// Whether errors of caches and graphs also go to stderr (the default). Off for programs that print what
// take_error() gives.
void print_errors(bool on);
// What report() says, as one JSON object: {"version":1,"caches":[...]}; docs/backend.md lists the fields.
std::string report_json();
// One line for people: the scheme that the caches run, and what they used.
std::string describe_scheme(const CacheReport& cache);
std::string describe_use(const std::vector<CacheReport>& caches);

}  // namespace kvant::ggml

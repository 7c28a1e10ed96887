// Calibration of a model: a basis per layer, KV head and side, kept as a GGUF file that is found by the
// model's fingerprint. Made by `kvant calibrate`, read by the backend.
//
// File: metadata kvant.version, kvant.fingerprint, kvant.model, kvant.text_hash, kvant.tokens; tensors
// kvant.{key,value}.<layer> of shape [dim, dim, heads] (binary16, row i of head h is the i-th basis vector)
// and kvant.centre.<layer> of shape [key_dim, heads] (f32). Beside them, f32, what quantization is expected
// to cost (ErrorModel): kvant.{key,value}_spectrum.<layer> [dim, heads] and kvant.{key,value}_error.<layer>
// [4, heads] = excess, rotated, per channel, largest. Files without those are read; their heads never escape.
// kvant.checksum: XXH3-64 over all of that; files of earlier builds have none and are read unchecked.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kvant/layer_scheme.h"
#include "kvant/status.h"

struct ggml_cgraph;

namespace kvant::ggml {

struct Calibration {
  uint64_t fingerprint = 0;
  std::string model;       // name in the model file, for messages
  uint64_t text_hash = 0;  // XXH3-64 of the calibration text
  int64_t tokens = 0;
  std::map<int, LayerCalibration> layers;  // by layer number in the model
};

// XXH3-64 over the f32 attention norm weights (blk.<n>.attn_norm.weight, in layer order), which every
// quantization of a model shares; 0 when the model has none.
Result<uint64_t> model_fingerprint(const std::string& model_path);
// The same, from the weights that a compute graph reads; 0 when it reads none.
uint64_t graph_fingerprint(struct ::ggml_cgraph* graph);

// $KVANT_HOME, else $XDG_CACHE_HOME/kvant, else ~/.cache/kvant.
std::string cache_home();
std::string calibration_path(uint64_t fingerprint);

bool all_finite(const std::vector<float>& values);

Status save_calibration(const Calibration& calibration, const std::string& path);
// kIo: cannot be read, or is no calibration; kCorrupt: damaged; kMismatch: made for another fingerprint
// (unless `expected` is 0) or version.
Result<Calibration> load_calibration(const std::string& path, uint64_t expected);

}  // namespace kvant::ggml

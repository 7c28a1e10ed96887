// What a model file says about its attention, read from its header only.
#pragma once

#include <string>
#include <vector>

#include "kvant/calibration_file.h"
#include "kvant/slot_cache.h"
#include "kvant/status.h"
#include "kvant/types.h"

namespace kvant::eval {

struct ShapeLayer {
  LayerShape shape;
  int index = 0;          // in the model
  bool windowed = false;  // keeps the newest `sliding_window` tokens only
};

struct ModelShape {
  std::string name;
  std::string architecture;
  int train_context = 0;
  int sliding_window = 0;          // 0: none
  std::vector<ShapeLayer> layers;  // those with a cache, in order
};

// kIo: cannot be read, or is no model; kUnsupported for models whose cache kvant does not manage (latent
// attention, recurrent ones).
Result<ModelShape> read_model_shape(const std::string& path);

// Bits per stored value of one side: of its tiles, or 16 when the side stays binary16 rows.
double stored_bits(const LayerScheme& layer, Side side);

// Slots that llama.cpp gives each stream of a cache: multiples of 256.
int full_slots(int context);
// Of the layers with a sliding window, with llama.cpp's default ubatch.
int windowed_slots(int context, int sliding_window, int n_ubatch = 512);

struct PlanOptions {
  std::string scheme = "kv4";
  int context = 4096;
  int sequences = 1;
  int threads = 1;  // workspace; at least the machine's, as the backend does
  int n_ubatch = 512;
  const ggml::Calibration* calibration = nullptr;  // of the model: decides what registered names stand for
};

struct Plan {
  MemoryReport memory;   // with every sequence at `context` tokens
  size_t f16_bytes = 0;  // the same tokens in binary16 rows
  double bits_k = 16, bits_v = 16, bits = 16;
  std::vector<LayerScheme> layers;
};

// What the backend's caches will hold: the same formula as the allocator's counter. Window layers count what
// their cache holds when `context` tokens have passed.
Result<Plan> plan_model(const ModelShape& shape, const PlanOptions& options);

}  // namespace kvant::eval

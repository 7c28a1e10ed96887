#include "kvant/model_shape.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include "ggml.h"
#include "gguf.h"

namespace kvant::eval {
namespace {

using GgufPtr = std::unique_ptr<gguf_context, void (*)(gguf_context*)>;

// Values of one architecture: "qwen2.block_count" is asked for as "block_count".
class Metadata {
 public:
  Metadata(const gguf_context* file, std::string architecture)
      : file_(file), prefix_(std::move(architecture) + ".") {}

  // Element `index` of an array, or the scalar.
  std::optional<int64_t> integer(std::string_view key, int64_t index = 0) const {
    const int64_t id = gguf_find_key(file_, (prefix_ + std::string(key)).c_str());
    if (id < 0) return std::nullopt;
    if (gguf_get_kv_type(file_, id) != GGUF_TYPE_ARRAY)
      return number(gguf_get_kv_type(file_, id), gguf_get_val_data(file_, id), 0);
    if (index >= static_cast<int64_t>(gguf_get_arr_n(file_, id))) return std::nullopt;
    if (gguf_get_arr_type(file_, id) == GGUF_TYPE_STRING) return std::nullopt;
    return number(gguf_get_arr_type(file_, id), gguf_get_arr_data(file_, id), index);
  }
  bool is_array(std::string_view key) const {
    const int64_t id = gguf_find_key(file_, (prefix_ + std::string(key)).c_str());
    return id >= 0 && gguf_get_kv_type(file_, id) == GGUF_TYPE_ARRAY;
  }

 private:
  static std::optional<int64_t> number(gguf_type type, const void* data, int64_t i) {
    switch (type) {
      case GGUF_TYPE_UINT8:
        return static_cast<const uint8_t*>(data)[i];
      case GGUF_TYPE_INT8:
        return static_cast<const int8_t*>(data)[i];
      case GGUF_TYPE_UINT16:
        return static_cast<const uint16_t*>(data)[i];
      case GGUF_TYPE_INT16:
        return static_cast<const int16_t*>(data)[i];
      case GGUF_TYPE_UINT32:
        return static_cast<const uint32_t*>(data)[i];
      case GGUF_TYPE_INT32:
        return static_cast<const int32_t*>(data)[i];
      case GGUF_TYPE_UINT64:
        return static_cast<int64_t>(static_cast<const uint64_t*>(data)[i]);
      case GGUF_TYPE_INT64:
        return static_cast<const int64_t*>(data)[i];
      case GGUF_TYPE_BOOL:
        return static_cast<const int8_t*>(data)[i] != 0;
      default:
        return std::nullopt;
    }
  }
  const gguf_context* file_;
  std::string prefix_;
};

std::string text_of(const gguf_context* file, const char* key) {
  const int64_t id = gguf_find_key(file, key);
  return id >= 0 && gguf_get_kv_type(file, id) == GGUF_TYPE_STRING ? gguf_get_val_str(file, id) : "";
}

// Every how-manieth layer sees all tokens, for architectures whose files do not say. 0: unknown.
int default_pattern(std::string_view architecture) {
  if (architecture == "gemma2" || architecture == "gpt-oss") return 2;
  if (architecture == "gemma3") return 6;
  if (architecture == "gemma3n") return 5;
  if (architecture == "cohere2" || architecture == "exaone4" || architecture == "olmo2") return 4;
  return 0;
}

bool is_windowed(const Metadata& meta, const std::string& architecture, int layer) {
  if (meta.is_array("attention.sliding_window_pattern")) {
    return meta.integer("attention.sliding_window_pattern", layer).value_or(0) != 0;
  }
  const int pattern = static_cast<int>(
      meta.integer("attention.sliding_window_pattern").value_or(default_pattern(architecture)));
  return pattern > 0 && layer % pattern < pattern - 1;
}

Status read_layers(const gguf_context* file, const Metadata& meta, ModelShape* out) {
  const int n_layers = static_cast<int>(meta.integer("block_count").value_or(0));
  const int64_t embedding = meta.integer("embedding_length").value_or(0);
  if (n_layers <= 0 || n_layers > 4096 || embedding <= 0) {
    return {Code::kIo, "the model file names no layers (block_count, embedding_length)"};
  }
  for (int layer = 0; layer < n_layers; ++layer) {
    const int64_t heads = meta.integer("attention.head_count", layer).value_or(0);
    const int64_t kv_heads = meta.integer("attention.head_count_kv", layer).value_or(heads);
    if (heads <= 0 || kv_heads <= 0) continue;
    const std::string block = "blk." + std::to_string(layer) + ".";
    const bool attends = gguf_find_tensor(file, (block + "attn_k.weight").c_str()) >= 0 ||
                         gguf_find_tensor(file, (block + "attn_qkv.weight").c_str()) >= 0;
    if (!attends) continue;
    ShapeLayer entry;
    entry.index = layer;
    entry.windowed = out->sliding_window > 0 && is_windowed(meta, out->architecture, layer);
    const std::string suffix = entry.windowed && meta.integer("attention.key_length_swa") ? "_swa" : "";
    entry.shape = {
        .n_query_heads = static_cast<int>(heads),
        .n_kv_heads = static_cast<int>(kv_heads),
        .key_dim =
            static_cast<int>(meta.integer("attention.key_length" + suffix).value_or(embedding / heads)),
        .value_dim =
            static_cast<int>(meta.integer("attention.value_length" + suffix).value_or(embedding / heads))};
    out->layers.push_back(entry);
  }
  if (out->layers.empty()) {
    return {Code::kUnsupported,
            "architecture " + out->architecture + " has no attention layers that kvant manages"};
  }
  return {};
}

void add(MemoryReport* sum, const MemoryReport& part) {
  sum->tile_bytes += part.tile_bytes;
  sum->exact_row_bytes += part.exact_row_bytes;
  sum->table_bytes += part.table_bytes;
  sum->workspace_bytes += part.workspace_bytes;
}

const LayerCalibration* calibration_of(const PlanOptions& options, int layer) {
  if (options.calibration == nullptr) return nullptr;
  const auto found = options.calibration->layers.find(layer);
  return found == options.calibration->layers.end() ? nullptr : &found->second;
}

void set_bits(Plan* plan) {
  double keys = 0, values = 0, key_bits = 0, value_bits = 0;
  for (const LayerScheme& layer : plan->layers) {
    const double nk = static_cast<double>(layer.shape.n_kv_heads) * layer.shape.key_dim;
    const double nv = static_cast<double>(layer.shape.n_kv_heads) * layer.shape.value_dim;
    keys += nk;
    values += nv;
    key_bits += nk * stored_bits(layer, Side::kKey);
    value_bits += nv * stored_bits(layer, Side::kValue);
  }
  plan->bits_k = key_bits / keys;
  plan->bits_v = value_bits / values;
  plan->bits = (key_bits + value_bits) / (keys + values);
}

}  // namespace

double stored_bits(const LayerScheme& layer, Side side) {
  bool exact = layer.exact;
  for (const HeadScheme& head : layer.heads) {
    exact = exact || format_of(head, side).exact();
  }
  if (exact) return 16;
  return side == Side::kKey ? layer.key_bits() : layer.value_bits();
}

int full_slots(int context) { return (context + 255) / 256 * 256; }

int windowed_slots(int context, int sliding_window, int n_ubatch) {
  return full_slots(std::min(full_slots(context), sliding_window + n_ubatch));
}

Result<ModelShape> read_model_shape(const std::string& path) {
  if (FILE* f = std::fopen(path.c_str(), "rb"); f != nullptr) {
    std::fclose(f);
  } else {
    return Status(Code::kIo, "model " + path + " cannot be read");
  }
  const GgufPtr file(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}), gguf_free);
  if (file == nullptr) return Status(Code::kIo, "model " + path + " is not a GGUF file");
  ModelShape shape;
  shape.architecture = text_of(file.get(), "general.architecture");
  shape.name = text_of(file.get(), "general.name");
  const Metadata meta(file.get(), shape.architecture);
  if (meta.integer("attention.kv_lora_rank").value_or(0) > 0) {
    return Status(Code::kUnsupported,
                  "model " + path +
                      ": multi-head latent attention stays llama.cpp's own cache, there is nothing to plan");
  }
  shape.train_context = static_cast<int>(meta.integer("context_length").value_or(0));
  shape.sliding_window = static_cast<int>(meta.integer("attention.sliding_window").value_or(0));
  Status status = read_layers(file.get(), meta, &shape);
  if (!status.ok()) return Status(status.code(), "model " + path + ": " + status.message());
  return shape;
}

// Figures beyond this would not fit their integers: tables and scratch memory add less than 16 bytes per
// byte.
constexpr double kMostBytes = 0x1p58;

Status check_size(const ModelShape& shape, const PlanOptions& options) {
  double values = 0;
  for (const ShapeLayer& layer : shape.layers) {
    values += static_cast<double>(layer.shape.n_kv_heads) * (layer.shape.key_dim + layer.shape.value_dim);
  }
  const double tokens = static_cast<double>(full_slots(options.context)) * options.sequences;
  if (2 * values * tokens <= kMostBytes) return {};
  return {
      Code::kOutOfRange,
      "--ctx-size " + std::to_string(options.context) + " with " + std::to_string(options.sequences) +
          " sequences is more than 2^58 bytes of f16 rows; the nearest --ctx-size is " +
          std::to_string(static_cast<int64_t>(kMostBytes / (2 * values) / options.sequences) / 256 * 256)};
}

// Layers with a sliding window. A page is sealed when a query sees it beyond the exact window, which queries
// that see no further than that never do. A cache that has gone round holds the pages of the newest tokens,
// wherever in its page the newest is, with the tile of the page that is written again; its sinks are gone.
MemoryReport plan_windowed(SlotCache::Options cache, int context, int sliding_window) {
  MemoryReport report = plan_memory(cache, std::min(context, cache.n_slots));
  const bool seals = sliding_window > cache.window;
  if (seals && context <= cache.n_slots) return report;
  const int pages = cache.n_slots / kPageTokens;
  const int newest = (std::max(cache.window, 1) + kPageTokens - 2) / kPageTokens + 1;
  const int sealed = seals ? pages - newest : 0;
  cache.sinks = 0;
  cache.window = (pages - sealed) * kPageTokens;
  const MemoryReport rows = plan_memory(cache, std::min(context, cache.n_slots));
  report.exact_row_bytes = rows.exact_row_bytes;
  report.tile_bytes = sealed > 0 ? rows.tile_bytes / sealed * (sealed + 1) : 0;
  return report;
}

Result<Plan> plan_model(const ModelShape& shape, const PlanOptions& options) {
  KVANT_RETURN_IF_ERROR(check_size(shape, options));
  Result<Scheme> scheme = parse_scheme(options.scheme, options.calibration != nullptr);
  if (!scheme.ok()) return scheme.status();
  Plan plan;
  for (const bool windowed : {false, true}) {
    const int slots = windowed ? windowed_slots(options.context, shape.sliding_window, options.n_ubatch)
                               : full_slots(options.context);
    SlotCache::Options cache;
    cache.n_slots = slots;
    cache.n_streams = options.sequences;
    cache.window = scheme.value().window;
    cache.sinks = scheme.value().sinks;
    cache.max_threads = std::max(options.threads, static_cast<int>(std::thread::hardware_concurrency()));
    const int tokens = std::min(options.context, slots);
    std::vector<LayerRequest> requests;
    for (const ShapeLayer& layer : shape.layers) {
      if (layer.windowed != windowed) continue;
      requests.push_back({layer.shape, calibration_of(options, layer.index), ""});
      plan.f16_bytes += sizeof(uint16_t) * static_cast<size_t>(layer.shape.n_kv_heads) *
                        static_cast<size_t>(layer.shape.key_dim + layer.shape.value_dim) *
                        static_cast<size_t>(tokens) * static_cast<size_t>(options.sequences);
    }
    Result<std::vector<LayerScheme>> resolved = resolve_layers(scheme.value(), requests);
    if (!resolved.ok()) return resolved.status();
    cache.layers = resolved.value();
    plan.layers.insert(plan.layers.end(), cache.layers.begin(), cache.layers.end());
    if (cache.layers.empty()) continue;
    add(&plan.memory,
        windowed ? plan_windowed(cache, options.context, shape.sliding_window) : plan_memory(cache, tokens));
  }
  set_bits(&plan);
  return plan;
}

}  // namespace kvant::eval

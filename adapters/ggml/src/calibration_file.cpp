#include "kvant/calibration_file.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ggml.h"
#include "gguf.h"

namespace kvant::ggml {
namespace {

constexpr uint32_t kVersion = 1;
constexpr const char* kNormFormat = "blk.%d.attn_norm.weight";

struct GgufDeleter {
  void operator()(gguf_context* p) const { gguf_free(p); }
};
struct GgmlDeleter {
  void operator()(ggml_context* p) const { ggml_free(p); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;
using GgmlPtr = std::unique_ptr<ggml_context, GgmlDeleter>;

// Hashes the norm of each layer in order; layers may be given in any order but must be complete up to the
// last one.
class NormHash {
 public:
  void add(int layer, const void* data, size_t bytes) {
    if (layer >= static_cast<int>(hashes_.size())) hashes_.resize(layer + 1, 0);
    hashes_[layer] = XXH3_64bits(data, bytes);
  }
  uint64_t finish() const {
    return hashes_.empty() ? 0 : XXH3_64bits(hashes_.data(), hashes_.size() * sizeof(uint64_t));
  }

 private:
  std::vector<uint64_t> hashes_;
};

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// excess, rotated, per channel, largest.
constexpr int kErrorWords = 4;
constexpr const char* kChecksum = "kvant.checksum";

uint64_t mix(uint64_t hash, const void* data, size_t bytes) {
  return XXH3_64bits_withSeed(data, bytes, hash);
}

// Over everything that the file says: what it is for, and names, types, shapes and data of its tensors.
uint64_t checksum_of(const Calibration& head, ggml_context* tensors) {
  const uint64_t numbers[] = {head.fingerprint, head.text_hash, static_cast<uint64_t>(head.tokens)};
  uint64_t hash = mix(0, numbers, sizeof numbers);
  hash = mix(hash, head.model.data(), head.model.size());
  for (ggml_tensor* t = ggml_get_first_tensor(tensors); t != nullptr; t = ggml_get_next_tensor(tensors, t)) {
    // gguf_init_from_file puts the data of all tensors into one of its own.
    if (std::strncmp(t->name, "kvant.", 6) != 0) continue;
    hash = mix(hash, t->name, std::strlen(t->name));
    hash = mix(hash, &t->type, sizeof t->type);
    hash = mix(hash, t->ne, sizeof t->ne);
    hash = mix(hash, t->data, ggml_nbytes(t));
  }
  return hash;
}

void add_error_models(ggml_context* ctx, gguf_context* file, const char* side, int layer,
                      const std::vector<std::shared_ptr<const CalibratedBasis>>& heads) {
  const int dim = heads.front()->dim;
  for (const auto& head : heads) {
    if (static_cast<int>(head->error.spectrum.size()) != dim) return;
  }
  const auto n = static_cast<int64_t>(heads.size());
  ggml_tensor* spectrum = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, dim, n);
  ggml_format_name(spectrum, "kvant.%s_spectrum.%d", side, layer);
  ggml_tensor* error = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kErrorWords, n);
  ggml_format_name(error, "kvant.%s_error.%d", side, layer);
  for (int64_t h = 0; h < n; ++h) {
    const ErrorModel& model = heads[h]->error;
    std::copy_n(model.spectrum.data(), dim, static_cast<float*>(spectrum->data) + h * dim);
    const float words[kErrorWords] = {model.excess, model.rotated, model.per_channel, model.largest};
    std::copy_n(words, kErrorWords, static_cast<float*>(error->data) + h * kErrorWords);
  }
  gguf_add_tensor(file, spectrum);
  gguf_add_tensor(file, error);
}

Status add_side(ggml_context* ctx, gguf_context* file, const char* side, int layer,
                const std::vector<std::shared_ptr<const CalibratedBasis>>& heads) {
  if (heads.empty()) return {};
  const int dim = heads.front()->dim;
  ggml_tensor* t = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, dim, dim, static_cast<int64_t>(heads.size()));
  ggml_format_name(t, "kvant.%s.%d", side, layer);
  auto* to = static_cast<ggml_fp16_t*>(t->data);
  for (const auto& head : heads) {
    ggml_fp32_to_fp16_row(head->forward.data(), to, static_cast<int64_t>(dim) * dim);
    to += static_cast<size_t>(dim) * dim;
  }
  gguf_add_tensor(file, t);
  add_error_models(ctx, file, side, layer, heads);
  if (heads.front()->centre.empty()) return {};
  ggml_tensor* mu = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, dim, static_cast<int64_t>(heads.size()));
  ggml_format_name(mu, "kvant.centre.%d", layer);
  for (size_t h = 0; h < heads.size(); ++h) {
    std::memcpy(static_cast<float*>(mu->data) + h * dim, heads[h]->centre.data(), dim * sizeof(float));
  }
  gguf_add_tensor(file, mu);
  return {};
}

// What stands beside the matrices of one side of a layer; null where the file has none.
struct SideTensors {
  const ggml_tensor* basis = nullptr;
  const ggml_tensor* centre = nullptr;
  const ggml_tensor* spectrum = nullptr;
  const ggml_tensor* error = nullptr;
};

bool is_f32(const ggml_tensor* t, int64_t columns, int64_t rows) {
  return t == nullptr || (t->type == GGML_TYPE_F32 && t->ne[0] == columns && t->ne[1] == rows);
}

Result<SideTensors> find_side(ggml_context* ctx, const ggml_tensor* basis, const char* side, int layer) {
  const auto find = [&](const std::string& name) {
    return ggml_get_tensor(ctx, ("kvant." + name + "." + std::to_string(layer)).c_str());
  };
  const bool key = std::strcmp(side, "key") == 0;
  const SideTensors found{.basis = basis,
                          .centre = key ? find("centre") : nullptr,
                          .spectrum = find(std::string(side) + "_spectrum"),
                          .error = find(std::string(side) + "_error")};
  const int64_t dim = basis->ne[0], heads = basis->ne[2];
  const bool right = basis->type == GGML_TYPE_F16 && basis->ne[1] == dim && dim >= kMinHeadDim &&
                     dim <= kMaxHeadDim && is_f32(found.centre, dim, heads) &&
                     is_f32(found.spectrum, dim, heads) && is_f32(found.error, kErrorWords, heads);
  if (!right) {
    return Status(Code::kCorrupt,
                  std::string("a tensor of ") + basis->name + " or beside it has a wrong type or shape");
  }
  return found;
}

std::vector<std::shared_ptr<const CalibratedBasis>> read_side(const SideTensors& from) {
  std::vector<std::shared_ptr<const CalibratedBasis>> heads;
  const int dim = static_cast<int>(from.basis->ne[0]);
  const auto row = [dim](const ggml_tensor* t, int64_t h) {
    const float* x = static_cast<const float*>(t->data) + h * dim;
    return std::vector<float>(x, x + dim);
  };
  for (int64_t h = 0; h < from.basis->ne[2]; ++h) {
    auto basis = std::make_shared<CalibratedBasis>();
    basis->dim = dim;
    basis->forward.resize(static_cast<size_t>(dim) * dim);
    ggml_fp16_to_fp32_row(static_cast<const ggml_fp16_t*>(from.basis->data) + h * dim * dim,
                          basis->forward.data(), static_cast<int64_t>(dim) * dim);
    if (from.centre != nullptr) basis->centre = row(from.centre, h);
    if (from.spectrum != nullptr && from.error != nullptr) {
      const float* words = static_cast<const float*>(from.error->data) + h * kErrorWords;
      basis->error = {.spectrum = row(from.spectrum, h),
                      .excess = words[0],
                      .rotated = words[1],
                      .per_channel = words[2],
                      .largest = words[3]};
    }
    heads.push_back(std::move(basis));
  }
  return heads;
}

// ggml allocates what the shapes in a file ask for, and ends the process when that is more than there is.
Status check_extent(const std::string& path) {
  ggml_context* meta = nullptr;
  const GgufPtr file(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &meta}));
  const GgmlPtr ctx(meta);
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (!file || error) return {Code::kIo, path + ": not a readable calibration file"};
  double bytes = 0;
  for (ggml_tensor* t = ggml_get_first_tensor(ctx.get()); t != nullptr;
       t = ggml_get_next_tensor(ctx.get(), t)) {
    bytes += static_cast<double>(ggml_nbytes(t));
  }
  if (bytes > static_cast<double>(size)) return {Code::kIo, path + ": its tensors do not fit in the file"};
  return {};
}

}  // namespace

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

Result<uint64_t> model_fingerprint(const std::string& model_path) {
  ggml_context* meta = nullptr;
  GgufPtr file(gguf_init_from_file(model_path.c_str(), {.no_alloc = true, .ctx = &meta}));
  GgmlPtr ctx(meta);
  if (!file) return Status(Code::kIo, model_path + ": not a readable GGUF file");
  std::ifstream in(model_path, std::ios::binary);
  NormHash hash;
  std::vector<char> bytes;
  for (int layer = 0;; ++layer) {
    char name[64];
    std::snprintf(name, sizeof name, kNormFormat, layer);
    const int64_t id = gguf_find_tensor(file.get(), name);
    if (id < 0) break;
    bytes.resize(gguf_get_tensor_size(file.get(), id));
    in.seekg(static_cast<std::streamoff>(gguf_get_data_offset(file.get()) +
                                         gguf_get_tensor_offset(file.get(), id)));
    if (!in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
      return Status(Code::kIo, model_path + ": tensor " + name + " ends early");
    }
    hash.add(layer, bytes.data(), bytes.size());
  }
  return hash.finish();
}

uint64_t graph_fingerprint(::ggml_cgraph* graph) {
  NormHash hash;
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    if (node->op != GGML_OP_MUL) continue;
    const ggml_tensor* weight = node->src[1];
    int layer = -1;
    int end = 0;
    if (weight == nullptr || std::sscanf(weight->name, "blk.%d.attn_norm.weight%n", &layer, &end) != 1)
      continue;
    if (end != static_cast<int>(std::strlen(weight->name)) || weight->data == nullptr) continue;
    hash.add(layer, weight->data, ggml_nbytes(weight));
  }
  return hash.finish();
}

std::string cache_home() {
  if (const char* home = std::getenv("KVANT_HOME"); home != nullptr && *home != 0) return home;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg != 0)
    return std::string(xdg) + "/kvant";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : ".") + "/.cache/kvant";
}

std::string calibration_path(uint64_t fingerprint) {
  return cache_home() + "/calibration/" + hex(fingerprint) + ".gguf";
}

Status save_calibration(const Calibration& calibration, const std::string& path) {
  size_t bytes = 1 << 16;
  for (const auto& [layer, c] : calibration.layers) {
    for (const auto* side : {&c.key, &c.value}) {
      for (const auto& head : *side) {
        bytes += static_cast<size_t>(head->dim) * head->dim * 2 + head->centre.size() * 4 +
                 (head->error.spectrum.size() + kErrorWords) * 4;
      }
    }
    bytes += 7 * (ggml_tensor_overhead() + 128);
  }
  GgmlPtr ctx(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = false}));
  GgufPtr file(gguf_init_empty());
  gguf_set_val_u32(file.get(), "kvant.version", kVersion);
  gguf_set_val_u64(file.get(), "kvant.fingerprint", calibration.fingerprint);
  gguf_set_val_str(file.get(), "kvant.model", calibration.model.c_str());
  gguf_set_val_u64(file.get(), "kvant.text_hash", calibration.text_hash);
  gguf_set_val_u64(file.get(), "kvant.tokens", static_cast<uint64_t>(calibration.tokens));
  for (const auto& [layer, c] : calibration.layers) {
    KVANT_RETURN_IF_ERROR(add_side(ctx.get(), file.get(), "key", layer, c.key));
    KVANT_RETURN_IF_ERROR(add_side(ctx.get(), file.get(), "value", layer, c.value));
  }
  gguf_set_val_u64(file.get(), kChecksum, checksum_of(calibration, ctx.get()));
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
  if (!gguf_write_to_file(file.get(), temporary.c_str(), false)) {
    std::filesystem::remove(temporary, error);
    return {Code::kIo, path + ": cannot be written"};
  }
  std::filesystem::rename(temporary, path, error);
  if (error) {
    const std::string why = error.message();
    std::filesystem::remove(temporary, error);
    return {Code::kIo, path + ": " + why};
  }
  return {};
}

Result<Calibration> load_calibration(const std::string& path, uint64_t expected) {
  KVANT_RETURN_IF_ERROR(check_extent(path));
  ggml_context* data = nullptr;
  GgufPtr file(gguf_init_from_file(path.c_str(), {.no_alloc = false, .ctx = &data}));
  GgmlPtr ctx(data);
  if (!file) return Status(Code::kIo, path + ": not a readable calibration file");
  auto u64 = [&](const char* key) -> uint64_t {
    const int64_t id = gguf_find_key(file.get(), key);
    return id >= 0 && gguf_get_kv_type(file.get(), id) == GGUF_TYPE_UINT64 ? gguf_get_val_u64(file.get(), id)
                                                                           : 0;
  };
  const int64_t version = gguf_find_key(file.get(), "kvant.version");
  if (version < 0 || gguf_get_kv_type(file.get(), version) != GGUF_TYPE_UINT32) {
    return Status(Code::kIo, path + ": not a kvant calibration");
  }
  if (gguf_get_val_u32(file.get(), version) != kVersion) {
    return Status(Code::kMismatch, path + ": version " +
                                       std::to_string(gguf_get_val_u32(file.get(), version)) +
                                       ", this kvant reads " + std::to_string(kVersion));
  }
  Calibration calibration;
  calibration.fingerprint = u64("kvant.fingerprint");
  calibration.text_hash = u64("kvant.text_hash");
  calibration.tokens = static_cast<int64_t>(u64("kvant.tokens"));
  const int64_t model = gguf_find_key(file.get(), "kvant.model");
  if (model >= 0 && gguf_get_kv_type(file.get(), model) == GGUF_TYPE_STRING) {
    calibration.model = gguf_get_val_str(file.get(), model);
  }
  if (gguf_find_key(file.get(), kChecksum) >= 0 && u64(kChecksum) != checksum_of(calibration, ctx.get())) {
    return Status(Code::kCorrupt,
                  path + ": damaged, its checksum does not fit; make it again with `kvant calibrate`");
  }
  if (expected != 0 && calibration.fingerprint != expected) {
    return Status(Code::kMismatch, path + ": made for model " + hex(calibration.fingerprint) + " (" +
                                       calibration.model + "), this model is " + hex(expected));
  }
  for (ggml_tensor* t = ggml_get_first_tensor(ctx.get()); t != nullptr;
       t = ggml_get_next_tensor(ctx.get(), t)) {
    int layer = -1;
    const bool key = std::sscanf(t->name, "kvant.key.%d", &layer) == 1;
    const bool value = !key && std::sscanf(t->name, "kvant.value.%d", &layer) == 1;
    if (!key && !value) continue;
    const Result<SideTensors> side = find_side(ctx.get(), t, key ? "key" : "value", layer);
    if (!side.ok()) return Status(side.status().code(), path + ": " + side.status().message());
    LayerCalibration& c = calibration.layers[layer];
    std::vector<std::shared_ptr<const CalibratedBasis>>& heads = key ? c.key : c.value;
    heads = read_side(side.value());
    for (const auto& head : heads) {
      if (all_finite(head->forward) && all_finite(head->centre)) continue;
      return Status(Code::kCorrupt, path + ": " + t->name + " has a value that is not finite");
    }
  }
  return calibration;
}

}  // namespace kvant::ggml

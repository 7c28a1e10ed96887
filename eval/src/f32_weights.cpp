#include "kvant/f32_weights.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <vector>

#include "gguf.h"
#include "kvant/calibration_file.h"
#include "kvant/llama_session.h"

namespace kvant::eval {
namespace {

namespace fs = std::filesystem;
constexpr size_t kEdgeBytes = 1 << 20;

uint64_t fnv1a(uint64_t hash, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001B3ULL;
  return hash;
}

Result<uint64_t> file_hash(const std::string& path) {
  struct stat info {};
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr || fstat(fileno(file.get()), &info) != 0 || !S_ISREG(info.st_mode)) {
    return Status(Code::kIo, "model " + path + " cannot be read");
  }
  const uint64_t facts[] = {static_cast<uint64_t>(info.st_size), static_cast<uint64_t>(info.st_mtim.tv_sec),
                            static_cast<uint64_t>(info.st_mtim.tv_nsec)};
  uint64_t hash = fnv1a(0xCBF29CE484222325ULL, facts, sizeof facts);
  std::vector<char> edge(kEdgeBytes);
  for (const off_t from : {off_t{0}, std::max<off_t>(0, info.st_size - static_cast<off_t>(kEdgeBytes))}) {
    if (fseeko(file.get(), from, SEEK_SET) != 0)
      return Status(Code::kIo, "model " + path + " cannot be read");
    hash = fnv1a(hash, edge.data(), std::fread(edge.data(), 1, edge.size(), file.get()));
  }
  return hash;
}

struct Weights {
  bool all_f32 = true;
  uint64_t elements = 0;
};

Result<Weights> look_at(const std::string& path) {
  ggml_context* meta = nullptr;
  std::unique_ptr<gguf_context, void (*)(gguf_context*)> file(
      gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &meta}), gguf_free);
  const std::unique_ptr<ggml_context, void (*)(ggml_context*)> owner(meta, ggml_free);
  if (file == nullptr) return Status(Code::kIo, "model " + path + " is not a GGUF file");
  Weights w;
  for (ggml_tensor* t = ggml_get_first_tensor(meta); t != nullptr; t = ggml_get_next_tensor(meta, t)) {
    w.all_f32 = w.all_f32 && t->type == GGML_TYPE_F32;
    w.elements += static_cast<uint64_t>(ggml_nelements(t));
  }
  return w;
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

Result<std::string> f32_weights(const std::string& model_path, int threads) {
  KVANT_RETURN_IF_ERROR(init_backends());
  Result<uint64_t> hash = file_hash(model_path);
  if (!hash.ok()) return hash.status();
  Result<Weights> weights = look_at(model_path);
  if (!weights.ok()) return weights.status();
  if (weights.value().all_f32) return model_path;

  const fs::path folder = fs::path(ggml::cache_home()) / "f32";
  const fs::path target = folder / (hex(hash.value()) + ".gguf");
  std::error_code error;
  if (fs::exists(target, error)) return target.string();
  fs::create_directories(folder, error);
  if (error) return Status(Code::kIo, "folder " + folder.string() + " cannot be made: " + error.message());
  const uint64_t need = weights.value().elements * 4 + (16U << 20);
  if (const fs::space_info space = fs::space(folder, error); !error && space.available < need) {
    return Status(Code::kIo,
                  folder.string() + " has no room for " + std::to_string(need >> 20) +
                      " MiB of f32 weights; set KVANT_HOME to another folder or use --weights native");
  }
  const fs::path scratch = target.string() + "." + std::to_string(getpid()) + ".tmp";
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  params.nthread = threads;
  const bool done = llama_model_quantize(model_path.c_str(), scratch.c_str(), &params) == 0;
  if (done) fs::rename(scratch, target, error);
  if (!done || error) {
    std::error_code ignored;
    fs::remove(scratch, ignored);
    return Status(Code::kIo,
                  "weights of " + model_path + " could not be expanded to f32 in " + folder.string());
  }
  return target.string();
}

}  // namespace kvant::eval

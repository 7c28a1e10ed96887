#include "cpu_device.h"

#include <cstring>
#include <mutex>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace kvant::ggml {
namespace {

template <typename Function>
Function find(ggml_backend_reg_t reg, const char* name) {
  return reinterpret_cast<Function>(ggml_backend_reg_get_proc_address(reg, name));
}

ggml_backend_reg_t cpu_reg() { return ggml_backend_dev_backend_reg(cpu_device().device); }

bool has_feature(ggml_backend_reg_t reg, const char* name) {
  auto get_features = find<ggml_backend_get_features_t>(reg, "ggml_backend_get_features");
  if (get_features == nullptr) return false;
  for (const ggml_backend_feature* f = get_features(reg); f != nullptr && f->name != nullptr; ++f) {
    if (std::strcmp(f->name, name) == 0) return true;
  }
  return false;
}

}  // namespace

const CpuDevice& cpu_device() {
  static CpuDevice cpu;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (cpu.device != nullptr) return cpu;
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) return cpu;
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
  cpu.set_n_threads = find<ggml_backend_set_n_threads_t>(reg, "ggml_backend_set_n_threads");
  cpu.set_abort_callback = find<ggml_backend_set_abort_callback_t>(reg, "ggml_backend_set_abort_callback");
  cpu.get_extra_bufts = find<ggml_backend_dev_get_extra_bufts_t>(reg, "ggml_backend_dev_get_extra_bufts");
  cpu.openmp = has_feature(reg, "OPENMP");
  cpu.api_version = reg->api_version;
  cpu.device = device;
  return cpu;
}

ggml_backend_buffer_type_t* cpu_extra_bufts() {
  static ggml_backend_buffer_type_t none[] = {nullptr};
  const CpuDevice& cpu = cpu_device();
  ggml_backend_buffer_type_t* types =
      cpu.get_extra_bufts != nullptr ? cpu.get_extra_bufts(cpu.device) : nullptr;
  return types != nullptr ? types : none;
}

bool is_cpu_extra_buft(ggml_backend_buffer_type_t type) {
  for (ggml_backend_buffer_type_t* t = cpu_extra_bufts(); *t != nullptr; ++t) {
    if (*t == type) return true;
  }
  return false;
}

CpuStream::CpuStream() {
  const CpuDevice& cpu = cpu_device();
  if (cpu.device == nullptr) return;
  backend_ = ggml_backend_dev_init(cpu.device, nullptr);
  if (backend_ != nullptr) set_n_threads(n_threads_);
}

CpuStream::~CpuStream() {
  if (backend_ != nullptr) ggml_backend_free(backend_);
  make_pool(0);
}

void CpuStream::set_n_threads(int n) {
  const bool changed = n != n_threads_;
  n_threads_ = n;
  if (cpu_device().set_n_threads != nullptr) cpu_device().set_n_threads(backend_, n);
  if (!cpu_device().openmp && (changed || pool_ == nullptr)) make_pool(n);
}

// Zero threads: no pool.
void CpuStream::make_pool(int n) {
  if (cpu_device().device == nullptr) return;
  auto set_pool =
      find<decltype(&ggml_backend_cpu_set_threadpool)>(cpu_reg(), "ggml_backend_cpu_set_threadpool");
  auto new_pool = find<decltype(&ggml_threadpool_new)>(cpu_reg(), "ggml_threadpool_new");
  auto free_pool = find<decltype(&ggml_threadpool_free)>(cpu_reg(), "ggml_threadpool_free");
  if (set_pool == nullptr || new_pool == nullptr || free_pool == nullptr) return;
  ggml_threadpool_t old = pool_;
  pool_ = nullptr;
  if (n > 1) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    pool_ = new_pool(&params);
    set_pool(backend_, pool_);
  } else if (n == 1) {
    set_pool(backend_, nullptr);
  }
  if (old != nullptr) free_pool(old);
}

}  // namespace kvant::ggml

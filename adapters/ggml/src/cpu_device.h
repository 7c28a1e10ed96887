// ggml's own CPU backend, reached through the registry, because it may be a loaded module: everything that is
// not kvant's is done by it.
#pragma once

#include "ggml-backend.h"

namespace kvant::ggml {

struct CpuDevice {
  ggml_backend_dev_t device = nullptr;  // null: no CPU backend is registered (yet)
  ggml_backend_set_n_threads_t set_n_threads = nullptr;
  ggml_backend_set_abort_callback_t set_abort_callback = nullptr;
  ggml_backend_dev_get_extra_bufts_t get_extra_bufts = nullptr;
  // Without OpenMP every graph without a thread pool of its own would start threads; with it they are shared.
  bool openmp = false;
  int api_version = 0;
};

// Looked up once, at the first call that finds it.
const CpuDevice& cpu_device();

// The CPU's extra buffer types (repacked weights), null terminated; never null.
ggml_backend_buffer_type_t* cpu_extra_bufts();
bool is_cpu_extra_buft(ggml_backend_buffer_type_t type);

// A CPU backend with a persistent thread pool where ggml would otherwise start threads for every graph.
class CpuStream {
 public:
  CpuStream();
  ~CpuStream();
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;
  bool ok() const { return backend_ != nullptr; }
  ggml_backend_t backend() const { return backend_; }
  int n_threads() const { return n_threads_; }
  void set_n_threads(int n);

 private:
  void make_pool(int n);
  ggml_backend_t backend_ = nullptr;
  ggml_threadpool_t pool_ = nullptr;
  int n_threads_ = GGML_DEFAULT_N_THREADS;
};

}  // namespace kvant::ggml

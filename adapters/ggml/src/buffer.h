// Buffers of the KVANT device: lazily committed host memory. A buffer in which llama.cpp places cache tensors
// turns into a cache buffer, whose content is reached through set, get and copy only.
#pragma once

#include <memory>

#include "cache_state.h"
#include "ggml-backend.h"

namespace kvant::ggml {

// Weights and intermediate results: ordinary host memory.
ggml_backend_buffer_type_t host_buft();
// Cache tensors. Not host memory for ggml: else it would copy streams by reading the tensors' memory.
ggml_backend_buffer_type_t cache_buft();
bool is_kvant_buft(ggml_backend_buffer_type_t type);
// The device stands in the types; it is set once by the registry.
void set_buft_device(ggml_backend_dev_t device);

// The cache tensor behind a tensor or a view of one; null for all others.
const CacheTensor* cache_tensor(const ggml_tensor* tensor);
// The state of the buffer that a cache tensor lies in, kept alive by who holds it.
std::shared_ptr<CacheState> shared_state(const ggml_tensor* tensor);

}  // namespace kvant::ggml

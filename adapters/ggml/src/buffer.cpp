#include "buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ggml-backend-impl.h"
#include "messages.h"
#include "norm_tracker.h"

namespace kvant::ggml {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kCopyChunk = size_t{4} << 20;

struct Buffer {
  char* base = nullptr;
  size_t bytes = 0;
  std::shared_ptr<CacheState> state;  // cache buffers only
};

Buffer& buffer_of(ggml_backend_buffer_t buffer) { return *static_cast<Buffer*>(buffer->context); }

size_t offset_in_base(const ggml_tensor* tensor, size_t offset) {
  return offset + (tensor->view_src != nullptr ? tensor->view_offs : 0);
}

// llama.cpp's calls have no way to fail: the error is kept and printed, and the cache refuses to run on.
void keep_error(const CacheTensor& tensor, const Status& status) {
  if (status.ok()) return;
  keep_failure(status);
  print_failure(status.message());
  tensor.state->set_broken(status);
}

void buffer_free(ggml_backend_buffer_t buffer) {
  Buffer* b = &buffer_of(buffer);
  if (b->state != nullptr) b->state->close();
  munmap(b->base, b->bytes);
  delete b;
}

void* buffer_base(ggml_backend_buffer_t buffer) { return buffer_of(buffer).base; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  Side side = Side::kKey;
  int layer = 0;
  if (tensor->view_src != nullptr || !parse_cache_name(tensor->name, &side, &layer))
    return GGML_STATUS_SUCCESS;
  Buffer& b = buffer_of(buffer);
  if (b.state == nullptr) b.state = std::make_shared<CacheState>(options());
  forget_norms();
  buffer->buft = cache_buft();
  const Status status = b.state->add_tensor(tensor, side, layer);
  if (status.ok()) return GGML_STATUS_SUCCESS;
  keep_failure(status);
  print_failure(status.message());
  return GGML_STATUS_FAILED;
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t bytes) {
  const CacheTensor* cached = cache_tensor(tensor);
  if (cached == nullptr) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, bytes);
    return;
  }
  keep_error(*cached, cached->state->write(*cached, offset_in_base(tensor, offset), bytes, data));
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset, size_t bytes) {
  const CacheTensor* cached = cache_tensor(tensor);
  if (cached == nullptr) {
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, bytes);
    return;
  }
  keep_error(*cached, cached->state->read(*cached, offset_in_base(tensor, offset), bytes, data));
}

void buffer_memset(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t bytes) {
  if (cache_tensor(tensor) == nullptr) {
    std::memset(static_cast<char*>(tensor->data) + offset, value, bytes);
    return;
  }
  const std::vector<uint8_t> chunk(std::min(bytes, kCopyChunk), value);
  for (size_t done = 0; done < bytes; done += chunk.size()) {
    buffer_set(buffer, tensor, chunk.data(), offset + done, std::min(chunk.size(), bytes - done));
  }
}

// `target` lies in one of our buffers. Whole streams of one cache move as they are stored; all else as f16.
bool buffer_copy(ggml_backend_buffer_t buffer, const ggml_tensor* source, ggml_tensor* target) {
  const CacheTensor* from = cache_tensor(source);
  const CacheTensor* to = cache_tensor(target);
  const size_t bytes = ggml_nbytes(source);
  if (from != nullptr && from == to) {
    Status status;
    if (to->state->copy_stream(*to, offset_in_base(source, 0), offset_in_base(target, 0), bytes, &status)) {
      keep_error(*to, status);
      return true;
    }
  }
  if (from == nullptr && !ggml_backend_buffer_is_host(source->buffer) &&
      source->buffer->buft != cache_buft()) {
    return false;
  }
  std::vector<char> chunk(std::min(bytes, kCopyChunk));
  for (size_t done = 0; done < bytes; done += chunk.size()) {
    const size_t n = std::min(chunk.size(), bytes - done);
    buffer_get(source->buffer, source, chunk.data(), done, n);
    buffer_set(buffer, target, chunk.data(), done, n);
  }
  return true;
}

// Zeroing gives the memory back: fresh pages are zero.
void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
  Buffer& b = buffer_of(buffer);
  if (b.state != nullptr) b.state->clear();
  if (value != 0 && b.state == nullptr) {
    std::memset(b.base, value, b.bytes);
  } else {
    madvise(b.base, b.bytes, MADV_DONTNEED);
  }
}

const char* host_name(ggml_backend_buffer_type_t) { return "KVANT"; }
const char* cache_name(ggml_backend_buffer_type_t) { return "KVANT_KV"; }

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t bytes) {
  bytes = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  static constexpr ggml_backend_buffer_i kInterface = {
      .free_buffer = buffer_free,
      .get_base = buffer_base,
      .init_tensor = buffer_init_tensor,
      .memset_tensor = buffer_memset,
      .set_tensor = buffer_set,
      .get_tensor = buffer_get,
      .set_tensor_2d = nullptr,
      .get_tensor_2d = nullptr,
      .cpy_tensor = buffer_copy,
      .clear = buffer_clear,
      .reset = nullptr,
  };
  auto* context = new Buffer{.base = static_cast<char*>(base), .bytes = bytes, .state = nullptr};
  return ggml_backend_buffer_init(type, kInterface, context, bytes);
}

size_t alignment(ggml_backend_buffer_type_t) { return kAlignment; }
size_t weight_alignment(ggml_backend_buffer_type_t) { return 64; }
bool yes(ggml_backend_buffer_type_t) { return true; }
bool no(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_type host_type = {.iface = {.get_name = host_name,
                                                .alloc_buffer = allocate,
                                                .get_alignment = weight_alignment,
                                                .get_max_size = nullptr,
                                                .get_alloc_size = nullptr,
                                                .is_host = yes},
                                      .device = nullptr,
                                      .context = nullptr};
ggml_backend_buffer_type cache_type = {.iface = {.get_name = cache_name,
                                                 .alloc_buffer = allocate,
                                                 .get_alignment = alignment,
                                                 .get_max_size = nullptr,
                                                 .get_alloc_size = nullptr,
                                                 .is_host = no},
                                       .device = nullptr,
                                       .context = nullptr};

}  // namespace

ggml_backend_buffer_type_t host_buft() { return &host_type; }
ggml_backend_buffer_type_t cache_buft() { return &cache_type; }
bool is_kvant_buft(ggml_backend_buffer_type_t type) { return type == &host_type || type == &cache_type; }

void set_buft_device(ggml_backend_dev_t device) {
  host_type.device = device;
  cache_type.device = device;
}

const CacheTensor* cache_tensor(const ggml_tensor* tensor) {
  const ggml_tensor* base = tensor->view_src != nullptr ? tensor->view_src : tensor;
  if (base->buffer == nullptr || base->buffer->buft != &cache_type) return nullptr;
  return static_cast<const CacheTensor*>(base->extra);
}

std::shared_ptr<CacheState> shared_state(const ggml_tensor* tensor) {
  const ggml_tensor* base = tensor->view_src != nullptr ? tensor->view_src : tensor;
  return buffer_of(base->buffer).state;
}

}  // namespace kvant::ggml

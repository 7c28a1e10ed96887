#include "device.h"

#include <cstring>
#include <string>

#include "buffer.h"
#include "cpu_device.h"
#include "ggml-backend-impl.h"
#include "norm_tracker.h"
#include "settings.h"

namespace kvant::ggml {
namespace {

constexpr char kName[] = "KVANT";

const char* device_name(ggml_backend_dev_t) { return kName; }
const char* device_description(ggml_backend_dev_t) { return "CPU with kvant's quantized KV cache"; }

// llama.cpp plans with an f16 cache. The scheme's saving is added to the memory there is, so that contexts
// that fit are not refused; weights are mapped files and compute buffers are small, so the whole figure is
// scaled.
void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) {
  *free = *total = 0;
  if (cpu_device().device == nullptr) return;
  ggml_backend_dev_memory(cpu_device().device, free, total);
  const double saving = nominal_saving();
  *free = static_cast<size_t>(static_cast<double>(*free) * saving);
  *total = static_cast<size_t>(static_cast<double>(*total) * saving);
}

// GPU: that is what makes llama.cpp offload layers, and with them their cache, to the device.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  device_memory(device, &props->memory_free, &props->memory_total);
  props->caps = {.async = false,
                 .host_buffer = false,
                 .buffer_from_host_ptr = true,
                 .events = false,
                 .mmap_support = true};
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char*) { return make_stream(device); }

ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t) { return host_buft(); }

ggml_backend_buffer_t device_from_host_ptr(ggml_backend_dev_t, void* data, size_t bytes, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, bytes);
}

// While it loads a model, llama.cpp asks for each weight with a zero-sized buffer of each of our types, ours
// first. Weights that the CPU would repack are declined there, so that llama.cpp takes the CPU's type as it
// does without us.
bool wants_repacking(const ggml_tensor* op) {
  const ggml_tensor* weight = op->src[0];
  if (weight == nullptr || weight->buffer == nullptr || weight->buffer->buft != host_buft() ||
      weight->buffer->size != 0) {
    return false;
  }
  ggml_backend_buffer_type* const original = weight->buffer->buft;
  bool wanted = false;
  for (ggml_backend_buffer_type_t* extra = cpu_extra_bufts(); *extra != nullptr && !wanted; ++extra) {
    weight->buffer->buft = *extra;
    wanted = ggml_backend_dev_supports_op(cpu_device().device, op);
  }
  weight->buffer->buft = original;
  return wanted;
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
  if (cpu_device().device == nullptr) return false;
  // The scheduler asks about every attention node before anything runs: head sizes are known from then on.
  if (op->op == GGML_OP_FLASH_ATTN_EXT && cache_tensor(op->src[1]) != nullptr) {
    cache_tensor(op->src[1])->state->learn(op);
    cache_tensor(op->src[1])->state->set_norms(noticed_norms());
  }
  notice_norm(op);
  if (wants_repacking(op)) return false;
  return ggml_backend_dev_supports_op(cpu_device().device, op);
}

bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return is_kvant_buft(type) || ggml_backend_buft_is_host(type) || is_cpu_extra_buft(type);
}

const char* reg_name(ggml_backend_reg_t) { return kName; }
size_t reg_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t) { return kvant_device(); }

ggml_backend_buffer_type_t* extra_bufts(ggml_backend_dev_t) { return cpu_extra_bufts(); }

const char* configure_text(const char* text) {
  static thread_local std::string error;
  Options wanted;
  Status status = options_from_text(text, options(), &wanted);
  if (status.ok()) status = configure(wanted);
  error = status.message();
  return status.ok() ? nullptr : error.c_str();
}

const char* report_text() {
  static thread_local std::string text;
  text = report_json();
  return text.c_str();
}

void* reg_proc_address(ggml_backend_reg_t, const char* name) {
  const std::string_view wanted(name);
  if (wanted == "ggml_backend_set_n_threads") return reinterpret_cast<void*>(set_stream_threads);
  if (wanted == "ggml_backend_set_abort_callback") return reinterpret_cast<void*>(set_stream_abort);
  if (wanted == "ggml_backend_dev_get_extra_bufts") return reinterpret_cast<void*>(extra_bufts);
  if (wanted == "kvant_configure") return reinterpret_cast<void*>(configure_text);
  if (wanted == "kvant_report_json") return reinterpret_cast<void*>(report_text);
  return nullptr;
}

}  // namespace

ggml_backend_dev_t kvant_device() {
  static ggml_backend_device device = {.iface = {.get_name = device_name,
                                                 .get_description = device_description,
                                                 .get_memory = device_memory,
                                                 .get_type = device_type,
                                                 .get_props = device_props,
                                                 .init_backend = device_init,
                                                 .get_buffer_type = device_buft,
                                                 .get_host_buffer_type = nullptr,
                                                 .buffer_from_host_ptr = device_from_host_ptr,
                                                 .supports_op = device_supports_op,
                                                 .supports_buft = device_supports_buft,
                                                 .offload_op = nullptr,
                                                 .event_new = nullptr,
                                                 .event_free = nullptr,
                                                 .event_synchronize = nullptr},
                                       .reg = nullptr,
                                       .context = nullptr};
  return &device;
}

ggml_backend_reg_t backend_reg() {
  static ggml_backend_reg reg = {.api_version = GGML_BACKEND_API_VERSION,
                                 .iface = {.get_name = reg_name,
                                           .get_device_count = reg_count,
                                           .get_device = reg_device,
                                           .get_proc_address = reg_proc_address},
                                 .context = nullptr};
  kvant_device()->reg = &reg;
  set_buft_device(kvant_device());
  return &reg;
}

}  // namespace kvant::ggml

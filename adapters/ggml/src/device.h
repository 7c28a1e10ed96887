// The device, its registry entry and its streams.
#pragma once

#include "ggml-backend.h"

namespace kvant::ggml {

ggml_backend_dev_t kvant_device();
ggml_backend_t make_stream(ggml_backend_dev_t device);
void set_stream_threads(ggml_backend_t stream, int n_threads);
void set_stream_abort(ggml_backend_t stream, ggml_abort_callback callback, void* data);

}  // namespace kvant::ggml

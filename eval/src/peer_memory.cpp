#include "kvant/peer_memory.h"

#include <string>

namespace kvant::eval {
namespace {

size_t side_bytes(const ModelShape& shape, Side side, ggml_type type, int n_ctx, int n_batch) {
  size_t bytes = 0;
  for (const ShapeLayer& layer : shape.layers) {
    const int slots =
        layer.windowed ? windowed_slots(n_ctx, shape.sliding_window, n_batch) : full_slots(n_ctx);
    const int64_t width = int64_t{layer.shape.n_kv_heads} * dim_of(layer.shape, side);
    bytes += ggml_row_size(type, width) * static_cast<size_t>(slots);
  }
  return bytes;
}

Status check_heads(const ModelShape& shape, const Candidate& c, Side side, ggml_type type) {
  const int64_t block = ggml_blck_size(type);
  for (const ShapeLayer& layer : shape.layers) {
    const int dim = dim_of(layer.shape, side);
    if (dim % block == 0) continue;
    return {Code::kUnsupported, c.name + ": llama.cpp refuses head size " + std::to_string(dim) +
                                    ", no multiple of the " + std::to_string(block) +
                                    " values of a block of " + ggml_type_name(type) +
                                    "; nearest is llama:f16"};
  }
  return {};
}

}  // namespace

size_t peer_cache_bytes(const ModelShape& shape, const Candidate& c, int n_ctx, int n_batch) {
  return side_bytes(shape, Side::kKey, c.type_k, n_ctx, n_batch) +
         side_bytes(shape, Side::kValue, c.type_v, n_ctx, n_batch);
}

Result<Plan> plan_peer(const ModelShape& shape, const Candidate& c, const PlanOptions& options) {
  PlanOptions exact = options;
  exact.scheme = "exact";
  exact.calibration = nullptr;
  Result<Plan> plan = plan_model(shape, exact);  // its checks, and the f16 rows
  if (!plan.ok()) return plan;
  KVANT_RETURN_IF_ERROR(check_heads(shape, c, Side::kKey, c.type_k));
  KVANT_RETURN_IF_ERROR(check_heads(shape, c, Side::kValue, c.type_v));
  Plan out;
  out.f16_bytes = plan.value().f16_bytes;
  double values[2] = {}, bits[2] = {};
  for (const Side side : {Side::kKey, Side::kValue}) {
    const ggml_type type = side == Side::kKey ? c.type_k : c.type_v;
    const size_t bytes = side_bytes(shape, side, type, options.context, options.n_ubatch) *
                         static_cast<size_t>(options.sequences);
    (ggml_is_quantized(type) ? out.memory.tile_bytes : out.memory.exact_row_bytes) += bytes;
    const int at = side == Side::kKey ? 0 : 1;
    for (const ShapeLayer& layer : shape.layers)
      values[at] += static_cast<double>(layer.shape.n_kv_heads) * dim_of(layer.shape, side);
    bits[at] = 8.0 * static_cast<double>(ggml_type_size(type)) / static_cast<double>(ggml_blck_size(type));
  }
  out.bits_k = bits[0];
  out.bits_v = bits[1];
  out.bits = (values[0] * bits[0] + values[1] * bits[1]) / (values[0] + values[1]);
  return out;
}

}  // namespace kvant::eval

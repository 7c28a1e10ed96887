// Sizes and parts of one page of one layer and side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvant/layer_scheme.h"
#include "kvant/memory.h"
#include "kvant/slot_cache.h"

namespace kvant {

inline constexpr uint16_t kHalfExponent = 0x7C00;

inline const Transform& transform_of(const HeadScheme& head, Side side) {
  return side == Side::kKey ? *head.key_transform : *head.value_transform;
}

// A side whose format is f16 stays in rows: it is never sealed.
inline bool side_quantized(const LayerScheme& layer, Side side) {
  return !layer.exact && !format_of(layer.heads.front(), side).exact();
}

inline size_t row_page_bytes(const LayerShape& shape, Side side) {
  return static_cast<size_t>(shape.n_kv_heads) * kPageTokens * dim_of(shape, side) * sizeof(uint16_t);
}

inline size_t kept_bytes(const LayerShape& shape, Side side, int rows) {
  return align_up(static_cast<size_t>(shape.n_kv_heads) * rows * dim_of(shape, side) * sizeof(uint16_t), 64);
}

inline size_t tiles_bytes(const LayerScheme& layer, Side side) {
  return side == Side::kKey ? layer.key_tile_bytes() : layer.value_tile_bytes();
}

inline constexpr Side kSides[] = {Side::kKey, Side::kValue};

}  // namespace kvant

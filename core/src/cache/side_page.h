// Sizes and parts of one page of one layer and side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

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

// Where things lie. A stream has fewer than 2^31 slots; everything that grows with streams, layers or
// channels takes 64 bits.

inline constexpr int kMaxSlots = std::numeric_limits<int32_t>::max() / kPageTokens * kPageTokens;

inline int pages_for(int slots) { return static_cast<int>((int64_t{slots} + kPageTokens - 1) / kPageTokens); }

struct SlotPlace {
  int stream = 0, page = 0;
  int t = 0;  // token of the page
};

// Of slot stream * (slots of a stream) + slot.
inline SlotPlace place_of(int64_t global_slot, int n_pages) {
  const int64_t page = global_slot / kPageTokens;
  return {.stream = static_cast<int>(page / n_pages),
          .page = static_cast<int>(page % n_pages),
          .t = static_cast<int>(global_slot % kPageTokens)};
}

// In SidePage[n_layers][n_streams][n_pages][2].
inline size_t side_page_index(int layer, int stream, int page, Side side, int n_streams, int n_pages) {
  const size_t row =
      static_cast<size_t>(layer) * static_cast<size_t>(n_streams) + static_cast<size_t>(stream);
  return (row * static_cast<size_t>(n_pages) + static_cast<size_t>(page)) * 2 + static_cast<size_t>(side);
}

// First word of a row in [n_kv_heads][rows_per_head][dim].
inline size_t row_index(int head, int row, int rows_per_head, int dim) {
  return (static_cast<size_t>(head) * static_cast<size_t>(rows_per_head) + static_cast<size_t>(row)) *
         static_cast<size_t>(dim);
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

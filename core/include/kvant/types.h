// Words that every layer uses: sides, page size, strong ids, the shape of one layer.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace kvant {

// Token slots in a page. A page is the unit that is shared, forked, evicted and saved; a tile is one page
// of one layer, KV head and side.
inline constexpr int kPageTokens = 64;

// Every tile starts on a cache line and its size is a multiple of one.
inline constexpr size_t kTileAlign = 64;

inline constexpr int kMinHeadDim = 32;
inline constexpr int kMaxHeadDim = 256;

enum class Side : uint8_t { kKey = 0, kValue = 1 };
inline const char* side_name(Side side) { return side == Side::kKey ? "key" : "value"; }

// Strong integer ids: a page number cannot be passed where a layer is expected.
template <typename Tag>
struct Id {
  int32_t value = -1;
  friend bool operator==(const Id&, const Id&) = default;
  friend auto operator<=>(const Id&, const Id&) = default;
};
using LayerId = Id<struct LayerTag>;
using StreamId = Id<struct StreamTag>;
using PageId = Id<struct PageTag>;

// Attention shape of one layer. Head sizes are multiples of 8 in [kMinHeadDim, kMaxHeadDim].
struct LayerShape {
  int n_query_heads = 0;
  int n_kv_heads = 0;
  int key_dim = 0;    // channels of one key head
  int value_dim = 0;  // channels of one value head
};
inline int dim_of(const LayerShape& shape, Side side) {
  return side == Side::kKey ? shape.key_dim : shape.value_dim;
}

}  // namespace kvant

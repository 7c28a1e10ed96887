// The byte layout of one tile, drawn.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvant/format.h"

namespace kvant::cli {

struct TilePart {
  uint32_t offset = 0, bytes = 0;
  int band = -1;  // -1: of the whole tile
  std::string what;
};

// Every byte of the tile, in order, padding included.
std::vector<TilePart> tile_parts(const Format& format);
std::string draw_tile(const Format& format);
nlohmann::json tile_json(const Format& format);

}  // namespace kvant::cli

// A program outside the tree: encodes one tile of keys in 4 bits per channel, reads it back, checks the
// error.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvant/format.h"

int main() {
  constexpr int kHeadDim = 64;
  const kvant::Result<kvant::Format> format = kvant::Format::parse("c4", kvant::Side::kKey, kHeadDim);
  if (!format.ok()) {
    std::printf("%s\n", format.status().message().c_str());
    return 1;
  }
  std::vector<float> keys(kvant::kPageTokens * kHeadDim), read(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = std::sin(0.37f * static_cast<float>(i));

  auto* tile = static_cast<std::byte*>(std::aligned_alloc(kvant::kTileAlign, format.value().tile_bytes()));
  const kvant::EncodeStats stats = format.value().encode({.x = keys.data()}, tile);
  const kvant::Status intact = format.value().verify(tile);
  format.value().decode(tile, read.data());
  std::free(tile);

  float worst = 0;
  for (size_t i = 0; i < keys.size(); ++i) worst = std::fmax(worst, std::fabs(keys[i] - read[i]));
  std::printf("%.3f bits per value, largest error %.3f\n", format.value().bits_per_value(), worst);
  const bool good = intact.ok() && worst > 0 && worst < 0.12f && std::fabs(worst - stats.max_error) < 1e-3f;
  std::printf(good ? "ok\n" : "wrong\n");
  return good ? 0 : 1;
}

// Arbitrary text as a format name, a format id and a scheme: no crash, and what is accepted is written back
// in a canonical form that is accepted again.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "kvant/format.h"
#include "kvant/scheme.h"

namespace {

using namespace kvant;

void check_format(const Format& format, Side side, int head_dim) {
  const Result<Format> again = Format::parse(format.name(), side, head_dim);
  const Result<Format> by_id = Format::from_id(format.id(), side, head_dim);
  if (!again.ok() || again.value().id() != format.id()) std::abort();
  if (!by_id.ok() || by_id.value().name() != format.name()) std::abort();
  if (format.tile_bytes() % kTileAlign != 0 || format.tile_bytes() == 0) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 6) return 0;
  const Side side = (data[0] & 1) != 0 ? Side::kKey : Side::kValue;
  const int head_dim = (data[0] & 2) != 0 ? 8 * (data[1] % 40) : static_cast<int>(data[1]) - 3;
  uint32_t id = 0;
  std::memcpy(&id, data + 2, sizeof(id));
  const std::string_view text(reinterpret_cast<const char*>(data + 6), size - 6);

  const Result<Format> by_id = Format::from_id(id, side, head_dim);
  if (by_id.ok()) check_format(by_id.value(), side, head_dim);
  const Result<Format> by_name = Format::parse(text, side, head_dim);
  if (by_name.ok()) {
    check_format(by_name.value(), side, head_dim);
  } else if (by_name.status().message().empty()) {
    std::abort();
  }
  const Result<Scheme> scheme = parse_scheme(text, (data[0] & 4) != 0);
  if (scheme.ok()) {
    const std::string canonical = to_string(scheme.value());
    const Result<Scheme> again = parse_scheme(canonical);
    if (!again.ok() || to_string(again.value()) != canonical) std::abort();
  } else if (scheme.status().message().empty()) {
    std::abort();
  }
  return 0;
}

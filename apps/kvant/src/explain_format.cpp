#include "explain_format.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvant::cli {
namespace {

constexpr size_t kBoxWidth = 58;

const char* scale_name(ScaleType type) {
  switch (type) {
    case ScaleType::kE6M10:
      return "16 bits each (e6m10)";
    case ScaleType::kLog8:
      return "8 bits each, steps of 1/8 octave";
    case ScaleType::kLog4:
      return "4 bits each, steps of 1/4 octave";
    case ScaleType::kNone:
      break;
  }
  return "none";
}

uint32_t scale_bytes(ScaleType type) {
  if (type == ScaleType::kE6M10) return 2 * kPageTokens;
  return type == ScaleType::kLog8 ? kPageTokens : kPageTokens / 2;
}

void add_band_parts(const TileLayout& layout, int index, std::vector<TilePart>* parts) {
  const BandLayout& band = layout.bands[index];
  int low_bit = 0;
  for (int p = 0; p < band.n_planes; ++p) {
    const int bits = band.plane_bits[p];
    const std::string which =
        bits == 1 ? fmt::format("bit {}", low_bit) : fmt::format("bits {}..{}", low_bit, low_bit + bits - 1);
    parts->push_back({band.plane_offset[p],
                      static_cast<uint32_t>(kPageTokens * band.stored_channels * bits / 8), index,
                      fmt::format("codes, {} ({}-bit plane)", which, bits)});
    low_bit += bits;
  }
  if (layout.token_scale != ScaleType::kNone) {
    parts->push_back({band.token_scale_offset, scale_bytes(layout.token_scale), index,
                      fmt::format("64 token scales, {}", scale_name(layout.token_scale))});
    if (layout.token_scale != ScaleType::kE6M10) {
      parts->push_back({band.token_base_offset, 2, index, "base of the token scales, e6m10"});
    }
  }
  if (layout.asymmetric && !layout.channel_centre) {
    parts->push_back({band.token_low_offset, 2 * kPageTokens, index, "64 token lows, binary16"});
  }
}

std::string band_text(const TileLayout& layout, int b) {
  const BandLayout& band = layout.bands[b];
  return fmt::format("band {}: {} bits, channels {}..{}", b, static_cast<int>(band.bits), band.first_channel,
                     band.first_channel + band.channels - 1);
}

// The bands side by side, as wide as their channels.
std::string draw_bands(const TileLayout& layout) {
  constexpr int kColumns = 64;
  std::string rule = "  +", names = "  |";
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = layout.bands[b];
    const auto width = static_cast<size_t>(std::max(8, band.channels * kColumns / layout.head_dim));
    rule += std::string(width, '-') + "+";
    names += fmt::format("{:^{}}|", fmt::format("{} bits", static_cast<int>(band.bits)), width);
  }
  std::string text = rule + "\n" + names + "\n" + rule + "\n";
  for (int b = 0; b < layout.n_bands; ++b) text += "  " + band_text(layout, b) + "\n";
  return text + "\n";
}

std::string formula(const TileLayout& layout) {
  if (layout.exact) return "x[t][c] = row t, word c\n";
  std::string scale, offset;
  if (layout.channel_scale) scale += "channel_scale[c] * ";
  if (layout.token_scale != ScaleType::kNone) scale += "token_scale[t][band] * ";
  if (layout.asymmetric && !layout.channel_centre) offset += " + low[t][band]";
  if (layout.channel_centre) offset += layout.asymmetric ? " + low[c]" : " + centre[c]";
  const char* code = layout.asymmetric ? "code[t][c]" : "(code[t][c] - (2^bits - 1) / 2)";
  return "x[t][c] = " + scale + code + offset + "\n";
}

std::string quad_order(Side side) {
  std::string text =
      "Where a code is: in a plane of p bits, byte j of 64-byte vector e / (8 / p), from bit p * (e % (8 / "
      "p)) "
      "on, where\n";
  return text + (side == Side::kKey
                     ? "  e = 4 * (c / 4) + t / 16, j = 4 * (t % 16) + c % 4, c counted from the "
                       "band's first channel\n"
                     : "  e = 16 * (c / 16) + t / 4, j = 4 * (c % 16) + t % 4, c counted from the "
                       "band's first channel\n");
}

}  // namespace

std::vector<TilePart> tile_parts(const Format& format) {
  const TileLayout& layout = format.layout();
  std::vector<TilePart> parts;
  if (layout.exact) {
    parts.push_back({0, static_cast<uint32_t>(2 * kPageTokens * layout.head_dim), -1,
                     fmt::format("64 rows of {} {} words", layout.head_dim,
                                 layout.exact_bf16 ? "bfloat16" : "binary16")});
  }
  for (int b = 0; b < layout.n_bands; ++b) add_band_parts(layout, b, &parts);
  const auto channels = static_cast<uint32_t>(2 * layout.head_dim);
  if (layout.channel_scale) {
    parts.push_back({layout.channel_scale_offset, channels, -1,
                     fmt::format("{} channel scales, e6m10", layout.head_dim)});
  }
  if (layout.channel_centre) {
    parts.push_back(
        {layout.channel_centre_offset, channels, -1,
         fmt::format("{} channel {}, binary16", layout.head_dim, layout.asymmetric ? "lows" : "centres")});
  }
  parts.push_back(
      {layout.trailer_offset, sizeof(TileTrailer), -1, "trailer: format id, checksum, errors, version"});
  std::sort(parts.begin(), parts.end(),
            [](const TilePart& a, const TilePart& b) { return a.offset < b.offset; });
  std::vector<TilePart> filled;
  uint32_t at = 0;
  for (TilePart& part : parts) {
    if (part.offset > at) filled.push_back({at, part.offset - at, -1, "padding"});
    at = part.offset + part.bytes;
    filled.push_back(std::move(part));
  }
  return filled;
}

std::string draw_tile(const Format& format) {
  const TileLayout& layout = format.layout();
  const double values = static_cast<double>(kPageTokens) * layout.head_dim;
  std::string text = fmt::format(
      "{}, id {} (0x{:08x}): a {} tile of 64 tokens x {} channels takes {} bytes, {:.4f} bits per value\n\n",
      format.name(), format.id(), format.id(), side_name(layout.side), layout.head_dim, format.tile_bytes(),
      format.bits_per_value());
  if (layout.n_bands > 0) text += draw_bands(layout);
  const std::string rule = "+" + std::string(kBoxWidth + 2, '-') + "+";
  text += fmt::format("{:>8}  {:<{}}  {:>7}  {:>10}\n", "byte", "", kBoxWidth + 4, "bytes", "bits/value");
  for (const TilePart& part : tile_parts(format)) {
    const std::string what = (part.band >= 0 ? fmt::format("band {}  ", part.band) : "") + part.what;
    text += fmt::format("{:>8}  {}\n", part.offset, rule);
    text += fmt::format("{:>8}  | {:<{}} |  {:>7}  {:>10.4f}\n", "", what, kBoxWidth, part.bytes,
                        8.0 * part.bytes / values);
  }
  text += fmt::format("{:>8}  {}\n\n", format.tile_bytes(), rule) + formula(layout);
  return layout.exact ? text : text + quad_order(layout.side);
}

nlohmann::json tile_json(const Format& format) {
  nlohmann::json list = nlohmann::json::array();
  for (const TilePart& p : tile_parts(format)) {
    list.push_back({{"offset", p.offset}, {"bytes", p.bytes}, {"band", p.band}, {"what", p.what}});
  }
  return {{"version", 1},
          {"name", format.name()},
          {"id", format.id()},
          {"side", side_name(format.layout().side)},
          {"head_dim", format.layout().head_dim},
          {"tile_bytes", format.tile_bytes()},
          {"bits_per_value", format.bits_per_value()},
          {"parts", list}};
}

}  // namespace kvant::cli

// kvant formats: the registry as tables, and the byte layout of one tile.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "kvant/candidate.h"
#include "kvant/eval_report.h"
#include "kvant/format.h"
#include "kvant/layer_scheme.h"
#include "kvant/scheme.h"

namespace kvant::cli {
namespace {

struct FormatsFlags {
  int head_dim = 64;
  std::string explain, side = "key";
  bool json = false, markdown = false;
};

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant formats --head-dim 128\n"
    "  kvant formats --explain t5-3 --side value\n"
    "\nBits are per stored value of a full tile, scales, trailer and padding counted.\n";

struct Part {
  uint32_t offset = 0, bytes = 0;
  std::string what;
};

const char* scale_name(ScaleType type) {
  switch (type) {
    case ScaleType::kE6M10:
      return "16-bit e6m10";
    case ScaleType::kLog8:
      return "8-bit, 1/8 octave steps";
    case ScaleType::kLog4:
      return "4-bit, 1/4 octave steps";
    case ScaleType::kNone:
      break;
  }
  return "none";
}

uint32_t scale_bytes(ScaleType type) {
  if (type == ScaleType::kE6M10) return 2 * kPageTokens;
  return type == ScaleType::kLog8 ? kPageTokens : kPageTokens / 2;
}

void add_band_parts(const TileLayout& layout, int index, std::vector<Part>* parts) {
  const BandLayout& band = layout.bands[index];
  const std::string name = fmt::format("band {} (channels {}..{}, {} bits)", index, band.first_channel,
                                       band.first_channel + band.channels - 1, band.bits);
  for (int p = 0; p < band.n_planes; ++p) {
    parts->push_back({band.plane_offset[p],
                      static_cast<uint32_t>(kPageTokens * band.stored_channels * band.plane_bits[p] / 8),
                      fmt::format("{}: codes, {}-bit plane", name, band.plane_bits[p])});
  }
  if (layout.token_scale != ScaleType::kNone) {
    parts->push_back({band.token_scale_offset, scale_bytes(layout.token_scale),
                      fmt::format("band {}: 64 token scales, {}", index, scale_name(layout.token_scale))});
    if (layout.token_scale != ScaleType::kE6M10) {
      parts->push_back({band.token_base_offset, 2, fmt::format("band {}: base of the scales, e6m10", index)});
    }
  }
  if (layout.asymmetric && !layout.channel_centre) {
    parts->push_back(
        {band.token_low_offset, 2 * kPageTokens, fmt::format("band {}: 64 token lows, binary16", index)});
  }
}

std::vector<Part> parts_of(const Format& format) {
  const TileLayout& layout = format.layout();
  std::vector<Part> parts;
  if (layout.exact) {
    return {{0, layout.tile_bytes,
             fmt::format("64 rows of {} {} words", layout.head_dim,
                         layout.exact_bf16 ? "bfloat16" : "binary16")}};
  }
  for (int b = 0; b < layout.n_bands; ++b) add_band_parts(layout, b, &parts);
  const auto channels = static_cast<uint32_t>(2 * layout.head_dim);
  if (layout.channel_scale) parts.push_back({layout.channel_scale_offset, channels, "channel scales, e6m10"});
  if (layout.channel_centre)
    parts.push_back({layout.channel_centre_offset, channels, "channel centres, binary16"});
  parts.push_back({layout.trailer_offset, sizeof(TileTrailer),
                   "trailer: format id, checksum, error statistics, version"});
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.offset < b.offset; });
  std::vector<Part> filled;
  uint32_t at = 0;
  for (Part& part : parts) {
    if (part.offset > at) filled.push_back({at, part.offset - at, "padding"});
    at = part.offset + part.bytes;
    filled.push_back(std::move(part));
  }
  return filled;
}

Result<Format> parse(const std::string& name, Side side, int head_dim) {
  Result<Format> format = Format::parse(name, side, head_dim);
  if (format.ok()) return format;
  const std::string hint = eval::nearest(name, format_names());
  return Status(format.status().code(), "--explain " + name + ": " + format.status().message() +
                                            "; nearest registered name is " + hint);
}

int explain(const FormatsFlags& f) {
  const Side side = f.side == "key" ? Side::kKey : Side::kValue;
  Result<Format> format = parse(f.explain, side, f.head_dim);
  if (!format.ok()) return fail(format.status());
  const std::vector<Part> parts = parts_of(format.value());
  if (f.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const Part& p : parts) list.push_back({{"offset", p.offset}, {"bytes", p.bytes}, {"what", p.what}});
    std::printf("%s\n", nlohmann::json{{"version", 1},
                                       {"name", format.value().name()},
                                       {"id", format.value().id()},
                                       {"side", f.side},
                                       {"head_dim", f.head_dim},
                                       {"tile_bytes", format.value().tile_bytes()},
                                       {"bits_per_value", format.value().bits_per_value()},
                                       {"parts", list}}
                            .dump(2)
                            .c_str());
    return kOk;
  }
  std::printf("%s, id %u, %s tile: 64 tokens x %d channels in %zu bytes, %.3f bits per value\n\n",
              format.value().name().c_str(), format.value().id(), f.side.c_str(), f.head_dim,
              format.value().tile_bytes(), format.value().bits_per_value());
  size_t width = 0;
  for (const Part& p : parts) width = std::max(width, p.what.size());
  const std::string rule = "        +" + std::string(width + 2, '-') + "+\n";
  std::string text = rule;
  for (const Part& p : parts)
    text += fmt::format("{:>7} | {:<{}} | {} bytes\n", p.offset, p.what, width, p.bytes) + rule;
  std::printf("%s%7zu\n\n", text.c_str(), format.value().tile_bytes());
  std::puts(
      "x[t][c] = centre[c] + low[t][band] + channel_scale[c] * token_scale[t][band] * (code[t][c] - mid)");
  return kOk;
}

struct Listed {
  std::string name, axis, summary;
  Format key, value;
};

Result<std::vector<Listed>> list_formats(int head_dim) {
  std::vector<Listed> out;
  for (const FamilyInfo& family : format_families()) {
    for (std::string_view name : family.examples) {
      Result<Format> key = Format::parse(name, Side::kKey, head_dim);
      Result<Format> value = Format::parse(name, Side::kValue, head_dim);
      // Bands that do not fit this head size.
      if (!key.ok() || !value.ok()) continue;
      out.push_back({std::string(name), std::string(family.scale_axis), std::string(family.summary),
                     key.value(), value.value()});
    }
  }
  if (out.empty()) return Status(Code::kUnsupported, "--head-dim: no format takes this head size");
  return out;
}

// Every packed format is read by the fused path; rows of exact ones are read as they are.
const char* fused(const Format& format) { return format.exact() ? "rows" : "yes"; }

struct ListedScheme {
  RegisteredScheme scheme;
  double bits_k = 16, bits_v = 16;
};

std::vector<ListedScheme> list_schemes(int head_dim) {
  std::vector<ListedScheme> out;
  for (const RegisteredScheme& s : registered_schemes()) {
    ListedScheme listed{.scheme = s};
    const Result<Scheme> scheme = parse_scheme(s.name);
    if (!scheme.ok()) continue;
    const Result<LayerScheme> layer = resolve_layer(
        scheme.value(), {.n_query_heads = 1, .n_kv_heads = 1, .key_dim = head_dim, .value_dim = head_dim});
    if (!layer.ok()) continue;
    listed.bits_k = layer.value().key_bits();
    listed.bits_v = layer.value().value_bits();
    out.push_back(listed);
  }
  return out;
}

void print_json(const FormatsFlags& f, const std::vector<Listed>& formats) {
  nlohmann::json list = nlohmann::json::array(), schemes = nlohmann::json::array();
  for (const Listed& l : formats) {
    list.push_back({{"name", l.name},
                    {"id", l.key.id()},
                    {"scale_axis", l.axis},
                    {"bits_k", l.key.bits_per_value()},
                    {"bits_v", l.value.bits_per_value()},
                    {"tile_bytes_k", l.key.tile_bytes()},
                    {"tile_bytes_v", l.value.tile_bytes()},
                    {"exact", l.key.exact()},
                    {"fused", !l.key.exact()},
                    {"summary", l.summary}});
  }
  for (const ListedScheme& s : list_schemes(f.head_dim)) {
    schemes.push_back({{"name", s.scheme.name},
                       {"plain", s.scheme.plain},
                       {"calibrated", s.scheme.calibrated},
                       {"bits_k", s.bits_k},
                       {"bits_v", s.bits_v},
                       {"summary", s.scheme.summary}});
  }
  std::printf(
      "%s\n",
      nlohmann::json{{"version", 1}, {"head_dim", f.head_dim}, {"formats", list}, {"schemes", schemes}}
          .dump(2)
          .c_str());
}

int do_formats(const FormatsFlags& f) {
  if (f.head_dim % 8 != 0) {
    return fail(
        {Code::kInvalidArgument, fmt::format("--head-dim {}: head sizes are multiples of 8; nearest is {}",
                                             f.head_dim, std::clamp((f.head_dim + 4) / 8 * 8, 32, 256))});
  }
  if (!f.explain.empty()) return explain(f);
  Result<std::vector<Listed>> formats = list_formats(f.head_dim);
  if (!formats.ok()) return fail(formats.status());
  if (f.json) {
    print_json(f, formats.value());
    return kOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"format", "id", "bits K", "bits V", "tile bytes K", "tile bytes V", "fused", "scale axis"}};
  for (const Listed& l : formats.value()) {
    rows.push_back({l.name, std::to_string(l.key.id()), fmt::format("{:.3f}", l.key.bits_per_value()),
                    fmt::format("{:.3f}", l.value.bits_per_value()), std::to_string(l.key.tile_bytes()),
                    std::to_string(l.value.tile_bytes()), fused(l.key), l.axis});
  }
  std::printf("Formats of one tile (64 tokens x %d channels):\n\n%s\n", f.head_dim,
              eval::format_table(rows, f.markdown).c_str());
  rows = {{"scheme", "bits K", "bits V", "formats", "with calibration"}};
  for (const ListedScheme& s : list_schemes(f.head_dim)) {
    rows.push_back({std::string(s.scheme.name), fmt::format("{:.3f}", s.bits_k),
                    fmt::format("{:.3f}", s.bits_v), std::string(s.scheme.plain),
                    std::string(s.scheme.calibrated)});
  }
  std::printf("Schemes (bits without calibration):\n\n%s", eval::format_table(rows, f.markdown).c_str());
  return kOk;
}

}  // namespace

Command add_formats(CLI::App& root) {
  auto f = std::make_shared<FormatsFlags>();
  CLI::App* app = root.add_subcommand("formats", "formats and schemes, and what they cost at a head size");
  app->footer(kFooter);
  app->add_option("--head-dim", f->head_dim, "channels of a head (default 64)")
      ->check(whole_number(32, 256))
      ->type_name("N");
  app->add_option("--explain", f->explain, "draw the tile of this format with its byte offsets")
      ->type_name("FORMAT");
  app->add_option("--side", f->side, "side of --explain (default key)")->check(one_of({"key", "value"}));
  app->add_flag("--json", f->json, "print JSON");
  app->add_flag("--markdown", f->markdown, "print tables for GitHub");
  return {app, [f] { return do_formats(*f); }};
}

}  // namespace kvant::cli

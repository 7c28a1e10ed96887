// kvant formats: the registry as tables, and the byte layout of one tile.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "explain_format.h"
#include "kvant/edit_distance.h"
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
    "\nBits are per stored value of a full tile, scales, trailer and padding counted. Formats and schemes "
    "marked\n"
    "'comparison' show what other caches do; they are no recommendation.\n";

Result<Format> parse(const std::string& name, Side side, int head_dim) {
  Result<Format> format = Format::parse(name, side, head_dim);
  if (format.ok()) return format;
  const std::string hint = nearest(name, format_names());
  return Status(format.status().code(), "--explain " + name + ": " + format.status().message() +
                                            "; nearest registered name is " + hint);
}

int explain(const FormatsFlags& f) {
  const Side side = f.side == "key" ? Side::kKey : Side::kValue;
  Result<Format> format = parse(f.explain, side, f.head_dim);
  if (!format.ok()) return fail(format.status());
  const std::string text = f.json ? tile_json(format.value()).dump(2) + "\n" : draw_tile(format.value());
  std::fputs(text.c_str(), stdout);
  return kOk;
}

struct Listed {
  std::string name, axis, summary;
  Format key, value;
  bool comparison = false;
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
                     key.value(), value.value(), family.comparison});
    }
  }
  if (out.empty()) return Status(Code::kUnsupported, "--head-dim: no format takes this head size");
  return out;
}

// Every packed format is read by the fused path; rows of exact ones are read as they are.
const char* fused(const Format& format) { return format.exact() ? "rows" : "yes"; }

const char* purpose(bool comparison) { return comparison ? "comparison" : "use"; }

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
                    {"comparison", l.comparison},
                    {"summary", l.summary}});
  }
  for (const ListedScheme& s : list_schemes(f.head_dim)) {
    schemes.push_back({{"name", s.scheme.name},
                       {"plain", s.scheme.plain},
                       {"calibrated", s.scheme.calibrated},
                       {"bits_k", s.bits_k},
                       {"bits_v", s.bits_v},
                       {"comparison", s.scheme.comparison},
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
      {"format", "id", "bits K", "bits V", "tile bytes K", "tile bytes V", "fused", "for", "scale axis"}};
  for (const Listed& l : formats.value()) {
    rows.push_back({l.name, fmt::format("0x{:08x}", l.key.id()),
                    fmt::format("{:.3f}", l.key.bits_per_value()),
                    fmt::format("{:.3f}", l.value.bits_per_value()), std::to_string(l.key.tile_bytes()),
                    std::to_string(l.value.tile_bytes()), fused(l.key), purpose(l.comparison), l.axis});
  }
  std::printf("Formats of one tile (64 tokens x %d channels):\n\n%s\n", f.head_dim,
              eval::format_table(rows, f.markdown).c_str());
  rows = {{"scheme", "for", "bits K", "bits V", "formats", "with calibration"}};
  for (const ListedScheme& s : list_schemes(f.head_dim)) {
    rows.push_back({std::string(s.scheme.name), purpose(s.scheme.comparison), fmt::format("{:.3f}", s.bits_k),
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

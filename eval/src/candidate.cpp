#include "kvant/candidate.h"

#include <algorithm>

#include "kvant/edit_distance.h"

namespace kvant::eval {
namespace {

constexpr std::string_view kPeer = "llama:";
constexpr std::string_view kIk = "ik:";

struct CacheType {
  std::string_view name;
  ggml_type type;
};
constexpr CacheType kCacheTypes[] = {
    {"f32", GGML_TYPE_F32},   {"f16", GGML_TYPE_F16},   {"bf16", GGML_TYPE_BF16},
    {"q8_0", GGML_TYPE_Q8_0}, {"q5_1", GGML_TYPE_Q5_1}, {"q5_0", GGML_TYPE_Q5_0},
    {"q4_1", GGML_TYPE_Q4_1}, {"q4_0", GGML_TYPE_Q4_0}, {"iq4_nl", GGML_TYPE_IQ4_NL}};

Result<ggml_type> parse_type(std::string_view text, std::string_view whole) {
  std::vector<std::string> names;
  for (const CacheType& t : kCacheTypes) {
    if (t.name == text) return t.type;
    names.emplace_back(t.name);
  }
  return Status(Code::kInvalidArgument, "'" + std::string(whole) + "': '" + std::string(text) +
                                            "' is not a cache type of llama.cpp; nearest is " +
                                            nearest(text, names));
}

// The scheme with one side exact. A registered name keeps its name, because what it stands for depends on
// whether the model has a calibration.
std::string with_exact_side(const Candidate& c, std::string_view field) {
  const std::string first = c.scheme.substr(0, c.scheme.find(','));
  const bool registered = first.find('=') == std::string::npos;
  if (registered && c.scheme.find("," + std::string(field) + "=") == std::string::npos) {
    return c.scheme + "," + std::string(field) + "=f16";
  }
  Scheme scheme = c.parsed;
  (field == "k" ? scheme.key_format : scheme.value_format) = "f16";
  return to_string(scheme);
}

bool continues(const std::string& before, std::string_view part) {
  if (part.find('=') == std::string_view::npos || before.empty() || before.starts_with(kPeer) ||
      before.starts_with(kIk)) {
    return false;
  }
  return !(part.starts_with("k=") && before.find("k=") != std::string::npos);
}

}  // namespace

const std::vector<std::string_view>& cache_type_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const CacheType& t : kCacheTypes) all.push_back(t.name);
    return all;
  }();
  return names;
}

bool Candidate::quantized() const {
  return peer ? ggml_is_quantized(type_k) || ggml_is_quantized(type_v) : !parsed.exact();
}

Result<Candidate> parse_peer(std::string_view text) {
  const std::string_view types = text.substr(std::min(kPeer.size(), text.size()));
  const size_t slash = types.find('/');
  Result<ggml_type> k = parse_type(types.substr(0, slash), text);
  if (!k.ok()) return k.status();
  Result<ggml_type> v = slash == std::string_view::npos ? k : parse_type(types.substr(slash + 1), text);
  if (!v.ok()) return v.status();
  Candidate c;
  c.name = text;
  c.peer = true;
  c.type_k = k.value();
  c.type_v = v.value();
  return c;
}

Result<Candidate> parse_candidate(std::string_view text) {
  if (text.starts_with(kPeer)) return parse_peer(text);
  Result<Scheme> scheme = parse_scheme(text);
  if (!scheme.ok()) return scheme.status();
  Candidate c;
  c.name = c.scheme = text;
  c.parsed = std::move(scheme.value());
  return c;
}

std::vector<std::string> split_candidates(std::string_view list) {
  std::vector<std::string> out;
  bool fresh = true;
  while (true) {
    const size_t end = list.find_first_of(",;");
    const std::string_view part = list.substr(0, end);
    if (!part.empty()) {
      if (!fresh && continues(out.back(), part)) {
        out.back() += "," + std::string(part);
      } else {
        out.emplace_back(part);
      }
      fresh = false;
    }
    if (end == std::string_view::npos) return out;
    if (list[end] == ';') fresh = true;
    list.remove_prefix(end + 1);
  }
}

namespace {

Result<Candidate> parse_ik(std::string_view text) {
  Candidate c;
  c.name = text;
  c.peer = true;
  c.ik_type = text.substr(kIk.size());
  const Result<ggml_type> type = parse_type(c.ik_type, text);
  if (!type.ok()) return type.status();
  c.type_k = c.type_v = type.value();
  return c;
}

Result<std::vector<Candidate>> parse_list(std::string_view list, bool ik) {
  std::vector<Candidate> out;
  for (const std::string& text : split_candidates(list)) {
    Result<Candidate> candidate = ik && text.starts_with(kIk) ? parse_ik(text) : parse_candidate(text);
    if (!candidate.ok()) return candidate.status();
    const bool twice =
        std::any_of(out.begin(), out.end(), [&](const Candidate& c) { return c.name == text; });
    if (twice) return Status(Code::kInvalidArgument, "'" + text + "' is listed twice");
    out.push_back(std::move(candidate.value()));
  }
  if (out.empty()) return Status(Code::kInvalidArgument, "no cache is listed; for example llama:q8_0,kv4");
  return out;
}

}  // namespace

Result<std::vector<Candidate>> parse_candidates(std::string_view list) { return parse_list(list, false); }
Result<std::vector<Candidate>> parse_bench_candidates(std::string_view list) {
  return parse_list(list, true);
}

std::vector<Candidate> with_legs(const std::vector<Candidate>& candidates) {
  std::vector<Candidate> out;
  for (const Candidate& c : candidates) {
    out.push_back(c);
    if (!c.quantized()) continue;
    Candidate keys = c, values = c;
    keys.name += " (keys only)";
    values.name += " (values only)";
    keys.type_v = values.type_k = GGML_TYPE_F16;
    keys.parsed.value_format = values.parsed.key_format = "f16";
    if (!c.peer) {
      keys.scheme = with_exact_side(c, "v");
      values.scheme = with_exact_side(c, "k");
    }
    if (keys.quantized()) out.push_back(std::move(keys));
    if (values.quantized()) out.push_back(std::move(values));
  }
  return out;
}

}  // namespace kvant::eval

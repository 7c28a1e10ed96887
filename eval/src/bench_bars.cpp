#include "kvant/bench_bars.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "kvant/bench_attention.h"
#include "kvant/bench_decode.h"
#include "kvant/calibration_file.h"
#include "kvant/edit_distance.h"
#include "kvant/test_model.h"
#include "peer_process.h"
#include "timing.h"

namespace kvant::eval {
namespace {

constexpr char kPeerMissing[] = "peer not built: ./run setup peers";

class Bars {
 public:
  Bars(const BarsOptions& options, std::vector<BarRow>* out) : o_(options), out_(out) {}
  Status attention();
  Status decode_32k();
  Status smollm();
  Status depth_0();
  Status prefill();
  template <int kHeadDim>
  Status never_slower();
  Status mixed_pairs();
  Status forks();
  Status encode();

 private:
  bool has_ik() const { return access(PeerProcess::default_program().c_str(), X_OK) == 0; }
  Status measure(BenchAttentionOptions o, AttentionBench* bench) const {
    o.threads = o_.threads;
    o.cancelled = o_.cancelled;
    return bench_attention(o, bench);
  }
  Status measure(const std::string& model, const std::string& caches, int depth, int rounds, int round_tokens,
                 int prefill, std::vector<DecodeRow>* rows) const;
  // Made once; the same options give the same file.
  Result<std::string> shapes_model() const;
  // Path and name of the models that short contexts are measured on.
  Result<std::vector<std::pair<std::string, std::string>>> both_models() const;
  // kvant's decode speed against that of another cache of the same run.
  void add_decode(const char* group, std::string what, const std::vector<DecodeRow>& rows,
                  const std::string& peer, double bound);

  void add(const char* group, std::string what, double figure, double bound, std::string note,
           bool at_most = false) {
    BarRow row{group, std::move(what), figure, bound, at_most, std::move(note), BarState::kHolds};
    if (at_most ? figure > bound : figure < bound) row.state = BarState::kShort;
    out_->push_back(std::move(row));
  }
  void add_missing(const char* group, std::string what, double bound) {
    out_->push_back({group, std::move(what), 0, bound, false, kPeerMissing, BarState::kNotMeasured});
  }

  const BarsOptions& o_;
  std::vector<BarRow>* out_;
};

const AttentionRow* find(const AttentionBench& bench, const std::string& cache, int length) {
  for (const AttentionRow& r : bench.rows) {
    if (r.cache == cache && r.length == length) return &r;
  }
  return nullptr;
}

// What limits a row that falls short.
std::string parts(const DecodeRow& row) {
  const ggml::Profile& p = row.profile;
  const double steps = static_cast<double>(std::max<uint64_t>(p.graphs, 1)) * 1e-3;
  return fmt::format(
      " (of a step of {:.2f} ms: weights {:.2f}, attention {:.2f}, encode {:.2f}, masks {:.2f})",
      p.total_seconds / steps, p.model_seconds() / steps, p.attention_seconds / steps,
      p.encode_seconds / steps, p.plan_seconds / steps);
}

const DecodeRow& find(const std::vector<DecodeRow>& rows, const std::string& cache) {
  return *std::find_if(rows.begin(), rows.end(), [&](const DecodeRow& r) { return r.cache == cache; });
}

Status Bars::measure(const std::string& model, const std::string& caches, int depth, int rounds,
                     int round_tokens, int prefill, std::vector<DecodeRow>* rows) const {
  const Result<std::vector<Candidate>> parsed = parse_bench_candidates(caches);
  if (!parsed.ok()) return parsed.status();
  BenchDecodeOptions o;
  o.model_path = model;
  o.caches = parsed.value();
  o.depths = {depth};
  o.threads = o_.threads;
  o.rounds = rounds;
  o.round_tokens = round_tokens;
  o.prefill_tokens = prefill;
  o.prefill_rounds = 3;
  o.kvant.quiet = true;
  o.cancelled = o_.cancelled;
  return bench_decode(o, rows);
}

Result<std::string> Bars::shapes_model() const {
  if (!o_.shapes_path.empty()) return o_.shapes_path;
  const std::string folder = ggml::cache_home() + "/bench";
  const std::string path = folder + "/shapes-8-8-2-128-q8_0.gguf";
  if (access(path.c_str(), R_OK) == 0) return path;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TestModelOptions t;
  t.kind = TestModelKind::kShapes;
  t.path = path + "." + std::to_string(getpid());
  t.layers = 8;
  t.heads = 8;
  t.kv_heads = 2;
  t.head_dim = 128;
  t.embedding = 1024;
  t.feed_forward = 2048;
  t.weights = GGML_TYPE_Q8_0;
  t.context = 65536;
  KVANT_RETURN_IF_ERROR(write_test_model(t));
  std::filesystem::rename(t.path, path, error);
  if (error) return Status(Code::kIo, path + ": " + error.message());
  return path;
}

Result<std::vector<std::pair<std::string, std::string>>> Bars::both_models() const {
  const Result<std::string> shapes = shapes_model();
  if (!shapes.ok()) return shapes.status();
  return std::vector<std::pair<std::string, std::string>>{{o_.model_path, "SmolLM2"},
                                                          {shapes.value(), "8 layers 8/2 x 128"}};
}

void Bars::add_decode(const char* group, std::string what, const std::vector<DecodeRow>& rows,
                      const std::string& peer, double bound) {
  const DecodeRow& own = find(rows, o_.cache);
  const DecodeRow& other = find(rows, peer);
  add(group, std::move(what), own.decode_tok_s / other.decode_tok_s, bound,
      fmt::format("{} {:.1f} tok/s{}, {} {:.1f}{}", own.cache, own.decode_tok_s, parts(own), peer,
                  other.decode_tok_s, other.flash_attention ? "" : " (flash attention off)"));
}

Status Bars::attention() {
  BenchAttentionOptions o;
  o.caches = {o_.cache, "llama:f16", "llama:q4_0"};
  const std::vector<std::string> ik = {"ik:f16", "ik:q8_0", "ik:q4_0"};
  if (has_ik()) o.caches.insert(o.caches.end(), ik.begin(), ik.end());
  constexpr int kKeys = 32768;
  o.lengths = {kKeys};
  o.repeats = 9;
  AttentionBench bench;
  KVANT_RETURN_IF_ERROR(measure(o, &bench));
  const AttentionRow& own = *find(bench, o_.cache, kKeys);
  auto against = [&](const std::string& name, const AttentionRow& peer, double bound) {
    add("attention", name, peer.ns_per_head_key / own.ns_per_head_key, bound,
        fmt::format("{} {:.2f} ns per head and key, {} {:.2f}{}{}", own.cache, own.ns_per_head_key,
                    peer.cache, peer.ns_per_head_key, peer.note.empty() ? "" : ", ", peer.note));
  };
  against("decode attention, 32k keys, d 128, G 4: against llama.cpp q4_0", *find(bench, "llama:q4_0", kKeys),
          8);
  against("the same against llama.cpp's best f16", *find(bench, "llama:f16", kKeys), 4);
  const std::string best_ik = "the same against ik_llama.cpp's best cache type";
  if (has_ik()) {
    const AttentionRow* best = find(bench, ik[0], kKeys);
    for (const std::string& name : ik) {
      const AttentionRow* row = find(bench, name, kKeys);
      if (row->ns_per_head_key < best->ns_per_head_key) best = row;
    }
    against(best_ik, *best, 2);
  } else {
    add_missing("attention", best_ik, 2);
  }
  add("attention", "bytes read per second, 4 bits, G 4, of a plain read stream", own.stream_share, 0.7,
      fmt::format("{:.1f} of {:.1f} GB/s", own.gigabytes_per_s, bench.stream_gigabytes_per_s));
  return {};
}

Status Bars::decode_32k() {
  const Result<std::string> model = shapes_model();
  if (!model.ok()) return model.status();
  std::vector<DecodeRow> rows;
  const std::string caches = o_.cache + ";llama:f16;llama:q4_0" + (has_ik() ? ";ik:q4_0" : "");
  KVANT_RETURN_IF_ERROR(measure(model.value(), caches, 32768, 5, 4, 0, &rows));
  const char* group = "decode-32k";
  add_decode(group, "decode at 32k, 8 layers 8/2 x 128: against llama.cpp's best f16", rows, "llama:f16", 4);
  add_decode(group, "the same against llama.cpp q4_0", rows, "llama:q4_0", 12);
  const std::string ik = "the same against ik_llama.cpp q4_0";
  if (has_ik()) {
    add_decode(group, ik, rows, "ik:q4_0", 2);
  } else {
    add_missing(group, ik, 2);
  }
  return {};
}

Status Bars::smollm() {
  std::vector<DecodeRow> rows;
  KVANT_RETURN_IF_ERROR(measure(o_.model_path, o_.cache + ";llama:f16;llama:q4_0", 7900, 5, 6, 0, &rows));
  const char* group = "smollm-7900";
  add_decode(group, "decode, SmolLM2 at 7.9k, own weights: against llama.cpp's best f16", rows, "llama:f16",
             2.5);
  add_decode(group, "the same against llama.cpp q4_0", rows, "llama:q4_0", 6);
  return {};
}

Status Bars::depth_0() {
  const auto models = both_models();
  if (!models.ok()) return models.status();
  for (const auto& [path, name] : models.value()) {
    std::vector<DecodeRow> rows;
    KVANT_RETURN_IF_ERROR(measure(path, o_.cache + ";llama:f16", 0, 9, 16, 0, &rows));
    add_decode("depth-0", "decode at depth 0, " + name + ": against llama.cpp's best f16", rows, "llama:f16",
               0.97);
  }
  return {};
}

Status Bars::prefill() {
  const Result<std::string> model = shapes_model();
  if (!model.ok()) return model.status();
  std::vector<DecodeRow> rows;
  KVANT_RETURN_IF_ERROR(measure(model.value(), o_.cache + ";llama:f16;llama:q4_0", 8192, 1, 1, 512, &rows));
  const DecodeRow& own = find(rows, o_.cache);
  auto against = [&](const std::string& cache, const std::string& name, double bound) {
    const DecodeRow& peer = find(rows, cache);
    add("prefill-8192", name, own.prefill_tok_s / peer.prefill_tok_s, bound,
        fmt::format("{} {:.1f} tok/s, {} {:.1f}", own.cache, own.prefill_tok_s, cache, peer.prefill_tok_s));
  };
  against("llama:f16", "prefill of 512 at depth 8192, 8 layers 8/2 x 128: against llama.cpp f16", 1);
  against("llama:q4_0", "the same against llama.cpp q4_0", 7);
  return {};
}

struct GridPoint {
  std::string cache;
  int head_dim = 0, group = 0, keys = 0;
  double ratio = 0;  // of its time to that of the exact cache
};

using Measure = std::function<Status(BenchAttentionOptions, AttentionBench*)>;

// A point beyond the bar again, in three longer runs, of which the median counts: of hundreds of points on a
// shared machine some are disturbed.
Status measure_again(BenchAttentionOptions o, const std::string& cache, int keys, const Measure& measure,
                     double* ratio) {
  o.caches = {"exact", cache};
  o.lengths = {keys};
  o.repeats = 25;
  std::vector<double> ratios;
  for (int run = 0; run < 3; ++run) {
    AttentionBench bench;
    KVANT_RETURN_IF_ERROR(measure(o, &bench));
    ratios.push_back(find(bench, cache, keys)->seconds / find(bench, "exact", keys)->seconds);
  }
  *ratio = median(ratios);
  return {};
}

Status measure_points(const BenchAttentionOptions& o, const Measure& measure,
                      std::vector<GridPoint>* points) {
  AttentionBench bench;
  KVANT_RETURN_IF_ERROR(measure(o, &bench));
  for (const int keys : o.lengths) {
    const double exact = find(bench, "exact", keys)->seconds;
    for (const std::string& cache : o.caches) {
      if (cache == "exact") continue;
      double ratio = find(bench, cache, keys)->seconds / exact;
      if (ratio > 1) KVANT_RETURN_IF_ERROR(measure_again(o, cache, keys, measure, &ratio));
      points->push_back({cache, o.head_dim, o.group, keys, ratio});
    }
  }
  return {};
}

template <int kHeadDim>
Status Bars::never_slower() {
  std::vector<GridPoint> points;
  for (const int group : {1, 3, 4, 16}) {
    BenchAttentionOptions o;
    o.caches = {"exact", "kv2", "kv3", "kv4", "kv8"};
    for (int bits = 2; bits <= 8; ++bits) o.caches.push_back(fmt::format("k=t{0},v=t{0}", bits));
    o.lengths = {256, 1024, 8192};
    if (group == 4) o.lengths.push_back(65536);
    o.head_dim = kHeadDim;
    o.group = group;
    o.layers = 2;
    o.check_keys = 1024;
    o.stream = false;
    KVANT_RETURN_IF_ERROR(measure_points(
        o, [this](BenchAttentionOptions a, AttentionBench* b) { return measure(std::move(a), b); }, &points));
  }
  const auto worst = std::max_element(
      points.begin(), points.end(), [](const GridPoint& a, const GridPoint& b) { return a.ratio < b.ratio; });
  const auto slower =
      std::count_if(points.begin(), points.end(), [](const GridPoint& p) { return p.ratio > 1; });
  const std::string group = fmt::format("never-slower-{}", kHeadDim);
  add(group.c_str(),
      fmt::format("time against kvant's exact cache: 2 to 8 bits, d {}, G 1 .. 16, 256 .. 65536 keys",
                  kHeadDim),
      worst->ratio, 1,
      fmt::format("worst of {} points: {}, G {}, {} keys; {} above 1", points.size(), worst->cache,
                  worst->group, worst->keys, slower),
      true);
  return {};
}

// Keys and values of two formats against the slower of the two formats with itself: a pair without a kernel
// of its own would show.
Status Bars::mixed_pairs() {
  constexpr const char* kFormats[] = {"f16", "t8", "t5", "t4", "t2", "t6-4-3-3", "c8a", "c4a", "g4"};
  constexpr int kKeys = 200;
  auto cache = [](const char* k, const char* v) { return fmt::format("k={},v={},w=0,s=0", k, v); };
  for (const int threads : {1, 4}) {
    BenchAttentionOptions o;
    for (const char* k : kFormats) {
      for (const char* v : kFormats) o.caches.push_back(cache(k, v));
    }
    o.lengths = {kKeys};
    o.head_dim = 64;
    o.repeats = 25;
    o.threads = threads;
    o.stream = false;
    o.cancelled = o_.cancelled;
    AttentionBench bench;
    KVANT_RETURN_IF_ERROR(bench_attention(o, &bench));
    double worst = 0;
    std::string worst_pair;
    for (const char* k : kFormats) {
      for (const char* v : kFormats) {
        const double alone =
            std::max(find(bench, cache(k, k), kKeys)->seconds, find(bench, cache(v, v), kKeys)->seconds);
        const double ratio = find(bench, cache(k, v), kKeys)->seconds / alone;
        if (ratio <= worst) continue;
        worst = ratio;
        worst_pair = fmt::format("keys {}, values {}", k, v);
      }
    }
    add("mixed-pairs",
        fmt::format("keys and values of two formats against the slower alone, {} keys, {} threads", kKeys,
                    threads),
        worst, 1.3, fmt::format("worst of {} pairs: {}", o.caches.size(), worst_pair), true);
  }
  return {};
}

Status Bars::forks() {
  for (const int group : {1, 4}) {
    double seconds[2];
    for (const int i : {0, 1}) {
      BenchAttentionOptions o;
      o.caches = {o_.cache};
      o.lengths = {16384};
      o.group = group;
      o.forks = i == 0 ? 1 : 8;
      o.repeats = 9;
      o.stream = false;
      AttentionBench bench;
      KVANT_RETURN_IF_ERROR(measure(o, &bench));
      seconds[i] = bench.rows.front().seconds;
    }
    add("forks", fmt::format("attention of 8 forks of a 16k prefix against one, d 128, G {}", group),
        seconds[1] / seconds[0], 1.5,
        fmt::format("{}: {:.3f} ms and {:.3f} ms per layer", o_.cache, seconds[1] * 1e3, seconds[0] * 1e3),
        true);
  }
  return {};
}

Status Bars::encode() {
  const auto models = both_models();
  if (!models.ok()) return models.status();
  for (const auto& [path, name] : models.value()) {
    std::vector<DecodeRow> rows;
    // Pages are encoded every 64 tokens: whole numbers of pages, where a step is cheapest. An empty cache
    // would not encode until the window is full.
    KVANT_RETURN_IF_ERROR(measure(path, o_.cache, 512, 4, 64, 0, &rows));
    add("encode", "encoding, share of a decode step at depth 512, " + name,
        rows.front().profile.encode_share(), 0.03,
        fmt::format("{} {:.1f} tok/s, 256 steps", o_.cache, rows.front().decode_tok_s), true);
  }
  return {};
}

struct Group {
  const char* name;
  Status (Bars::*run)();
};

constexpr Group kGroups[] = {{"attention", &Bars::attention},
                             {"decode-32k", &Bars::decode_32k},
                             {"smollm-7900", &Bars::smollm},
                             {"depth-0", &Bars::depth_0},
                             {"prefill-8192", &Bars::prefill},
                             {"never-slower-64", &Bars::never_slower<64>},
                             {"never-slower-80", &Bars::never_slower<80>},
                             {"never-slower-96", &Bars::never_slower<96>},
                             {"never-slower-128", &Bars::never_slower<128>},
                             {"never-slower-256", &Bars::never_slower<256>},
                             {"mixed-pairs", &Bars::mixed_pairs},
                             {"forks", &Bars::forks},
                             {"encode", &Bars::encode}};

}  // namespace

const std::vector<std::string>& bar_groups() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Group& group : kGroups) all.emplace_back(group.name);
    return all;
  }();
  return names;
}

Status bench_bars(const BarsOptions& options, std::vector<BarRow>* out) {
  for (const std::string& name : options.only) {
    const auto& all = bar_groups();
    if (std::find(all.begin(), all.end(), name) == all.end()) {
      return {Code::kInvalidArgument,
              "'" + name + "' is not a group of bars; nearest is " + nearest(name, all)};
    }
  }
  Bars bars(options, out);
  for (const Group& group : kGroups) {
    const auto& only = options.only;
    if (!only.empty() && std::find(only.begin(), only.end(), group.name) == only.end()) continue;
    if (options.progress) options.progress(group.name);
    Status status = (bars.*group.run)();
    if (!status.ok()) return {status.code(), std::string(group.name) + ": " + status.message()};
  }
  return {};
}

}  // namespace kvant::eval

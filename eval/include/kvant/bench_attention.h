// Decode attention alone, side by side: kvant's schemes and llama.cpp's cache types, on the same threads of
// the same CPU backend, over caches larger than the last-level cache of the processor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvant/status.h"

namespace kvant::eval {

struct BenchAttentionOptions {
  // kvant schemes, or llama:TYPE for llama.cpp's flash attention over that cache type; llama:f16 also runs
  // without flash attention and the faster counts. ik:TYPE: ik_llama.cpp's, when `./run setup peers` was run.
  std::vector<std::string> caches;
  std::vector<int> lengths = {4096, 32768};  // keys per sequence
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;   // query heads per KV head
  int forks = 1;   // sequences that share all keys but their own newest one; more than one: kvant only
  int layers = 8;  // caches that are visited in turn, as the layers of a model are
  int threads = 2;
  int repeats = 5;           // rounds, interleaved over caches; the median counts
  int check_keys = 1 << 30;  // longer caches are not checked before they are timed
  bool stream = true;        // measure the read stream
  std::function<void(double share, const std::string& what)> progress;
  std::function<bool()> cancelled;
};

struct AttentionRow {
  std::string cache;
  int length = 0;
  double seconds = 0;          // of one layer
  double ns_per_head_key = 0;  // per query head, sequence and key, all threads together (wall time)
  double cache_bytes = 0;      // read per token step and layer
  double gigabytes_per_s = 0;
  double stream_share = 0;  // of a plain read stream of the same threads, taken in turn; of medians
  double max_error = 0;     // kvant: largest |engine - DQREF| relative to the largest |DQREF|
  std::string note;         // "flash attention off" where that was faster
};

struct AttentionBench {
  std::vector<AttentionRow> rows;
  double stream_gigabytes_per_s = 0;
  std::string isa;
};

// Every kvant row is checked against DQREF before it is timed (kInternal when it is beyond the bound of the
// integer path, 2 %). kInvalidArgument names the option.
Status bench_attention(const BenchAttentionOptions& options, AttentionBench* out);

}  // namespace kvant::eval

// Where the time of a graph on the device KVANT goes.
#pragma once

#include <cstdint>

namespace kvant::ggml {

// Wall time as the first thread of each graph sees it. A node ends with a wait for the other threads; that
// wait counts as the model's.
struct Profile {
  uint64_t graphs = 0;
  double total_seconds = 0;
  double attention_seconds = 0;  // queries, scores, weighted sums
  double encode_seconds = 0;     // rows rounded to binary16 and kept, pages sealed into tiles
  double plan_seconds = 0;       // slots, masks, the choice of exact and packed pages
  // Everything that is not the cache: weights, norms, activations.
  double model_seconds() const { return total_seconds - attention_seconds - encode_seconds - plan_seconds; }
  double encode_share() const { return total_seconds > 0 ? encode_seconds / total_seconds : 0; }
  Profile& operator+=(const Profile& other);
};

// Off at first: then no clock is read. Process-wide, safe from any thread.
void set_profiling(bool on);
// Of all graphs that ended since profiling was switched on or this was called; starts over.
Profile take_profile();

}  // namespace kvant::ggml

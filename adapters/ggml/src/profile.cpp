#include "kvant/profile.h"

#include "profile_clock.h"

namespace kvant::ggml {

ProfileCounters& profile_counters() {
  static ProfileCounters counters;
  return counters;
}

Profile& Profile::operator+=(const Profile& other) {
  graphs += other.graphs;
  total_seconds += other.total_seconds;
  attention_seconds += other.attention_seconds;
  encode_seconds += other.encode_seconds;
  plan_seconds += other.plan_seconds;
  return *this;
}

void set_profiling(bool on) {
  take_profile();
  profile_counters().on.store(on, std::memory_order_relaxed);
}

Profile take_profile() {
  ProfileCounters& c = profile_counters();
  constexpr double kNano = 1e-9;
  auto take = [](std::atomic<uint64_t>& counter) {
    return static_cast<double>(counter.exchange(0, std::memory_order_relaxed)) * kNano;
  };
  Profile p;
  p.graphs = c.graphs.exchange(0, std::memory_order_relaxed);
  p.total_seconds = take(c.total);
  p.encode_seconds = take(c.write);
  const double seal = take(c.seal);
  p.encode_seconds += seal;
  // Sealing happens inside the attention nodes.
  p.attention_seconds = take(c.attention) - seal;
  p.plan_seconds = take(c.plan);
  return p;
}

}  // namespace kvant::ggml

// Counters behind kvant/profile.h, in nanoseconds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvant::ggml {

struct ProfileCounters {
  std::atomic<bool> on{false};
  std::atomic<uint64_t> graphs{0}, total{0}, attention{0}, seal{0}, write{0}, plan{0};
};
ProfileCounters& profile_counters();

// Adds the time of its life to a counter, when profiling is on and `counter` is not null.
class ProfileSpan {
 public:
  explicit ProfileSpan(std::atomic<uint64_t>* counter)
      : counter_(profile_counters().on.load(std::memory_order_relaxed) ? counter : nullptr) {
    if (counter_ != nullptr) start_ = std::chrono::steady_clock::now();
  }
  ~ProfileSpan() {
    if (counter_ == nullptr) return;
    const auto spent = std::chrono::steady_clock::now() - start_;
    counter_->fetch_add(static_cast<uint64_t>(std::chrono::nanoseconds(spent).count()),
                        std::memory_order_relaxed);
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;

 private:
  std::atomic<uint64_t>* counter_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvant::ggml

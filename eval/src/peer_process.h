// Another engine's cache in a process of its own (bench/peers/): started once, then asked line by line, so
// that its rounds interleave with ours.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "kvant/status.h"

namespace kvant::eval {

class PeerProcess {
 public:
  // Where `./run setup peers` puts the program.
  static std::string default_program();
  // Waits until the peer has filled its cache. kIo: the program is not there; kUnsupported: what it answered.
  static Result<std::unique_ptr<PeerProcess>> start(const std::vector<std::string>& arguments);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // Seconds, as many as the peer answers.
  Result<std::vector<double>> ask(const std::string& command);
  size_t cache_bytes() const { return cache_bytes_; }

 private:
  PeerProcess() = default;
  Result<std::string> read_line();
  pid_t pid_ = -1;
  int socket_ = -1;
  std::string buffer_;
  size_t cache_bytes_ = 0;
};

}  // namespace kvant::eval

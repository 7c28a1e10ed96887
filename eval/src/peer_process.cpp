#include "peer_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kvant/calibration_file.h"

namespace kvant::eval {
namespace {

// OpenMP threads spin for a while after their last work: ours on the cores that the peer is timed on, its own
// on those of the cache that is timed next.
constexpr std::chrono::milliseconds kQuiet(50);

}  // namespace

std::string PeerProcess::default_program() { return ggml::cache_home() + "/peers/kvant-peer-ik"; }

Result<std::unique_ptr<PeerProcess>> PeerProcess::start(const std::vector<std::string>& arguments) {
  const std::string program = default_program();
  if (access(program.c_str(), X_OK) != 0) {
    return Status(Code::kIo, program + " is not there; ./run setup peers builds it");
  }
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return Status(Code::kIo, std::string("socketpair: ") + std::strerror(errno));
  }
  std::unique_ptr<PeerProcess> peer(new PeerProcess);
  peer->socket_ = ends[0];
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  const int rc = posix_spawn(&peer->pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (rc != 0) {
    peer->pid_ = -1;
    return Status(Code::kIo, program + ": " + std::strerror(rc));
  }
  const Result<std::string> line = peer->read_line();
  if (!line.ok()) return line.status();
  if (line.value().rfind("ready ", 0) != 0) {
    return Status(Code::kInternal, program + " answered '" + line.value() + "'");
  }
  peer->cache_bytes_ = std::strtoull(line.value().c_str() + 6, nullptr, 10);
  return peer;
}

PeerProcess::~PeerProcess() {
  if (socket_ >= 0) close(socket_);
  if (pid_ <= 0) return;
  // Its input has ended; it may be in the middle of a long step.
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
}

Result<std::string> PeerProcess::read_line() {
  for (size_t end = buffer_.find('\n'); end == std::string::npos; end = buffer_.find('\n')) {
    char chunk[4096];
    const ssize_t n = read(socket_, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Status(Code::kInternal, default_program() + " ended without an answer");
    buffer_.append(chunk, static_cast<size_t>(n));
  }
  const size_t end = buffer_.find('\n');
  std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  if (line.rfind("error ", 0) == 0) return Status(Code::kUnsupported, "ik_llama.cpp: " + line.substr(6));
  return line;
}

Result<std::vector<double>> PeerProcess::ask(const std::string& command) {
  std::this_thread::sleep_for(kQuiet);
  const std::string line = command + "\n";
  if (send(socket_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) {
    return Status(Code::kInternal, default_program() + " does not listen any more");
  }
  const Result<std::string> answer = read_line();
  if (!answer.ok()) return answer.status();
  std::this_thread::sleep_for(kQuiet);
  std::vector<double> seconds;
  const char* at = answer.value().c_str();
  for (char* next = nullptr;; at = next) {
    const double value = std::strtod(at, &next);
    if (next == at) break;
    seconds.push_back(value);
  }
  if (seconds.empty())
    return Status(Code::kInternal, default_program() + " answered '" + answer.value() + "'");
  return seconds;
}

}  // namespace kvant::eval

// A conversation in the model's chat template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kvant/llama_session.h"
#include "kvant/status.h"

namespace kvant::cli {

class Chat {
 public:
  // `system` may be empty: the template's own.
  Chat(const eval::Model& model, const std::string& system);
  // What to add to the context for this turn: the template's text since the last call.
  Result<std::string> user(const std::string& text);
  // `ended`: the model ended its reply itself, so that the mark is the next token of the context.
  void assistant(const std::string& text, bool ended);

 private:
  Result<std::string> formatted(bool open_reply) const;
  const char* template_ = nullptr;
  std::vector<std::pair<std::string, std::string>> messages_;  // role, content
  size_t done_ = 0;                                            // of the formatted text
};

}  // namespace kvant::cli

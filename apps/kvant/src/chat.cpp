#include "chat.h"

#include <algorithm>

namespace kvant::cli {

Chat::Chat(const eval::Model& model, const std::string& system)
    : template_(llama_model_chat_template(model.get(), nullptr)) {
  if (!system.empty()) messages_.emplace_back("system", system);
}

Result<std::string> Chat::formatted(bool open_reply) const {
  std::vector<llama_chat_message> messages;
  for (const auto& [role, content] : messages_) messages.push_back({role.c_str(), content.c_str()});
  std::string text(4096, ' ');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int n = llama_chat_apply_template(template_, messages.data(), messages.size(), open_reply,
                                            text.data(), static_cast<int>(text.size()));
    if (n < 0) break;
    const bool fits = static_cast<size_t>(n) <= text.size();
    text.resize(n);
    if (fits) return text;
  }
  return Status(Code::kUnsupported,
                "the model's chat template is not one that llama.cpp knows; use -p without --chat");
}

Result<std::string> Chat::user(const std::string& text) {
  if (template_ == nullptr) {
    return Status(Code::kUnsupported,
                  "the model has no chat template; give a text to complete with -p or -f");
  }
  messages_.emplace_back("user", text);
  Result<std::string> all = formatted(/*open_reply=*/true);
  if (!all.ok()) return all;
  return all.value().substr(std::min(done_, all.value().size()));
}

void Chat::assistant(const std::string& text, bool ended) {
  messages_.emplace_back("assistant", text);
  const Result<std::string> all = formatted(/*open_reply=*/false);
  if (!all.ok()) return;
  const std::string& whole = all.value();
  const size_t reply = whole.rfind(text);
  if (reply == std::string::npos) {
    done_ = whole.size();
    return;
  }
  done_ = reply + text.size();
  // The end mark "<...>" that the model produced itself is not added again.
  if (!ended || done_ >= whole.size() || whole[done_] != '<') return;
  const size_t mark = whole.find('>', done_);
  if (mark != std::string::npos) done_ = mark + 1;
}

}  // namespace kvant::cli

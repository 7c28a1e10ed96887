#include "kvant/llama_session.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

namespace kvant::eval {
namespace {

std::mutex message_mutex;
std::string last_error;
bool verbose_messages = false;

void on_message(ggml_log_level level, const char* text, void*) {
  const std::lock_guard<std::mutex> lock(message_mutex);
  if (level == GGML_LOG_LEVEL_ERROR) {
    last_error = text;
    while (!last_error.empty() && last_error.back() == '\n') last_error.pop_back();
  }
  if (verbose_messages && level != GGML_LOG_LEVEL_DEBUG) std::fputs(text, stderr);
}

std::string take_last_error() {
  const std::lock_guard<std::mutex> lock(message_mutex);
  std::string text;
  text.swap(last_error);
  return text.empty() ? text : " (llama.cpp: " + text + ")";
}

// Contexts of device KVANT that live, in the order of creation, which is the order of ggml::report().
size_t live_kvant_caches() { return ggml::report().size(); }

}  // namespace

void show_llama_messages(bool verbose) {
  verbose_messages = verbose;
  llama_log_set(on_message, nullptr);
}

Status init_backends() {
  static std::once_flag once;
  static Status status;
  std::call_once(once, [] {
    llama_log_set(on_message, nullptr);
    // The module would be a second copy of this backend.
    unsetenv("GGML_BACKEND_PATH");
    status = ggml::check_ggml();
    if (!status.ok()) return;
    ggml_backend_load_all_from_path(KVANT_LLAMA_BIN_DIR);
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
      status = {Code::kIo, "ggml's CPU backend was not found in " KVANT_LLAMA_BIN_DIR "; run ./run setup"};
      return;
    }
    ggml_backend_register(ggml::backend_reg());
    ggml::print_errors(false);  // they come back as the status of what failed
    llama_backend_init();
  });
  return status;
}

Result<std::unique_ptr<Model>> Model::load(const std::string& path, Device device) {
  KVANT_RETURN_IF_ERROR(init_backends());
  if (FILE* file = std::fopen(path.c_str(), "rb"); file != nullptr) {
    std::fclose(file);
  } else {
    return Status(Code::kIo, "model " + path + " cannot be read");
  }
  std::vector<ggml_backend_dev_t> devices;
  if (device == Device::kKvant) devices.push_back(ggml_backend_reg_dev_get(ggml::backend_reg(), 0));
  devices.push_back(nullptr);
  llama_model_params params = llama_model_default_params();
  params.devices = devices.data();
  params.n_gpu_layers = device == Device::kKvant ? -1 : 0;
  std::unique_ptr<Model> model(new Model);
  model->device_ = device;
  model->model_ = llama_model_load_from_file(path.c_str(), params);
  if (model->model_ == nullptr) {
    return Status(Code::kIo,
                  "model " + path + " is not a model file that llama.cpp can load" + take_last_error());
  }
  return model;
}

Model::~Model() {
  if (model_ != nullptr) llama_model_free(model_);
}

std::string Model::description() const {
  char text[256] = "";
  llama_model_desc(model_, text, sizeof text);
  return text;
}

std::vector<llama_token> Model::tokenize(const std::string& text, bool add_special,
                                         bool parse_special) const {
  std::vector<llama_token> tokens(text.size() + 16);
  auto attempt = [&] {
    return llama_tokenize(vocab(), text.data(), static_cast<int>(text.size()), tokens.data(),
                          static_cast<int>(tokens.size()), add_special, parse_special);
  };
  int n = attempt();
  if (n < 0) {  // more tokens than bytes: minus their number
    tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
    n = attempt();
  }
  tokens.resize(std::max(n, 0));
  return tokens;
}

std::string Model::piece(llama_token token) const {
  char text[256];
  const int n = llama_token_to_piece(vocab(), token, text, sizeof text, 0, false);
  return n > 0 ? std::string(text, n) : std::string();
}

Result<std::unique_ptr<Context>> Context::create(const Model& model, const ContextOptions& options,
                                                 const ggml::Options& kvant) {
  const bool on_kvant = model.device() == Device::kKvant;
  if (on_kvant) KVANT_RETURN_IF_ERROR(ggml::configure(kvant));
  (void)ggml::take_error();  // of a context before
  std::unique_ptr<Context> context(new Context);
  context->options_ = options;
  context->first_cache_ = live_kvant_caches();
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.n_ctx;
  params.n_batch = params.n_ubatch = options.n_batch;
  params.n_outputs_max = std::max(options.n_outputs, 1);
  params.n_threads = params.n_threads_batch = options.n_threads;
  params.type_k = options.type_k;
  params.type_v = options.type_v;
  params.flash_attn_type =
      options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.swa_full = false;
  params.no_perf = true;
  context->context_ = llama_init_from_model(model.get(), params);
  if (context->context_ == nullptr) {
    if (Status status = ggml::take_error(); !status.ok()) {
      take_last_error();
      return status;
    }
    return Status(Code::kUnsupported, "no context of " + std::to_string(options.n_ctx) +
                                          " tokens with cache types " + ggml_type_name(options.type_k) + "/" +
                                          ggml_type_name(options.type_v) + take_last_error());
  }
  context->batch_ = llama_batch_init(options.n_batch, 0, 1);
  if (on_kvant) KVANT_RETURN_IF_ERROR(context->warm_up(model));
  context->n_caches_ = live_kvant_caches() - context->first_cache_;
  return context;
}

// Caches of device KVANT take their shape from the first graph.
Status Context::warm_up(const Model& model) {
  llama_token token = llama_vocab_bos(model.vocab());
  if (token == LLAMA_TOKEN_NULL) token = 0;
  KVANT_RETURN_IF_ERROR(decode(std::span(&token, 1), 0, 0));
  clear();
  return {};
}

Context::~Context() {
  if (batch_.token != nullptr) llama_batch_free(batch_);
  if (context_ != nullptr) llama_free(context_);
}

Status Context::decode(std::span<const llama_token> tokens, int first_position, int logits_from) {
  batch_.n_tokens = static_cast<int>(tokens.size());
  for (int i = 0; i < batch_.n_tokens; ++i) {
    batch_.token[i] = tokens[i];
    batch_.pos[i] = first_position + i;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = 0;
    batch_.logits[i] = i >= logits_from ? 1 : 0;
  }
  const int rc = llama_decode(context_, batch_);
  if (rc == 0) return {};
  if (Status status = ggml::take_error(); !status.ok()) {
    take_last_error();
    return status;
  }
  const std::string at = " at position " + std::to_string(first_position) + take_last_error();
  if (rc == 1)
    return {Code::kPoolExhausted,
            "the context of " + std::to_string(options_.n_ctx) + " tokens is full" + at};
  if (rc == 2) return {Code::kCancelled, "cancelled" + at};
  return {Code::kInternal, "llama.cpp could not compute" + at};
}

const float* Context::logits(int index) const { return llama_get_logits_ith(context_, index); }

void Context::clear() { llama_memory_clear(llama_get_memory(context_), true); }

std::vector<ggml::CacheReport> Context::reports() const {
  std::vector<ggml::CacheReport> all = ggml::report();
  const size_t end = std::min(all.size(), first_cache_ + n_caches_);
  if (first_cache_ >= end) return {};
  return {all.begin() + static_cast<int64_t>(first_cache_), all.begin() + static_cast<int64_t>(end)};
}

}  // namespace kvant::eval

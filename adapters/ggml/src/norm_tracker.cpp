#include "norm_tracker.h"

#include <algorithm>
#include <cstring>

#include "ggml-impl.h"
#include "kvant/calibration_file.h"

namespace kvant::ggml {
namespace {

thread_local std::vector<const ggml_tensor*> norms;

}  // namespace

void forget_norms() { norms.clear(); }

void notice_norm(const ggml_tensor* operation) {
  if (operation->op != GGML_OP_MUL || operation->src[1] == nullptr) return;
  const ggml_tensor* weight = operation->src[1];
  if (std::strstr(weight->name, ".attn_norm.weight") == nullptr || weight->data == nullptr) return;
  if (std::find(norms.begin(), norms.end(), weight) == norms.end()) norms.push_back(weight);
}

const std::vector<const ggml_tensor*>& noticed_norms() { return norms; }

uint64_t norms_fingerprint(const std::vector<const ggml_tensor*>& weights) {
  std::vector<ggml_tensor> operations(weights.size());
  std::vector<ggml_tensor*> nodes;
  for (size_t i = 0; i < weights.size(); ++i) {
    operations[i] = {};
    operations[i].op = GGML_OP_MUL;
    operations[i].src[1] = const_cast<ggml_tensor*>(weights[i]);
    nodes.push_back(&operations[i]);
  }
  ggml_cgraph graph = {};
  graph.nodes = nodes.data();
  graph.n_nodes = static_cast<int>(nodes.size());
  return graph_fingerprint(&graph);
}

}  // namespace kvant::ggml

// ShadowGraph: the graph that ggml's CPU backend runs instead of llama.cpp's. Writes to cache tensors and
// attention over them are custom nodes with the same output memory; every other node is the original one, in
// the same order.
//
// One graph of llama.cpp is computed many times; its shadow is built once and recognised by the graph's uid.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "cpu_device.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

namespace kvant::ggml {

class ShadowGraph {
 public:
  // Fails, before anything is computed, when some node cannot run on kvant's cache. Creates SlotCaches that
  // the graph needs and that do not exist yet.
  static Result<std::unique_ptr<ShadowGraph>> build(const ggml_cgraph& graph, int n_threads);
  ~ShadowGraph();

  bool is_for(const ggml_cgraph& graph) const { return graph.uid != 0 && graph.uid == uid_; }
  // `error` tells what went wrong when the status is GGML_STATUS_FAILED.
  ggml_status compute(const ggml_cgraph& graph, const CpuStream& cpu, Status* error);
  // Caches that this graph writes or reads.
  std::vector<std::shared_ptr<CacheState>> caches() const;

 private:
  struct Write;      // one SET_ROWS node
  struct Attention;  // one FLASH_ATTN_EXT node
  struct MaskGroup;  // nodes that share a cache and a mask: one plan
  struct CacheUse;   // one cache

  ShadowGraph() = default;
  Status add_nodes(const ggml_cgraph& graph);
  Status add_write(ggml_tensor* node, int index);
  Status add_attention(ggml_tensor* node, int index);
  CacheUse& use_of(const ggml_tensor* tensor);
  void replace(int index, const ggml_tensor* node, ggml_custom_op_t run, void* userdata);
  Status begin_batches();
  Status start_groups(int first_node);
  static void run_write(ggml_tensor* dst, int ith, int nth, void* userdata);
  static void run_attention(ggml_tensor* dst, int ith, int nth, void* userdata);

  uint64_t uid_ = 0;
  ggml_context* context_ = nullptr;  // owns the custom nodes
  std::vector<ggml_tensor*> nodes_;
  std::vector<std::unique_ptr<CacheUse>> uses_;
  std::vector<std::unique_ptr<Write>> writes_;
  std::vector<std::unique_ptr<Attention>> attentions_;
  std::vector<std::unique_ptr<MaskGroup>> groups_;
  std::vector<int> starts_;  // first nodes of the parts that are computed one after another; usually just 0
};

}  // namespace kvant::ggml

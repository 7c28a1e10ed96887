#include "shadow_graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml.h"
#include "kvant/attention_override.h"
#include "profile_clock.h"

namespace kvant::ggml {

struct ShadowGraph::CacheUse {
  std::shared_ptr<CacheState> state;
  std::vector<Write*> writes;
  std::vector<LayerSide> written;
  int64_t engine_slots = 0;    // slots of a stream, as llama.cpp counts them
  std::vector<int64_t> slots;  // of the batch, global in the SlotCache
};

struct ShadowGraph::Write {
  CacheUse* use = nullptr;
  LayerSide target;
  const ggml_tensor* rows = nullptr;
  const ggml_tensor* indices = nullptr;
};

struct ShadowGraph::MaskGroup {
  CacheUse* use = nullptr;
  const ggml_tensor* mask = nullptr;
  int first_stream = 0;
  int n_streams = 0;
  int n_queries = 0;
  int n_slots = 0;
  int first_node = 0;  // nodes before it must be computed before the mask can be read
  std::vector<int32_t> layers;
  std::vector<int32_t> own_slots;
  std::vector<StreamQueries> queries;
  BatchPlan plan;
  bool planned = false;
};

struct ShadowGraph::Attention {
  CacheUse* use = nullptr;
  MaskGroup* group = nullptr;
  const ggml_tensor* node = nullptr;
  AttentionArgs args;
  std::vector<float> slopes;
  AttentionJob job;
};

namespace {

bool is_view_op(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
         op == GGML_OP_TRANSPOSE;
}

const CacheLayer& layer_of(const CacheTensor& tensor) { return tensor.state->layer(tensor.layer); }

bool is_managed(const CacheTensor* tensor) {
  return tensor != nullptr && layer_of(*tensor).kind == LayerKind::kManaged;
}

// Cache tensors that no other operation may touch: what they hold is not in their memory, or, when attention
// over them was never seen, flash attention is off.
const CacheTensor* guarded(const ggml_tensor* tensor) {
  const CacheTensor* cached = tensor != nullptr ? cache_tensor(tensor) : nullptr;
  if (cached == nullptr) return nullptr;
  const CacheLayer& layer = layer_of(*cached);
  const bool pair = layer.tensors[0] != nullptr && layer.tensors[1] != nullptr;
  return layer.kind == LayerKind::kManaged || (layer.kind == LayerKind::kUnseen && pair) ? cached : nullptr;
}

Status refuse_node(const ggml_tensor* node, const CacheTensor& cached) {
  const std::string layer = "layer " + std::to_string(layer_of(cached).model_layer);
  if (node->op == GGML_OP_ROPE) {
    std::string why =
        "a position shift of the cache (context shift, llama_memory_seq_add) is not supported; positions "
        "and keys no longer agree, so nothing runs until the cache is cleared. Run with --no-context-shift "
        "or a larger -c";
    cached.state->set_broken({Code::kUnsupported, why});
    return {Code::kUnsupported, std::move(why)};
  }
  if (layer_of(cached).kind == LayerKind::kUnseen) {
    return {Code::kUnsupported, "flash attention is off (" + layer + " is read by " + ggml_op_name(node->op) +
                                    "); kvant needs it: use -fa on"};
  }
  return {Code::kUnsupported,
          std::string("the operation ") + ggml_op_name(node->op) + " ('" + node->name +
              "') reads the cache of " + layer +
              "; kvant's cache supports flash attention only: " + "use -fa on, or this model without kvant"};
}

// ALiBi: slopes of a geometric sequence, with the odd powers of the next one for heads beyond a power of two.
std::vector<float> alibi_slopes(float max_bias, int n_heads) {
  if (max_bias <= 0.0f) return {};
  const int power = 1 << static_cast<int>(std::floor(std::log2(n_heads)));
  std::vector<float> slopes(n_heads);
  for (int h = 0; h < n_heads; ++h) {
    const float exponent = h < power
                               ? static_cast<float>(h + 1) / static_cast<float>(power)
                               : static_cast<float>(2 * (h - power) + 1) / static_cast<float>(2 * power);
    slopes[h] = std::exp2(-max_bias * exponent);
  }
  return slopes;
}

int64_t index_at(const ggml_tensor* indices, int64_t i) {
  const char* data = static_cast<const char*>(indices->data) + static_cast<size_t>(i) * indices->nb[0];
  if (indices->type == GGML_TYPE_I64) return *reinterpret_cast<const int64_t*>(data);
  return *reinterpret_cast<const int32_t*>(data);
}

}  // namespace

ShadowGraph::~ShadowGraph() {
  if (context_ != nullptr) ggml_free(context_);
}

Result<std::unique_ptr<ShadowGraph>> ShadowGraph::build(const ggml_cgraph& graph, int n_threads) {
  std::unique_ptr<ShadowGraph> shadow(new ShadowGraph());
  shadow->uid_ = graph.uid;
  int replaced = 0;
  for (int i = 0; i < graph.n_nodes; ++i) {
    const ggml_tensor* node = graph.nodes[i];
    const bool attention = node->op == GGML_OP_FLASH_ATTN_EXT && cache_tensor(node->src[1]) != nullptr;
    if (attention) cache_tensor(node->src[1])->state->learn(node);
    if (attention || (node->op == GGML_OP_SET_ROWS && cache_tensor(node) != nullptr)) {
      shadow->use_of(attention ? node->src[1] : node);
      ++replaced;
    }
  }
  for (const auto& use : shadow->uses_) {
    if (!use->state->broken().ok()) return use->state->broken();
    if (use->state->created()) continue;
    KVANT_RETURN_IF_ERROR(
        use->state->create_cache(n_threads, graph_fingerprint(const_cast<ggml_cgraph*>(&graph))));
  }
  shadow->context_ = ggml_init({.mem_size = ggml_tensor_overhead() * static_cast<size_t>(replaced + 1),
                                .mem_buffer = nullptr,
                                .no_alloc = true});
  if (shadow->context_ == nullptr) return Status(Code::kInternal, "no memory for the nodes of a graph");
  KVANT_RETURN_IF_ERROR(shadow->add_nodes(graph));
  shadow->starts_ = {0};
  for (const auto& group : shadow->groups_) shadow->starts_.push_back(group->first_node);
  std::sort(shadow->starts_.begin(), shadow->starts_.end());
  shadow->starts_.erase(std::unique(shadow->starts_.begin(), shadow->starts_.end()), shadow->starts_.end());
  return shadow;
}

Status ShadowGraph::add_nodes(const ggml_cgraph& graph) {
  nodes_.assign(graph.nodes, graph.nodes + graph.n_nodes);
  for (int i = 0; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    if (is_view_op(node->op)) continue;
    if (node->op == GGML_OP_FLASH_ATTN_EXT && is_managed(cache_tensor(node->src[1]))) {
      KVANT_RETURN_IF_ERROR(add_attention(node, i));
      continue;
    }
    if (node->op == GGML_OP_SET_ROWS && cache_tensor(node) != nullptr) {
      if (is_managed(cache_tensor(node))) KVANT_RETURN_IF_ERROR(add_write(node, i));
      continue;
    }
    const CacheTensor* cached = guarded(node);
    for (int s = 0; cached == nullptr && s < GGML_MAX_SRC; ++s) cached = guarded(node->src[s]);
    if (cached != nullptr) return refuse_node(node, *cached);
  }
  return {};
}

ShadowGraph::CacheUse& ShadowGraph::use_of(const ggml_tensor* tensor) {
  const CacheState* state = cache_tensor(tensor)->state;
  for (const auto& use : uses_) {
    if (use->state.get() == state) return *use;
  }
  uses_.push_back(std::make_unique<CacheUse>());
  uses_.back()->state = shared_state(tensor);
  uses_.back()->engine_slots = (tensor->view_src != nullptr ? tensor->view_src : tensor)->ne[1];
  return *uses_.back();
}

// The node's result is computed by `run` instead, into the same memory.
void ShadowGraph::replace(int index, const ggml_tensor* node, ggml_custom_op_t run, void* userdata) {
  ggml_tensor* custom = ggml_custom_4d(context_, node->type, node->ne[0], node->ne[1], node->ne[2],
                                       node->ne[3], nullptr, 0, run, GGML_N_TASKS_MAX, userdata);
  custom->data = node->data;
  custom->buffer = node->buffer;
  custom->flags |= GGML_TENSOR_FLAG_COMPUTE;
  nodes_[index] = custom;
}

Status ShadowGraph::add_write(ggml_tensor* node, int index) {
  const CacheTensor& cached = *cache_tensor(node);
  const CacheLayer& layer = layer_of(cached);
  const ggml_tensor* base = layer.tensors[static_cast<int>(cached.side)];
  const std::string where =
      std::string(side_name(cached.side)) + "s of layer " + std::to_string(layer.model_layer);
  if (node->ne[0] != base->ne[0] || node->view_offs != 0) {
    return {Code::kUnsupported,
            "flash attention is off (" + where + " are stored transposed); kvant needs it: use -fa on"};
  }
  if (node->src[0]->type != GGML_TYPE_F32 || node->src[1]->op != GGML_OP_NONE) {
    return {Code::kUnsupported, where + " are written in a way that kvant does not know (" +
                                    ggml_type_name(node->src[0]->type) + " rows, indices from " +
                                    ggml_op_name(node->src[1]->op) + "); use this model without kvant"};
  }
  CacheUse& use = use_of(node);
  writes_.push_back(std::make_unique<Write>());
  Write* write = writes_.back().get();
  *write = {.use = &use, .target = {layer.id, cached.side}, .rows = node->src[0], .indices = node->src[1]};
  use.writes.push_back(write);
  use.written.push_back(write->target);
  replace(index, node, run_write, write);
  return {};
}

Status ShadowGraph::add_attention(ggml_tensor* node, int index) {
  const ggml_tensor* q = node->src[0];
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* mask = node->src[3];
  const ggml_tensor* base = k->view_src;
  const CacheLayer& layer = layer_of(*cache_tensor(k));
  const LayerShape& shape = layer.shape;
  if (q->type != GGML_TYPE_F32 || q->ne[2] != shape.n_query_heads || k->ne[0] != shape.key_dim ||
      k->ne[2] != shape.n_kv_heads || node->src[2]->ne[0] != shape.value_dim || q->nb[0] != sizeof(float)) {
    return {Code::kUnsupported,
            "layer " + std::to_string(layer.model_layer) +
                ": two attention nodes read its cache with different shapes; use this model "
                "without kvant"};
  }
  CacheUse& use = use_of(k);
  auto same = [&](const auto& g) { return g->use == &use && g->mask == mask && g->n_queries == q->ne[1]; };
  auto it = std::find_if(groups_.begin(), groups_.end(), same);
  if (it == groups_.end()) {
    groups_.push_back(std::make_unique<MaskGroup>());
    it = groups_.end() - 1;
    MaskGroup& g = **it;
    g.use = &use;
    g.mask = mask;
    g.first_stream = static_cast<int>(k->view_offs / base->nb[2]);
    g.n_streams = static_cast<int>(k->ne[3]);
    g.n_queries = static_cast<int>(q->ne[1]);
    g.n_slots = static_cast<int>(k->ne[1]);
    const ggml_tensor* origin = mask != nullptr && mask->view_src != nullptr ? mask->view_src : mask;
    g.first_node = origin != nullptr && origin->op != GGML_OP_NONE ? index : 0;
  }
  MaskGroup* group = it->get();
  if (std::find(group->layers.begin(), group->layers.end(), layer.id.value) == group->layers.end()) {
    group->layers.push_back(layer.id.value);
  }
  float params[3];
  std::memcpy(params, node->op_params, sizeof params);
  attentions_.push_back(std::make_unique<Attention>());
  Attention* a = attentions_.back().get();
  a->use = &use;
  a->group = group;
  a->node = node;
  a->slopes = alibi_slopes(params[1], shape.n_query_heads);
  a->args = {.layer = layer.id,
             .plan = &group->plan,
             .q_head = q->nb[2] / sizeof(float),
             .q_token = q->nb[1] / sizeof(float),
             .q_stream = q->nb[3] / sizeof(float),
             .out_head = node->nb[1] / sizeof(float),
             .out_token = node->nb[2] / sizeof(float),
             .out_stream = node->nb[3] / sizeof(float),
             .scale = params[0],
             .soft_cap = params[2],
             .alibi_slopes = a->slopes.empty() ? nullptr : a->slopes.data(),
             .path = use.state->options().attention,
             .skip_below = use.state->options().skip ? kSkipBelow : std::numeric_limits<float>::infinity()};
  replace(index, node, run_attention, a);
  return {};
}

Status ShadowGraph::begin_batches() {
  const ProfileSpan span(&profile_counters().plan);
  for (const auto& use : uses_) {
    if (use->writes.empty()) continue;
    CacheState& state = *use->state;
    const ggml_tensor* indices = use->writes.front()->indices;
    const int64_t n = indices->ne[0];
    const int64_t slots = static_cast<int64_t>(state.cache().n_pages()) * kPageTokens;
    use->slots.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = index_at(indices, i);
      use->slots[i] = row / use->engine_slots * slots + row % use->engine_slots;
    }
    for (const Write* write : use->writes) {
      if (write->indices == indices) continue;
      bool equal = write->indices->ne[0] == n;
      for (int64_t i = 0; equal && i < n; ++i) equal = index_at(write->indices, i) == index_at(indices, i);
      if (!equal) return {Code::kUnsupported, "keys and values of a batch are written to different slots"};
    }
    KVANT_RETURN_IF_ERROR(state.open_batch(use->slots, use->written));
  }
  return {};
}

Status ShadowGraph::start_groups(int first_node) {
  const ProfileSpan span(&profile_counters().plan);
  for (const auto& group : groups_) {
    if (group->first_node != first_node) continue;
    MaskGroup& g = *group;
    CacheState& state = *g.use->state;
    const int64_t slots = static_cast<int64_t>(state.cache().n_pages()) * kPageTokens;
    const std::span<const int64_t> batch = state.batch_slots();
    const size_t n_rows = static_cast<size_t>(g.n_streams) * static_cast<size_t>(g.n_queries);
    g.own_slots.assign(n_rows, -1);
    if (batch.size() == n_rows) {
      for (size_t i = 0; i < n_rows; ++i) g.own_slots[i] = static_cast<int32_t>(batch[i] % slots);
    }
    g.queries.resize(g.n_streams);
    for (int s = 0; s < g.n_streams; ++s) {
      StreamQueries& q = g.queries[s];
      q = {.stream = StreamId{g.first_stream + s},
           .n_queries = g.n_queries,
           .n_slots = g.n_slots,
           .own_slot = std::span<const int32_t>(g.own_slots)
                           .subspan(static_cast<size_t>(s) * g.n_queries, g.n_queries)};
      if (g.mask == nullptr) continue;
      const char* data = static_cast<const char*>(g.mask->data) + (s % g.mask->ne[3]) * g.mask->nb[3];
      q.mask = reinterpret_cast<const uint16_t*>(data);
      q.mask_stride = g.mask->nb[1] / sizeof(uint16_t);
    }
    KVANT_RETURN_IF_ERROR(state.cache().plan(g.queries, g.layers, &g.plan));
    g.planned = true;
  }
  for (const auto& a : attentions_) {
    if (a->group->first_node != first_node) continue;
    a->args.q = static_cast<const float*>(a->node->src[0]->data);
    a->args.out = static_cast<float*>(a->node->data);
    a->args.sink_logits =
        a->node->src[4] != nullptr ? static_cast<const float*>(a->node->src[4]->data) : nullptr;
    a->args.path = attention_override().value_or(a->use->state->options().attention);
    ProfileCounters& profile = profile_counters();
    a->args.seal_nanoseconds = profile.on.load(std::memory_order_relaxed) ? &profile.seal : nullptr;
    KVANT_RETURN_IF_ERROR(a->job.prepare(&a->use->state->cache(), &a->use->state->workspace(), a->args));
  }
  return {};
}

ggml_status ShadowGraph::compute(const ggml_cgraph& graph, const CpuStream& cpu, Status* error) {
  for (const auto& use : uses_) {
    if (!use->state->broken().ok()) {
      *error = use->state->broken();
      return GGML_STATUS_FAILED;
    }
  }
  ProfileCounters& profile = profile_counters();
  const ProfileSpan total(&profile.total);
  profile.graphs.fetch_add(1, std::memory_order_relaxed);
  *error = begin_batches();
  ggml_status status = GGML_STATUS_SUCCESS;
  for (size_t part = 0; part < starts_.size() && error->ok() && status == GGML_STATUS_SUCCESS; ++part) {
    *error = start_groups(starts_[part]);
    if (!error->ok()) break;
    const int end = part + 1 < starts_.size() ? starts_[part + 1] : static_cast<int>(nodes_.size());
    ggml_cgraph run = graph;  // keeps the use counts, by which ggml fuses nodes
    run.nodes = nodes_.data() + starts_[part];
    run.n_nodes = end - starts_[part];
    status = ggml_backend_graph_compute(cpu.backend(), &run);
  }
  const ProfileSpan ending(&profile.plan);
  for (const auto& group : groups_) {
    if (attention_override()) {
      for (StreamPlan& stream : group->plan.streams) stream.release.clear();
    }
    if (group->planned) group->use->state->cache().end_batch(group->plan);
    group->planned = false;
  }
  for (const auto& use : uses_) {
    if (!error->ok()) use->state->cancel_batch();
    if (!use->state->created()) continue;
    Status bad = use->state->cache().take_error();
    if (error->ok()) *error = std::move(bad);
  }
  return error->ok() ? status : GGML_STATUS_FAILED;
}

std::vector<std::shared_ptr<CacheState>> ShadowGraph::caches() const {
  std::vector<std::shared_ptr<CacheState>> states;
  for (const auto& use : uses_) states.push_back(use->state);
  return states;
}

void ShadowGraph::run_write(ggml_tensor*, int ith, int nth, void* userdata) {
  const Write& w = *static_cast<const Write*>(userdata);
  const ProfileSpan span(ith == 0 ? &profile_counters().write : nullptr);
  w.use->state->cache().write(w.target.layer, w.target.side, w.use->slots,
                              static_cast<const float*>(w.rows->data), w.rows->nb[1] / sizeof(float),
                              {.ith = ith, .nth = nth});
}

void ShadowGraph::run_attention(ggml_tensor*, int ith, int nth, void* userdata) {
  Attention& a = *static_cast<Attention*>(userdata);
  const ProfileSpan span(ith == 0 ? &profile_counters().attention : nullptr);
  const int limit = a.use->state->workspace().max_threads();
  if (ith < limit) a.job.run({.ith = ith, .nth = std::min(nth, limit)});
}

}  // namespace kvant::ggml

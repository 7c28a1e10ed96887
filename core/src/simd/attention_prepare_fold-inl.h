// Channel scales and lows of tiles in the queries that meet them: included by the ISA files after
// attention_prepare-inl.h.
HWY_BEFORE_NAMESPACE();
namespace kvant::simd::KVANT_TARGET {
namespace {

// A task with what its tile adds to the queries.
struct OpenKeyTask {
  LiveRows live;
  PreparedQueries queries;
  float start[kMaxRows];  // by index in live
  // Of the tile's channels.
  alignas(64) float channel_scale[kMaxHeadDim + kLanes];
  alignas(64) float channel_low[kMaxHeadDim + kLanes];
  bool has_low;
  // Queries times channel scales, when there are few rows.
  alignas(64) int8_t q8[kFewRows * 2 * kMaxHeadDim];
  float scale[kFewRows * kMaxBands];
  float offset[kFewRows * kMaxBands];
};

// out[i] += q . centre of row[i].
void add_centre_products(const TileLayout& layout, const QueryRows& rows, const float* q, const float* centre,
                         float* out) {
  for (int i = 0; i < rows.count; ++i) {
    const float* x = q + static_cast<size_t>(rows.row[i]) * layout.head_dim;
    F dot = hn::Zero(df);
    for (int c = 0; c < layout.head_dim; c += kLanes) {
      dot = hn::MulAdd(lanes_from(x + c, layout.head_dim - c), load(centre + c), dot);
    }
    out[i] += sum_of(dot);
  }
}

// Channel scales of a tile and what codes of zero stand for, by channel: products are rounded around the
// middle code, and where codes start at a low the middle is as much above it. Layouts with channel scales
// have lows of channels only. Bands come in the order of their channels, so that what is read past the end of
// one is written again by the next; past the last channel are zeros.
void expand_channel_factors(const TileLayout& layout, const std::byte* tile, float* scale, float* low) {
  const std::byte* scales = tile + layout.channel_scale_offset;
  const std::byte* centres = tile + layout.channel_centre_offset;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandLayout& band = bands_of(layout)[b];
    const F middle = set(layout.asymmetric ? middle_of(band.bits) : 0.0f);
    const int end = band.first_channel + band.channels;
    for (int c = band.first_channel; c < end; c += kLanes) {
      const F x = words_to_scales(scales + 2 * c);
      const F centre = layout.channel_centre ? halves_to_floats(centres + 2 * c) : hn::Zero(df);
      store(x, scale + c);
      store(hn::MulAdd(middle, x, centre), low + c);
    }
  }
  store(hn::Zero(df), scale + layout.head_dim);
  store(hn::Zero(df), low + layout.head_dim);
}

HWY_INLINE QueryRows key_rows(const OpenKeyTask& open, int first) {
  QueryRows rows;
  rows.count = open.live.count - first < 4 ? open.live.count - first : 4;
  for (int i = 0; i < rows.count; ++i) rows.row[i] = open.live.row[first + i];
  return rows;
}

// Channel scales are part of the queries: what they take of the tile.
void open_channel_factors(const TileLayout& layout, const std::byte* tile, OpenKeyTask* open) {
  open->has_low = layout.channel_centre || layout.asymmetric;
  if (layout.channel_scale) {
    return expand_channel_factors(layout, tile, open->channel_scale, open->channel_low);
  }
  if (!layout.channel_centre) return;
  expand_channel_centres(layout, tile, open->channel_low);
  for (int first = 0; first < open->live.count; first += 4) {
    add_centre_products(layout, key_rows(*open, first), open->queries.q, open->channel_low,
                        open->start + first);
  }
}

void open_key_task(const KeyTask& task, OpenKeyTask* open) {
  const TileLayout& layout = *task.layout;
  const PreparedQueries& q = *task.queries;
  find_live_rows(task.live, q.rows, &open->live);
  open->queries = q;
  for (int i = 0; i < open->live.count; ++i) open->start[i] = task.base[open->live.row[i]];
  if (layout.channel_scale && q.rows <= kFewRows) {
    open->queries.q8 = open->q8;
    open->queries.scale = open->scale;
    open->queries.offset = open->offset;
  }
  open_channel_factors(layout, task.tile, open);
}

// Up to four rows of an open task.
struct FoldBlock {
  int task;
  int first;  // of its live rows
  RowScales steps[kMaxBands];
  alignas(64) float scaled[4 * kScaledStride];
};

void measure_folded(const TileLayout& layout, OpenKeyTask* open, FoldBlock* block) {
  const ChannelFactors factors = {open->channel_scale, open->channel_low};
  float* start = open->start + block->first;
  for (int b = 0; b < layout.n_bands; ++b) {
    const BandQueries queries = {layout, open->queries, b, key_rows(*open, block->first), block->scaled};
    if (open->has_low) {
      measure_queries<Fold::kScaleAndLow>(queries, factors, start, &block->steps[b]);
    } else {
      measure_queries<Fold::kScale>(queries, factors, start, &block->steps[b]);
    }
  }
}

void round_folded(const KeyTask* tasks, const OpenKeyTask* open, FoldBlock* blocks, int count) {
  for (int i = 0; i < count; ++i) {
    const OpenKeyTask& from = open[blocks[i].task];
    const TileLayout& layout = *tasks[blocks[i].task].layout;
    for (int b = 0; b < layout.n_bands; ++b) {
      round_queries({layout, from.queries, b, key_rows(from, blocks[i].first), blocks[i].scaled},
                    blocks[i].steps[b]);
    }
  }
}

// Channel scales are multiplied into the queries of some tasks: up to four blocks of rows are measured, then
// rounded.
void fold_channels(const KeyTask* tasks, int count, OpenKeyTask* open) {
  FoldBlock blocks[kBlocksAtOnce];
  int n = 0;
  for (int i = 0; i < count; ++i) {
    if (!tasks[i].layout->channel_scale) continue;
    for (int first = 0; first < open[i].live.count; first += 4) {
      blocks[n].task = i;
      blocks[n].first = first;
      measure_folded(*tasks[i].layout, open + i, blocks + n);
      if (++n == kBlocksAtOnce) {
        round_folded(tasks, open, blocks, n);
        n = 0;
      }
    }
  }
  round_folded(tasks, open, blocks, n);
}

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
HWY_AFTER_NAMESPACE();

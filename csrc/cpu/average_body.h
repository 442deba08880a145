// The kernel that averages weights, for one instruction set. engine_body.h includes this file.

namespace amp_ext::cpu::AMP_EXT_ISA {

// Updates the averages of a tile. The template arguments are the formats of weights and averages.
template <typename WeightFormat, typename AverageFormat>
void average_tile(const AverageStep& tensor_step, const Tile& tile) {
  using V = Vector<float>;
  using Weights = Numbers<WeightFormat>;
  using Averages = Numbers<AverageFormat>;
  constexpr bool kIsNative = Averages::template kIsNative<float>;
  const AverageStep step = tensor_step;  // copied into registers
  KernelTensorArgs args = tile.args;
  args.global_offset = step.dither_place(args.global_offset);
  Dither dither(args, 0);
  alignas(64) float scratch[kChunkSize];
  for (int64_t offset = tile.begin; offset < tile.end;) {
    const int64_t rest = tile.end - offset;
    int64_t count = rest / kLanes<float> * kLanes<float>;
    if (!kIsNative) count = std::min(count, kChunkSize);
    Weights weights = Weights::at(args.param, args.master_param, offset);
    Averages averages = Averages::at(args.buffers[0], nullptr, offset);
    typename Weights::Padded last_weights;
    typename Averages::Padded last_averages;
    const bool is_tail = count == 0;
    if (is_tail) {
      weights = last_weights.open(weights, rest);
      averages = last_averages.open(averages, rest);
      count = kLanes<float>;
    }
    if (!kIsNative) dither.begin(offset, count);
    float* const results = averages.results_in(scratch);
    constexpr int64_t kAsked = 2 * kLineSize / static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      if (i % kAsked == 0 && i + kAhead<float> + kApart<float> + kAsked < tile.end_ahead - offset) {
        weights.prefetch(i + kAhead<float>, kAsked);
        averages.prefetch(i + kAhead<float> + kApart<float>, kAsked);
      }
      const V average = averages.template load<V>(i);
      store(results + i, step(average, weights.template load<V>(i)));
    }
    round_chunk(averages, results, count, dither.of_param());
    if (is_tail) last_averages.close(rest);
    offset += is_tail ? rest : count;
  }
}

inline void average(const TileMap& tiles, const AverageStep& step, int64_t begin, int64_t end) {
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    any_formats_of_averages([&](auto weight, auto average) {
      using Weight = decltype(weight);
      using Average = decltype(average);
      if (!has_formats_of_average<Weight, Average>(tile.args)) return false;
      average_tile<Weight, Average>(step, tile);
      return true;
    });
  });
}

}  // namespace amp_ext::cpu::AMP_EXT_ISA

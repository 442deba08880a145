// Checks of files and archives of the C++ interface.
#pragma once

#include "checks.h"

namespace checks {

AMP_EXT_CHECK(values_survive_a_file) {
  const Dict dict = new_dict();
  dict.insert("tensor", torch::arange(6).view({2, 3}).t());
  dict.insert("view", torch::arange(100).slice(0, 7, 9));
  dict.insert("expanded", torch::arange(4.0)[2].expand({4}));  // of a storage of its own size
  dict.insert(3, c10::ivalue::Tuple::create(0.5, c10::IValue()));
  const auto read = amp_ext::state_from_bytes(amp_ext::state_to_bytes(dict)).toGenericDict();
  CHECK_THAT(same(read.at("tensor").toTensor(), torch::arange(6).view({2, 3}).t()));
  CHECK_THAT(same(read.at("view").toTensor(), torch::tensor({7, 8})));
  CHECK_THAT(read.at("view").toTensor().storage().nbytes() == 16);
  CHECK_THAT(same(read.at("expanded").toTensor(), torch::full({4}, 2.0F)));
  CHECK_THAT(read.at(3).toTupleRef().elements()[0].toDouble() == 0.5);
}

AMP_EXT_CHECK(what_python_can_not_read_is_refused) {
  const Dict dict = new_dict();
  const auto save = [&] { amp_ext::state_to_bytes(dict); };
  dict.insert("a", torch::ones({2}).to_sparse());
  CHECK_REFUSED(save(), "value['a'] must be a dense tensor, got Sparse");
  dict.insert_or_assign("a", torch::ones({2}, torch::kUInt16));
  CHECK_REFUSED(save(), "value['a'] must be of a dtype that torch.load reads");
  dict.insert_or_assign("a", torch::Device(torch::kCPU));
  CHECK_REFUSED(save(), "value['a'] must be a dict, list, tuple, string, number, bool, None or");
  dict.clear();
  dict.insert(0.5, 1);
  CHECK_REFUSED(save(), "keys of value must be strings or ints, got 0.5");
}

// Steps an optimizer of two groups. A second optimizer and its scaler load archives and go on.
AMP_EXT_CHECK(archives_of_ours_are_read) {
  Groups groups, others;
  torch::manual_seed(3);
  for (const int64_t size : {6, 2}) {
    groups.emplace_back(std::vector{torch::randn({size}).set_requires_grad(true)});
    others.emplace_back(std::vector{torch::zeros({size}).set_requires_grad(true)});
  }
  auto options = AdamWOptions(0.1).amsgrad(true), own = options;
  AdamW first(groups, options), second(others, own.lr(7.0));
  GradScaler scaler(GradScalerOptions().device(torch::kCPU).init_scale(4).growth_interval(4));
  GradScaler other = cpu_scaler(2.0);
  const auto step = [](AdamW& optimizer, GradScaler& its_scaler) {
    for (const auto& group : optimizer.param_groups()) {
      torch::Tensor param = group.params()[0];
      param.mutable_grad() = its_scaler.scale((param * param).detach() - 0.5);
    }
    its_scaler.step(optimizer);
    its_scaler.update();
  };
  const std::vector<torch::Tensor> saved = first.parameters(), loaded = second.parameters();
  for (int i = 0; i < 6; ++i) {
    step(first, scaler);
    if (i >= 3) step(second, other);
    if (i != 2) continue;
    std::stringstream archive, of_scaler;
    torch::save(first, archive);
    torch::save(scaler, of_scaler);
    for (size_t j = 0; j < saved.size(); ++j) loaded[j].set_data(saved[j].detach().clone());
    torch::load(second, archive);
    torch::load(other, of_scaler);
  }
  CHECK_THAT(scaler.get_scale() == 8.0 && other.get_scale() == 8.0);
  for (size_t i = 0; i < saved.size(); ++i) CHECK_THAT(same(loaded[i], saved[i]));
}

// Continues a run of torch::optim::AdamW as docs/cpp.md says.
AMP_EXT_CHECK(a_run_of_torch_is_continued) {
  const torch::Tensor param = parameter({1.0, -2.0}), copy = parameter({0.0, 0.0});
  theirs::AdamW old({param}, theirs::AdamWOptions(0.1));
  AdamW optimizer({copy}, AdamWOptions(0.1));
  const auto step = [](theirs::Optimizer& each, torch::Tensor its_param) {
    its_param.mutable_grad() = (its_param * its_param).detach() - 0.5;
    each.step();
  };
  for (int i = 0; i < 3; ++i) step(old, param);
  copy.set_data(param.detach().clone());
  const auto& moments =
      static_cast<const theirs::AdamWParamState&>(*old.state().at(param.unsafeGetTensorImpl()));
  Dict state = new_dict(), states = new_dict();
  state.insert("step", static_cast<double>(moments.step()));
  state.insert("exp_avg", moments.exp_avg());
  state.insert("exp_avg_sq", moments.exp_avg_sq());
  states.insert(0, state);
  Dict state_dict = optimizer.state_dict().toGenericDict();
  state_dict.insert_or_assign("state", states);
  optimizer.load_state_dict(state_dict);
  for (int i = 0; i < 3; ++i) {
    step(old, param);
    step(optimizer, copy);
  }
  CHECK_THAT(torch::allclose(copy, param, 1e-6, 1e-6));
  std::stringstream archive;
  torch::save(old, archive);
  CHECK_REFUSED(torch::load(optimizer, archive),
                "If it is of torch::optim, load it with torch's class");
}

}  // namespace checks

// Tests the C++ interface: `program checks` lists the checks, `program check NAME` runs one,
// `program refuse FILE` prints the errors of the calls that a file says, `program save FILE` writes
// one, `program train FOLDER` trains as a file there says, `program resume FOLDER` steps as it
// says. `program serve` reads such commands, one a line with a tab before the argument, and ends
// what each prints by a line of \4 and the exit code.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "checks.h"
#include "misuse_checks.h"
#include "refused_calls.h"
#include "training.h"

namespace {

#define AMP_EXT_CHECK(name) {#name, &checks::name}

const Checks& all_checks() {
  static const Checks checks = {
      AMP_EXT_CHECK(own_scaled_steps_are_found),
      AMP_EXT_CHECK(casts_work_across_the_library),
      AMP_EXT_CHECK(foreign_optimizers_are_skipped_whole),
      AMP_EXT_CHECK(groups_keep_their_options),
      AMP_EXT_CHECK(archives_resume_with_the_same_bits),
      AMP_EXT_CHECK(archives_resume_split_masters_with_the_same_bits),
      AMP_EXT_CHECK(archives_resume_moments_in_8_bits_with_the_same_bits),
      AMP_EXT_CHECK(autocast_scopes_nest_and_end),
      AMP_EXT_CHECK(casts_of_weights_are_not_stale_after_a_step),
      AMP_EXT_CHECK(closures_are_refused_or_handed_on),
      AMP_EXT_CHECK(conversions_and_new_gradients_are_followed),
      AMP_EXT_CHECK(masters_keep_what_16_bits_lose),
      AMP_EXT_CHECK(a_first_step_with_momentum_is_not_dampened),
      AMP_EXT_CHECK(a_master_that_is_written_is_what_steps_go_on_from),
      AMP_EXT_CHECK(masters_are_named_by_flags_and_texts),
      AMP_EXT_CHECK(split_masters_lie_below_their_parameters),
      AMP_EXT_CHECK(a_lower_part_that_does_not_fit_changes_nothing),
      AMP_EXT_CHECK(states_of_a_split_master_keep_the_layout),
      AMP_EXT_CHECK(state_dtypes_are_named_by_dtypes_and_texts),
      AMP_EXT_CHECK(moments_in_8_bits_have_keys_of_their_own),
      AMP_EXT_CHECK(a_code_that_does_not_fit_changes_nothing),
      AMP_EXT_CHECK(codes_in_groups_are_of_contiguous_parameters),
      AMP_EXT_CHECK(codes_follow_a_parameter_that_changes_its_layout),
      AMP_EXT_CHECK(a_parameter_that_is_gone_leaves_no_state_to_another),
      AMP_EXT_CHECK(one_thread_steps_at_a_time),
      AMP_EXT_CHECK(one_thread_steps_at_a_time_also_under_a_scaler),
      AMP_EXT_CHECK(gradients_after_a_failed_step_with_unscaled_ones_come_after_an_update),
      AMP_EXT_CHECK(norms_are_clipped_without_a_step),
      AMP_EXT_CHECK(float64_gradients_are_clipped_with_the_bits_of_python),
      AMP_EXT_CHECK(norms_are_clipped_inside_a_step),
      AMP_EXT_CHECK(bad_gradients_are_named),
      AMP_EXT_CHECK(the_scale_keeps_its_limits),
      AMP_EXT_CHECK(optimizers_can_be_moved),
      AMP_EXT_CHECK(training_goes_on_from_what_was_made_in_inference_mode),
      AMP_EXT_CHECK(values_survive_a_file),
      AMP_EXT_CHECK(list_operations_are_there),
      AMP_EXT_CHECK(gradients_that_carry_a_scale_are_refused),
      AMP_EXT_CHECK(gradients_of_a_loss_that_is_scaled_after_unscale_are_refused),
      AMP_EXT_CHECK(gradients_that_another_optimizer_has_unscaled_are_refused),
      AMP_EXT_CHECK(groups_follow_parameters_that_move),
      AMP_EXT_CHECK(groups_of_another_optimizer_keep_their_options),
      AMP_EXT_CHECK(states_stay_where_they_are),
      AMP_EXT_CHECK(options_of_another_optimizer_are_refused),
      AMP_EXT_CHECK(groups_that_the_class_of_torch_added_are_refused),
      AMP_EXT_CHECK(a_state_whose_parameter_left_the_groups_is_not_saved),
      AMP_EXT_CHECK(a_load_keeps_what_torch_does_not_know),
      AMP_EXT_CHECK(entries_of_others_go_through_a_load_and_a_file),
      AMP_EXT_CHECK(a_step_that_fails_behind_its_writes_spends_the_iteration),
      AMP_EXT_CHECK(a_step_may_step_others_and_compute_gradients),
      AMP_EXT_CHECK(a_look_of_the_user_must_be_whole),
      AMP_EXT_CHECK(every_step_of_a_scaler_ends_the_casts),
      AMP_EXT_CHECK(unscaling_in_part_spends_the_iteration),
      AMP_EXT_CHECK(a_step_that_was_refused_may_be_tried_again),
      AMP_EXT_CHECK(a_dropped_look_names_nothing),
      AMP_EXT_CHECK(optimizers_are_told_apart),
      AMP_EXT_CHECK(what_was_moved_from_says_so),
      AMP_EXT_CHECK(a_refused_new_scale_leaves_the_iteration),
      AMP_EXT_CHECK(what_is_moved_to_itself_stays),
      AMP_EXT_CHECK(an_optimizer_without_groups_says_so),
      AMP_EXT_CHECK(a_scaler_without_cuda_says_how_to_enable_it),
      AMP_EXT_CHECK(what_is_out_of_range_is_refused),
      AMP_EXT_CHECK(what_python_can_not_read_is_refused),
      AMP_EXT_CHECK(a_damaged_file_is_refused_or_right),
      AMP_EXT_CHECK(two_threads_write_one_file),
      AMP_EXT_CHECK(a_schedule_goes_on_with_a_new_scheduler),
      AMP_EXT_CHECK(archives_of_torch_are_read),
      AMP_EXT_CHECK(a_view_is_saved_as_its_elements)};
  return checks;
}

// Runs one command; returns the exit code, and prints what went wrong to `errors`.
int run(const std::string& command, const std::string& argument, std::FILE* errors) {
  try {
    if (command == "checks") {
      for (const auto& [name, check] : all_checks()) std::printf("%s\n", name.c_str());
    } else if (command == "check") {
      all_checks().at(argument)();
    } else if (command == "refuse") {
      refused_calls::print_errors(argument);
    } else if (command == "save") {
      amp_ext::save_state(argument, "text");
    } else if (command == "train") {
      train(argument);
    } else if (command == "resume") {
      resume(argument);
    } else {
      std::fprintf(errors,
                   "usage: program checks | check NAME | refuse FILE | save FILE | train FOLDER | "
                   "resume FOLDER | serve\n");
      return 2;
    }
  } catch (const c10::Error& error) {
    std::fprintf(errors, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(errors, "%s\n", error.what());
    return 1;
  }
  return 0;
}

int serve() {
  for (std::string line; std::getline(std::cin, line);) {
    const size_t tab = line.find('\t');
    const std::string argument = tab == std::string::npos ? "" : line.substr(tab + 1);
    const int code = run(line.substr(0, tab), argument, stdout);
    std::printf("\4%d\n", code);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string command = count > 1 ? arguments[1] : "";
  if (command == "serve") return serve();
  return run(command, count > 2 ? arguments[2] : "", stderr);
}

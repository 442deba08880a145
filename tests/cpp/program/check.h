// What every check of the program uses.
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>

// Fails the check that it stands in.
#define CHECK_THAT(condition)                                                           \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                               ": " #condition);                                        \
    }                                                                                   \
  } while (false)

using Checks = std::map<std::string, std::function<void()>>;

// The text of the error that a call throws; empty if it throws none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

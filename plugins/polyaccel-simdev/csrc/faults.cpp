#include "faults.h"

#include <cstdlib>

namespace simdev {

bool has_fault(std::string_view name) {
  const char* text = std::getenv("POLYACCEL_SIMDEV_FAULT");
  for (std::string_view left = text ? text : ""; !left.empty();) {
    const auto comma = left.find(',');
    if (left.substr(0, comma) == name) return true;
    left = comma == std::string_view::npos ? std::string_view() : left.substr(comma + 1);
  }
  return false;
}

}  // namespace simdev

# Tells find_package(amp_ext 0.1) whether this version will do: one with the same first two numbers that
# is no older.
include("${CMAKE_CURRENT_LIST_DIR}/amp_extBuild.cmake" OPTIONAL)
set(PACKAGE_VERSION "${amp_ext_BUILT_VERSION}")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" amp_ext_minor "${PACKAGE_VERSION}")
string(REGEX MATCH "^[0-9]+\\.?[0-9]*" amp_ext_wanted "${PACKAGE_FIND_VERSION}")
if(amp_ext_minor VERSION_EQUAL amp_ext_wanted AND NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()

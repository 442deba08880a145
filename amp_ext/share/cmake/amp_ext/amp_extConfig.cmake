# Finds amp_ext, and the torch that it was built for, for a program in C++:
#
#   find_package(amp_ext REQUIRED)
#   target_link_libraries(app amp_ext::amp_ext)
#
# Serves in the package of Python (`python -m amp_ext.cmake` prints its folder) and in a prefix that the
# sources were installed to. Another torch than the one beside it is named by Torch_DIR or
# CMAKE_PREFIX_PATH; it must have the first two numbers of a version that amp_ext was built for.
if(TARGET amp_ext::amp_ext)
  return()
endif()
get_filename_component(amp_ext_PREFIX "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include("${CMAKE_CURRENT_LIST_DIR}/amp_extBuild.cmake" OPTIONAL RESULT_VARIABLE amp_ext_IS_BUILT)
# A wheel for several releases of torch has a library for each, and the kernels in lib.
file(GLOB amp_ext_LIBRARIES "${amp_ext_PREFIX}/lib/libamp_ext.so"
  "${amp_ext_PREFIX}/torch[0-9]*/lib/libamp_ext.so")
if(NOT amp_ext_IS_BUILT OR NOT amp_ext_LIBRARIES)
  set(amp_ext_FOUND FALSE)
  set(amp_ext_NOT_FOUND_MESSAGE "${amp_ext_PREFIX}/lib/libamp_ext.so is not there, or what its build \
notes of it: build amp_ext first (`make build` in its sources, or pip install)")
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(Torch HINTS "${amp_ext_PREFIX}/../torch" "${amp_ext_TORCH_FOLDER}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" amp_ext_TORCH_FOUND "${Torch_VERSION}")
list(TRANSFORM amp_ext_TORCH_VERSION REPLACE "^([0-9]+\\.[0-9]+).*" "\\1"
  OUTPUT_VARIABLE amp_ext_TORCH_BUILT)
if(NOT amp_ext_TORCH_FOUND IN_LIST amp_ext_TORCH_BUILT)
  string(REPLACE ";" ", " amp_ext_TORCH_VERSION "${amp_ext_TORCH_VERSION}")
  string(REPLACE ";" ", " amp_ext_TORCH_BUILT "${amp_ext_TORCH_BUILT}")
  set(amp_ext_FOUND FALSE)
  set(amp_ext_NOT_FOUND_MESSAGE "this amp_ext was built for torch ${amp_ext_TORCH_VERSION}, but \
find_package(Torch) found ${Torch_VERSION} in ${Torch_DIR}, and torch's C++ interface changes from \
release to release: set Torch_DIR to a torch ${amp_ext_TORCH_BUILT}, or take the sources of amp_ext \
with add_subdirectory()")
  return()
endif()
if(amp_ext_CUDA_VERSION AND NOT TARGET torch_cuda)
  set(amp_ext_FOUND FALSE)
  set(amp_ext_NOT_FOUND_MESSAGE "this amp_ext was built for torch ${amp_ext_TORCH_VERSION} with CUDA \
${amp_ext_CUDA_VERSION}, but the torch in ${Torch_DIR} has no CUDA: set Torch_DIR to one that has, or \
build amp_ext for that one")
  return()
endif()

# torch lists libraries of the CUDA toolkit that a program does not need, found or not.
set(amp_ext_TORCH_LIBRARIES ${TORCH_LIBRARIES})
list(FILTER amp_ext_TORCH_LIBRARIES EXCLUDE REGEX "-NOTFOUND$")

set(amp_ext_LIBRARY "${amp_ext_PREFIX}/torch${amp_ext_TORCH_FOUND}/lib/libamp_ext.so")
if(NOT EXISTS "${amp_ext_LIBRARY}")
  set(amp_ext_LIBRARY "${amp_ext_PREFIX}/lib/libamp_ext.so")
endif()
add_library(amp_ext::amp_ext SHARED IMPORTED)
set_target_properties(amp_ext::amp_ext PROPERTIES
  IMPORTED_LOCATION "${amp_ext_LIBRARY}"
  IMPORTED_SONAME libamp_ext.so
  INTERFACE_INCLUDE_DIRECTORIES "${amp_ext_PREFIX}/include"
  INTERFACE_LINK_LIBRARIES "${amp_ext_TORCH_LIBRARIES}")
get_target_property(amp_ext_STANDARD torch CXX_STANDARD)  # which torch asks for, but does not hand on
if(amp_ext_STANDARD)
  set_target_properties(amp_ext::amp_ext PROPERTIES
    INTERFACE_COMPILE_FEATURES "cxx_std_${amp_ext_STANDARD}")
endif()

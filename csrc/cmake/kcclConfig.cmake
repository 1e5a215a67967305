# What find_package(kccl) of CMake finds: the target kccl::kccl, which is headers only.
#
#     cmake -Dkccl_DIR="$(kccl cmake-dir)" ...
#
#     find_package(kccl CONFIG REQUIRED)
#     target_link_libraries(mine PRIVATE kccl::kccl)
#
# kccl::cpu is for <kccl/cpu.hpp>: ranks on CPUs, by threads.
# <kccl/host.hpp> calls CUDA's driver: find_package(kccl CONFIG REQUIRED COMPONENTS cuda_driver), and link with
# kccl::cuda_driver besides. That works on a machine without a driver, too.
if(NOT TARGET kccl::kccl)
  add_library(kccl::kccl INTERFACE IMPORTED)
  get_filename_component(kccl_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  target_include_directories(kccl::kccl INTERFACE "${kccl_INCLUDE_DIR}")
  target_compile_features(kccl::kccl INTERFACE cxx_std_20)
  # CMake refuses features of a language that is not enabled, and before 3.26 knows no C++20 of nvcc's.
  get_property(kccl_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(kccl::kccl INTERFACE cuda_std_20)
  elseif("CUDA" IN_LIST kccl_languages)
    target_compile_options(kccl::kccl INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  endif()
  unset(kccl_languages)
endif()
if(NOT TARGET kccl::cpu)
  add_library(kccl::cpu INTERFACE IMPORTED)
  target_link_libraries(kccl::cpu INTERFACE kccl::kccl)
  target_compile_options(kccl::cpu INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-pthread>")
  target_link_options(kccl::cpu INTERFACE -pthread)
endif()
foreach(kccl_COMPONENT IN LISTS kccl_FIND_COMPONENTS)
  if(kccl_COMPONENT STREQUAL "cuda_driver")
    include("${CMAKE_CURRENT_LIST_DIR}/kccl_cuda_driver.cmake")
  else()
    set(kccl_FOUND FALSE)
    set(kccl_NOT_FOUND_MESSAGE "kccl has no component ${kccl_COMPONENT}, only cuda_driver")
  endif()
endforeach()

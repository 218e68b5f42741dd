# Finds the TVM and tvm-ffi of the Python that runs the build. Defines
#   tvm_ffi::header, tvm_ffi::shared   tvm-ffi's own CMake targets
#   tvm_compiler                       libtvm_compiler of the installed TVM package
find_package(Python REQUIRED COMPONENTS Interpreter)

execute_process(
  COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --cmakedir
  OUTPUT_VARIABLE tvm_ffi_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_package(tvm_ffi CONFIG REQUIRED)

# Found without importing TVM, which would load all of its libraries (and every installed plugin).
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; print(u.find_spec('tvm').submodule_search_locations[0], end='')"
  OUTPUT_VARIABLE tvm_package_dir
  COMMAND_ERROR_IS_FATAL ANY)
find_library(tvm_compiler_library NAMES tvm_compiler PATHS "${tvm_package_dir}/lib" NO_DEFAULT_PATH REQUIRED)

add_library(tvm_compiler SHARED IMPORTED)
set_target_properties(tvm_compiler PROPERTIES IMPORTED_LOCATION "${tvm_compiler_library}")
find_library(tvm_runtime_library NAMES tvm_runtime PATHS "${tvm_package_dir}/lib" NO_DEFAULT_PATH REQUIRED)

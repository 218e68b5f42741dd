# embed_source_digests(target folder pattern...): the library says which sources it was built from, as the C string
# `tvm_ext_source_digests`: a line "PATH SHA-256" for each file of FOLDER that matches a pattern, with its path below
# tvm_ext/csrc. tvm_ext/_native.py compares them with the sources beside the package, where there are any.
function(embed_source_digests target folder)
  set(root "${PROJECT_SOURCE_DIR}/tvm_ext/csrc")
  list(TRANSFORM ARGN PREPEND "${folder}/" OUTPUT_VARIABLE patterns)
  file(GLOB paths CONFIGURE_DEPENDS RELATIVE "${root}" ${patterns})
  set(digests "")
  foreach(path IN LISTS paths)
    file(SHA256 "${root}/${path}" digest)
    string(APPEND digests "${path} ${digest}\\n")
    # Digests are taken while CMake configures, which a changed source has to bring about.
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${root}/${path}")
  endforeach()
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/${target}_source_digests.cc")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/source_digests.cc.in" "${generated}" @ONLY)
  target_sources(${target} PRIVATE "${generated}")
endfunction()

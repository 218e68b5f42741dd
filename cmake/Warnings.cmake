# enable_strict_warnings(target): warnings for our own sources; headers of others are included as system headers.
function(enable_strict_warnings target)
  if(MSVC)
    target_compile_options(${target} PRIVATE /W4)
  else()
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  endif()
endfunction()

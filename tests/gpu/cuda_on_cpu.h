// CUDA's words for a C++ compiler: a CPU runs the source that NVRTC compiles, one thread after the other, in the order
// that the caller gives. It has only what the kernels use. A kernel that uses more does not compile; one with a barrier
// (__syncthreads) could not run one thread after the other.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline

struct dim3 {
  unsigned int x;
};

static dim3 gridDim, blockDim, blockIdx, threadIdx;

// The launch ends where a GPU would fault or numbers overflow. g++ and clang++ call these there
// (-fsanitize=alignment,signed-integer-overflow), before the access is made.
static std::jmp_buf end_of_launch;

extern "C" {
void __ubsan_handle_type_mismatch_v1(void*, void*) { std::longjmp(end_of_launch, 1); }
void __ubsan_handle_add_overflow(void*, void*, void*) { std::longjmp(end_of_launch, 1); }
void __ubsan_handle_sub_overflow(void*, void*, void*) { std::longjmp(end_of_launch, 1); }
void __ubsan_handle_mul_overflow(void*, void*, void*) { std::longjmp(end_of_launch, 1); }
void __ubsan_handle_divrem_overflow(void*, void*, void*) { std::longjmp(end_of_launch, 1); }
}

namespace cuda_on_cpu {

template <class... Parameters, std::size_t... Index>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Index...>) {
  kernel(*static_cast<Parameters*>(arguments[Index])...);
}

// As cuLaunchKernel: arguments are passed by address and read as the kernel declares them. False if a thread faulted.
template <class... Parameters>
bool launch(void (*kernel)(Parameters...), void** arguments, int num_groups, int num_threads, const int* order) {
  if (setjmp(end_of_launch) != 0) return false;
  gridDim.x = num_groups;
  blockDim.x = num_threads;
  for (int turn = 0; turn < num_groups * num_threads; ++turn) {
    blockIdx.x = order[turn] / num_threads;
    threadIdx.x = order[turn] % num_threads;
    call(kernel, arguments, std::index_sequence_for<Parameters...>{});
  }
  return true;
}

}  // namespace cuda_on_cpu

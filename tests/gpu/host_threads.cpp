// The kernels' code on a CPU: every thread of every group in turn, in the order given, by the very functions that
// NVRTC compiles. Built and called by tests/gpu/test_host_threads.py.
#include "kv_copy.h"

template <class Body>
static void in_order(const int* order, int num_groups, int num_threads, const Body& body) {
  for (int turn = 0; turn < num_groups * num_threads; ++turn) {
    const kv::Place place = {order[turn] / num_threads, num_groups, order[turn] % num_threads, num_threads};
    body(place);
  }
}

#define KV_HOST(SIZE)                                                                                                 \
  extern "C" void offload_tokens_##SIZE(const unsigned char* gpu_pool, unsigned char* host_pool, const int* tokens,    \
                                        int num_tokens, long long block_bytes, long long layer_stride, int num_layers, \
                                        int num_heads, int block_tokens, int content_bytes, const int* order,          \
                                        int num_groups, int num_threads) {                                             \
    const kv::PoolShape shape = {block_bytes, layer_stride, num_layers, num_heads, block_tokens, content_bytes};       \
    const auto* rows = reinterpret_cast<const kv::TokenRow*>(tokens);                                                  \
    in_order(order, num_groups, num_threads, [&](const kv::Place& place) {                                             \
      kv::offload_tokens<kv::Word##SIZE>(gpu_pool, host_pool, rows, num_tokens, shape, place);                         \
    });                                                                                                                \
  }

KV_HOST(16)
KV_HOST(4)
KV_HOST(1)

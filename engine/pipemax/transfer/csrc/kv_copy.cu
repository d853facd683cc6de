// The kernels: one per function of kv_copy.h (which stands before this when NVRTC compiles it) and word size.
// The host pool is pinned memory mapped into the device. Launch: any number of blocks, one dimension.

namespace {

__device__ kv::Place place() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(threadIdx.x),
          static_cast<int>(blockDim.x)};
}

}  // namespace

#define KV_KERNELS(SIZE)                                                                                               \
  extern "C" __global__ void offload_tokens_##SIZE(                                                                    \
      const unsigned char* __restrict__ gpu_pool, unsigned char* __restrict__ host_pool,                               \
      const kv::TokenRow* __restrict__ tokens, int num_tokens, kv::Bytes block_bytes, kv::Bytes layer_stride,          \
      int num_layers, int num_heads, int block_tokens, int content_bytes) {                                            \
    const kv::PoolShape shape = {block_bytes, layer_stride, num_layers, num_heads, block_tokens, content_bytes};       \
    kv::offload_tokens<kv::Word##SIZE>(gpu_pool, host_pool, tokens, num_tokens, shape, place());                       \
  }

KV_KERNELS(16)
KV_KERNELS(4)
KV_KERNELS(1)

// What one thread copies; kv_copy.cu wraps it into kernels and is compiled right behind it. A test compiles both for
// the CPU and runs them thread after thread (tests/gpu/kernels_on_cpu.py), so they use little of CUDA.
//
// Pools are block-first (pipemax/transfer/layout.py):
//   pool + block * block_bytes + layer * layer_stride + head * head_bytes + slot * content_bytes
// Blocks and slots were checked against both pools before the launch: nothing is checked here.

namespace kv {

using Bytes = long long;

// As many bytes as one thread moves at once. Addresses must be multiples of the size.
struct alignas(16) Word16 {
  unsigned int part[4];
};
using Word4 = unsigned int;
using Word1 = unsigned char;

// Where a token's KV is, and where its replica goes: one row of an int32 table (num_tokens, 3).
struct TokenRow {
  int gpu_block;
  int slot;
  int host_block;
};

struct PoolShape {
  Bytes block_bytes;
  Bytes layer_stride;
  int num_layers;
  int num_heads;
  int block_tokens;
  int content_bytes;
};

// A thread's place: its group (CUDA's block) among the groups, itself among the group's threads.
struct Place {
  int group;
  int num_groups;
  int thread;
  int num_threads;
};

// Every layer's KV of single tokens, GPU to host. A group takes a token's part of one layer at a time; its threads
// take the words of all heads, so that a warp writes one head's run of content in whole PCIe packets.
template <class Word>
__device__ __forceinline__ void offload_tokens(const unsigned char* gpu_pool, unsigned char* host_pool,
                                               const TokenRow* tokens, int num_tokens, const PoolShape& shape,
                                               const Place& place) {
  const int words_per_run = shape.content_bytes / static_cast<int>(sizeof(Word));
  const int num_words = shape.num_heads * words_per_run;
  const Bytes head_bytes = static_cast<Bytes>(shape.block_tokens) * shape.content_bytes;
  const Bytes num_parts = static_cast<Bytes>(num_tokens) * shape.num_layers;
  for (Bytes part = place.group; part < num_parts; part += place.num_groups) {
    const TokenRow token = tokens[part / shape.num_layers];
    const Bytes in_block =
        (part % shape.num_layers) * shape.layer_stride + static_cast<Bytes>(token.slot) * shape.content_bytes;
    const unsigned char* source = gpu_pool + token.gpu_block * shape.block_bytes + in_block;
    unsigned char* target = host_pool + token.host_block * shape.block_bytes + in_block;
    for (int word = place.thread; word < num_words; word += place.num_threads) {
      const int head = word / words_per_run;
      const Bytes offset = head * head_bytes + (word - head * words_per_run) * static_cast<Bytes>(sizeof(Word));
      *reinterpret_cast<Word*>(target + offset) = *reinterpret_cast<const Word*>(source + offset);
    }
  }
}

}  // namespace kv

// TensorFlow 2.21's wheel no longer exports AsGpuStreamValue, by which Horovod asks for the CUDA stream of an
// operation. The stream itself tells it. Compiled into Horovod in the place of a file that is empty.
#include <cuda_runtime.h>

#include "xla/stream_executor/stream.h"

namespace stream_executor {
namespace gpu {

cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}

}  // namespace gpu
}  // namespace stream_executor

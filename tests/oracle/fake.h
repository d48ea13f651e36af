// What the driver program may ask of and tell to the fake CUDA runtime, beside the CUDA functions themselves.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Calls that reached the fake driver since the process began.
struct FakeCalls {
  uint64_t malloc_ok, malloc_oom, free, reserve, unreserve, create_ok, create_oom, release, map, unmap, event_record,
      event_query, event_sync, stream_sync, device_sync;
};

void fake_set_total(size_t bytes);          // memory of the only device; call before the first allocation
void fake_busy(void* stream);               // work recorded from now on does not finish by itself
void fake_idle(void* stream);               // everything recorded has finished, later work finishes at once
void fake_capture(void* stream, uint64_t id);  // 0 = the stream is not capturing
size_t fake_used();                         // bytes handed out by cudaMalloc and cuMemCreate
const FakeCalls* fake_calls();
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda that does nothing: on it, Triton's own launcher runs, and the host's time is measured, without a GPU. */
#include <stddef.h>
#include <stdint.h>

typedef int Result;

static long launches = 0;
long stub_launches(void) { return launches; }

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 12080; return 0; }
Result cuGetErrorString(Result error, const char **text) { *text = "stub"; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
/* Shared memory of a block, threads of a warp, multiprocessors, and registers: those of an H100. */
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 97 ? 232448 : attribute == 10 ? 32 : attribute == 16 ? 132 : 65536;
  return 0;
}
Result cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetDevice(int *device) { *device = 0; return 0; }
Result cuCtxGetLimit(size_t *size, int limit) { *size = 0; return 0; }
Result cuCtxSetLimit(int limit, size_t size) { return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
Result cuModuleLoadData(void **module, const void *image) { *module = (void *)2; return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)3; return 0; }
Result cuModuleUnload(void *module) { return 0; }
Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int config) { return 0; }
Result cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
Result cuTensorMapEncodeTiled(void *map, ...) { return 0; }
Result cuTensorMapEncodeIm2col(void *map, ...) { return 0; }
/* The addresses of a CPU are as good as any. */
Result cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
Result cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { ++launches; return 0; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned a, unsigned b,
                      unsigned shared, void *stream, void **parameters, void **extra) {
  ++launches;
  return 0;
}

/* Enough of libcuda for Triton to load kernels and launch them nowhere: a launch is written down. */
#include "cuda.h"
#include <string.h>

#define PARAMETERS 8

typedef struct {
  unsigned long long launches, grid[3], threads, shared, stream, function, parameters[PARAMETERS];
} Record;

static Record record;
static int parameters_expected;

const Record *fake_cuda_record(void) { return &record; }
void fake_cuda_expect(int parameters) { parameters_expected = parameters; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  unsigned long long launches = record.launches + 1;
  memset(&record, 0, sizeof record);
  record.launches = launches;
  record.grid[0] = config->gridDimX;
  record.grid[1] = config->gridDimY;
  record.grid[2] = config->gridDimZ;
  record.threads = config->blockDimX;
  record.shared = config->sharedMemBytes;
  record.stream = (unsigned long long)config->hStream;
  record.function = (unsigned long long)function;
  for (int i = 0; i < parameters_expected; i++) /* Four bytes: all have them, and most no more. */
    memcpy(&record.parameters[i], parameters[i], 4);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)0x10;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x20;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)0x30;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the fake libcuda";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

/* A tensor map is written down too, and holds the tensor's address. */
#define MAPS 8
typedef struct {
  unsigned long long address, columns, rows, row_bytes, box_columns, box_rows;
} Map;

static Map maps[MAPS];
static int maps_made;

const Map *fake_cuda_maps(void) { return maps; }

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (rank != 2 || maps_made == MAPS)
    return CUDA_ERROR_INVALID_VALUE;
  maps[maps_made++] = (Map){(unsigned long long)address, sizes[0], sizes[1], strides[0], box[0], box[1]};
  memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}

/* What Triton's modules link against besides, and does not come to. */
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_ERROR_UNKNOWN; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_ERROR_UNKNOWN; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_UNKNOWN; }
CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_ERROR_UNKNOWN; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_ERROR_UNKNOWN; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_ERROR_UNKNOWN; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return CUDA_ERROR_UNKNOWN; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }

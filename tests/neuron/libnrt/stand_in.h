/* A stand-in for libnrt: the calls of AWS's headers on host memory, and a toy model in place of a NeuronCore.
 *
 * `recorded.h` is made from the recorded signatures, so a call with another prototype does not compile. What the
 * environment says of the host:
 *
 * NEURON_STAND_IN_DIRECTORY   files that processes lock: dev/neuronN for core N, one for nrt_init
 * NEURON_STAND_IN_CORES       logical cores of the host
 * NEURON_STAND_IN_FIRST_CORE  number of the first of them: a container may have 24 to 31 only
 * NEURON_STAND_IN_FAMILY      `family` of nrt_get_instance_info
 * NEURON_STAND_IN_HBM_BYTES   memory of a core
 * NEURON_STAND_IN_INTEGERS    1: tensors of float32 are reported as int32
 * NEURON_STAND_IN_FLAT        1: tensors are reported with one dimension
 * NEURON_STAND_IN_FAULTS      a file of lines "CALL STATUS", which that call then returns, or "CALL wait PATH", upon which
 *                          the call waits until the path exists
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    NRT_SUCCESS = 0,
    NRT_FAILURE = 1,
    NRT_INVALID = 2,
    NRT_INVALID_HANDLE = 3,
    NRT_RESOURCE = 4,
    NRT_TIMEOUT = 5,
    NRT_LOAD_NOT_ENOUGH_NC = 9,
    NRT_UNSUPPORTED_NEFF_VERSION = 10,
    NRT_UNINITIALIZED = 13,
    NRT_CLOSED = 14,
    NRT_EXEC_BAD_INPUT = 1002,
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
    NRT_EXEC_OOB = 1006,
} NRT_STATUS;

typedef enum { NRT_TENSOR_PLACEMENT_DEVICE = 0, NRT_TENSOR_PLACEMENT_HOST = 1 } nrt_tensor_placement_t;
typedef enum { NRT_FRAMEWORK_TYPE_NO_FW = 1 } nrt_framework_type_t;
typedef enum { NRT_TENSOR_USAGE_INPUT = 0, NRT_TENSOR_USAGE_OUTPUT = 1 } nrt_tensor_usage_t;
typedef enum {
    NRT_DTYPE_INT8 = 0x2,
    NRT_DTYPE_BFLOAT16 = 0x6,
    NRT_DTYPE_INT32 = 0x8,
    NRT_DTYPE_FLOAT32 = 0xA,
    NRT_DTYPE_FP8_E4 = 0xE,
    NRT_DTYPE_FP8_E5 = 0xF,
} nrt_dtype_t;

typedef struct nrt_model nrt_model_t;
typedef struct nrt_tensor nrt_tensor_t;
typedef struct nrt_tensor_set nrt_tensor_set_t;
typedef struct nrt_tensor_batch nrt_tensor_batch_t;
typedef struct nrt_tensor_device_allocation_info nrt_tensor_device_allocation_info_t;
typedef struct nrt_ucode_info nrt_ucode_info;
typedef struct nrt_model_info nrt_model_info_t;
typedef void (*NRT_ASYNC_EXEC_STATUS_CALLBACK)(void *, uint32_t, uint32_t, uint64_t, NRT_STATUS);

typedef struct {
    uint32_t family;
    uint32_t size;
    char arch_name[16];
    char device_revision[8];
} nrt_instance_info_t;

typedef struct {
    size_t bytes_used;
    size_t bytes_limit;
} nrt_vnc_memory_stats_t;

typedef struct {
    char name[256];
    nrt_tensor_usage_t usage;
    size_t size;
    nrt_dtype_t dtype;
    uint32_t *shape;
    uint32_t ndim;
} nrt_tensor_info_t;

typedef struct {
    uint64_t tensor_count;
    nrt_tensor_info_t tensor_array[];
} nrt_tensor_info_array_t;

typedef struct {
    uint64_t rt_major, rt_minor, rt_patch, rt_maintenance;
    char rt_detail[128];
    char git_hash[64];
} nrt_version_t;

#include "recorded.h"

#define MAX_TENSORS 256
#define MAX_DIMS 8

struct nrt_tensor {
    uint8_t *data;
    size_t size;
    nrt_tensor_t *source; /* of a slice */
};

typedef struct entry {
    struct entry *next;
    nrt_tensor_t *tensor;
    char name[256];
} entry_t;

struct nrt_tensor_set {
    entry_t *first;
};

/* One line of the NEFF's file toy.txt: which tensor of the toy an input or output is. */
typedef struct {
    nrt_tensor_usage_t usage;
    char name[256];
    nrt_dtype_t dtype;
    uint32_t ndim;
    uint32_t shape[MAX_DIMS];
    uint32_t num_items;
    size_t size;
    char role[256];
    char alias[256]; /* "-": none */
    nrt_tensor_t *bound;
} toy_tensor_t;

struct nrt_model {
    int32_t num_tensors;
    size_t bytes;
    char *answer; /* what every run returns, in place of what the toy computes; NULL: the toy computes */
    toy_tensor_t tensors[MAX_TENSORS];
};

#define INTERNAL __attribute__((visibility("hidden")))

/* Runs the model once on the bound tensors. */
INTERNAL NRT_STATUS run_toy(nrt_model_t *model);
/* Makes this process one of a group of ranks that meet at NEURON_RT_ROOT_COMM_ID. */
INTERNAL NRT_STATUS join_ranks(uint32_t rank, uint32_t count);
/* Adds up `values` of all ranks; one rank alone keeps its own. */
INTERNAL NRT_STATUS sum_over_ranks(float *values, uint32_t count);
/* Puts `values` of all ranks behind each other. */
INTERNAL NRT_STATUS gather_from_ranks(const float *values, uint32_t count, float *gathered);
/* Finds a file in a tar archive in gzip whose blocks are stored; returns a copy that ends with a zero byte, or NULL. */
INTERNAL char *read_member(const uint8_t *archive, size_t size, const char *name);

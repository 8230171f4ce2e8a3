/* The calls; see stand_in.h. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "stand_in.h"

#define MAX_CORES 128
/* What a model, a set and an entry of a set count as, so that none is lost unseen. */
#define COUNTED_BYTES 16
/* How long nrt_init takes. Of two processes that are in it at the same time, one fails, as the real one does. */
#define INIT_US 50000

static enum { STARTED, INITIALIZED, CLOSED } phase = STARTED;
static int locks[MAX_CORES];
static uint32_t num_visible;
static size_t used_bytes;

static long number_of(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static size_t limit_bytes(void) { return (size_t)number_of("NEURON_STAND_IN_HBM_BYTES", 1 << 24); }

/* Takes host memory, of which some bytes count as the core's. */
static void *take(size_t size, size_t counted) {
    if (used_bytes + counted > limit_bytes())
        return NULL;
    void *memory = calloc(1, size ? size : 1);
    used_bytes += memory ? counted : 0;
    return memory;
}

static void give_back(void *memory, size_t counted) {
    if (memory)
        used_bytes -= counted;
    free(memory);
}

static NRT_STATUS wait_for(const char *path) {
    for (int tries = 0; access(path, F_OK) != 0; tries++, usleep(1000))
        if (tries == 30000)
            return NRT_TIMEOUT;
    return NRT_SUCCESS;
}

/* What the file of faults says of a call. */
static NRT_STATUS fault_of(const char *call) {
    const char *path = getenv("NEURON_STAND_IN_FAULTS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char name[128], what[128], rest[1024], line[1400];
    int status = NRT_SUCCESS;
    while (file && fgets(line, sizeof line, file)) {
        int count = sscanf(line, "%127s %127s %1023s", name, what, rest);
        if (count < 2 || strcmp(name, call) != 0)
            continue;
        if (count == 3 && strcmp(what, "wait") == 0)
            status = wait_for(rest);
        else
            status = (int)strtol(what, NULL, 10);
    }
    if (file)
        fclose(file);
    return (NRT_STATUS)status;
}

#define BEGIN_ANY_TIME()                                                                                               \
    do {                                                                                                               \
        NRT_STATUS fault = fault_of(__func__);                                                                         \
        if (fault != NRT_SUCCESS)                                                                                      \
            return fault;                                                                                              \
    } while (0)
#define BEGIN()                                                                                                        \
    do {                                                                                                               \
        if (phase != INITIALIZED)                                                                                      \
            return phase == CLOSED ? NRT_CLOSED : NRT_UNINITIALIZED;                                                   \
        BEGIN_ANY_TIME();                                                                                              \
    } while (0)

/* Opens a file of the host and locks it; returns its descriptor, -1 if another process has it locked. */
static int lock_file(const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", getenv("NEURON_STAND_IN_DIRECTORY"), name);
    int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Each core is a device of its own. */
static NRT_STATUS lock_core(long core) {
    char name[64];
    snprintf(name, sizeof name, "dev/neuron%ld", core);
    int fd = lock_file(name);
    if (fd < 0)
        return NRT_FAILURE;
    locks[num_visible++] = fd;
    return NRT_SUCCESS;
}

static void unlock_cores(void) {
    while (num_visible)
        close(locks[--num_visible]);
}

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, const char *fal_version) {
    BEGIN_ANY_TIME();
    if (phase != STARTED || framework != NRT_FRAMEWORK_TYPE_NO_FW || *fw_version || *fal_version)
        return phase == CLOSED ? NRT_CLOSED : NRT_INVALID;
    /* The documents name three defaults. */
    if (!getenv("NEURON_RT_EXEC_TIMEOUT"))
        return NRT_INVALID;
    const char *visible = getenv("NEURON_RT_VISIBLE_CORES");
    long first = 0, last = 0, start = number_of("NEURON_STAND_IN_FIRST_CORE", 0);
    long total = number_of("NEURON_STAND_IN_CORES", 2);
    int count = visible ? sscanf(visible, "%ld-%ld", &first, &last) : 0;
    if (count < 1)
        return NRT_INVALID;
    if (count == 1)
        last = first;
    if (first < start || last < first || last >= start + total || last - first >= MAX_CORES)
        return NRT_INVALID;
    int alone = lock_file("initializing");
    if (alone < 0)
        return NRT_FAILURE;
    usleep(INIT_US);
    close(alone);
    for (long core = first; core <= last; core++) {
        NRT_STATUS status = lock_core(core);
        if (status != NRT_SUCCESS) {
            unlock_cores();
            return status;
        }
    }
    phase = INITIALIZED;
    return NRT_SUCCESS;
}

void nrt_close(void) {
    unlock_cores();
    phase = CLOSED;
}

NRT_STATUS nrt_get_total_vnc_count(uint32_t *vnc_count) {
    BEGIN_ANY_TIME();
    *vnc_count = (uint32_t)number_of("NEURON_STAND_IN_CORES", 2);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_visible_vnc_count(uint32_t *vnc_count) {
    BEGIN();
    *vnc_count = num_visible;
    return NRT_SUCCESS;
}

/* The headers do not say whether it may be called earlier. */
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t instance_info_len) {
    BEGIN();
    if (instance_info_len < sizeof *info)
        return NRT_INVALID;
    memset(info, 0, sizeof *info);
    info->family = (uint32_t)number_of("NEURON_STAND_IN_FAMILY", 5);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t stats_size_in,
                                    size_t *stats_size_out) {
    BEGIN();
    if (vnc >= num_visible || stats_size_in < sizeof *stats)
        return NRT_INVALID;
    *stats = (nrt_vnc_memory_stats_t){used_bytes, limit_bytes()};
    *stats_size_out = sizeof *stats;
    return NRT_SUCCESS;
}

static bool is_float8(nrt_dtype_t dtype) { return dtype == NRT_DTYPE_FP8_E4 || dtype == NRT_DTYPE_FP8_E5; }

static size_t item_size(nrt_dtype_t dtype) {
    if (dtype == NRT_DTYPE_INT8 || is_float8(dtype))
        return 1;
    return dtype == NRT_DTYPE_BFLOAT16 ? 2 : 4;
}

static bool is_set(const char *name) { return number_of(name, 0) != 0; }

static NRT_STATUS parse_toy(char *text, nrt_model_t *model) {
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (model->num_tensors == MAX_TENSORS)
            return NRT_INVALID;
        toy_tensor_t *one = &model->tensors[model->num_tensors++];
        int at = 0, dtype = 0, more = 0;
        char usage[16];
        if (sscanf(line, "%15s %255s %255s %255s %d %u%n", usage, one->name, one->role, one->alias, &dtype, &one->ndim,
                   &at) != 6 ||
            one->ndim > MAX_DIMS)
            return NRT_INVALID;
        one->usage = strcmp(usage, "output") == 0 ? NRT_TENSOR_USAGE_OUTPUT : NRT_TENSOR_USAGE_INPUT;
        one->dtype = (nrt_dtype_t)dtype;
        one->num_items = 1;
        for (uint32_t i = 0; i < one->ndim; i++, at += more) {
            if (sscanf(line + at, " %u%n", &one->shape[i], &more) != 1)
                return NRT_INVALID;
            one->num_items *= one->shape[i];
        }
        one->size = item_size(one->dtype) * one->num_items;
    }
    return NRT_SUCCESS;
}

const char *nrt_get_status_as_str(NRT_STATUS status) { return status == NRT_SUCCESS ? "NRT_SUCCESS" : "another"; }

NRT_STATUS nrt_get_version(nrt_version_t *ver, size_t size) {
    BEGIN_ANY_TIME();
    if (size < sizeof *ver)
        return NRT_INVALID;
    *ver = (nrt_version_t){2, 34, 10, 0, "stand-in", "none"};
    return NRT_SUCCESS;
}

NRT_STATUS nrt_load(const void *neff_bytes, size_t size, int32_t vnc, int32_t vnc_count, nrt_model_t **model) {
    BEGIN();
    const uint8_t *neff = neff_bytes;
    uint64_t header[4];
    uint32_t lnc;
    if (size < 1024)
        return NRT_INVALID;
    memcpy(header, neff, sizeof header);
    memcpy(&lnc, neff + 552, sizeof lnc);
    if (header[1] != 1024 || header[1] + header[2] != size)
        return NRT_INVALID;
    if (header[3] != 2)
        return NRT_UNSUPPORTED_NEFF_VERSION;
    if ((long)lnc != number_of("NEURON_LOGICAL_NC_CONFIG", 2))
        return NRT_INVALID;
    if (vnc < 0 || (uint32_t)vnc >= num_visible || vnc_count > 1)
        return NRT_LOAD_NOT_ENOUGH_NC;
    char *text = read_member(neff + 1024, size - 1024, "toy.txt");
    if (!text)
        return NRT_INVALID;
    nrt_model_t *made = take(sizeof *made, COUNTED_BYTES);
    NRT_STATUS status = made ? parse_toy(text, made) : NRT_RESOURCE;
    free(text);
    if (made)
        made->answer = read_member(neff + 1024, size - 1024, "answer.bin");
    if (status != NRT_SUCCESS) {
        give_back(made, COUNTED_BYTES);
        return status;
    }
    *model = made;
    return NRT_SUCCESS;
}

NRT_STATUS nrt_load_collectives(const void *neff_bytes, size_t size, int32_t vnc, int32_t vnc_count,
                                uint32_t ctx_device_id, uint32_t ctx_device_count, nrt_model_t **model) {
    BEGIN();
    NRT_STATUS status = join_ranks(ctx_device_id, ctx_device_count);
    return status != NRT_SUCCESS ? status : nrt_load(neff_bytes, size, vnc, vnc_count, model);
}

NRT_STATUS nrt_unload(nrt_model_t *model) {
    BEGIN();
    free(model->answer);
    give_back(model, COUNTED_BYTES);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **tensor_info) {
    BEGIN();
    nrt_tensor_info_array_t *made =
        calloc(1, sizeof *made + sizeof(nrt_tensor_info_t) * (size_t)model->num_tensors);
    made->tensor_count = (uint64_t)model->num_tensors;
    for (int i = 0; i < model->num_tensors; i++) {
        toy_tensor_t *one = &model->tensors[i];
        nrt_tensor_info_t *info = &made->tensor_array[i];
        memcpy(info->name, one->name, sizeof info->name);
        info->usage = one->usage;
        info->size = one->size;
        /* So says the real one. */
        info->dtype = is_float8(one->dtype) ? NRT_DTYPE_INT8 : one->dtype;
        info->ndim = one->ndim;
        info->shape = one->shape;
        if (is_set("NEURON_STAND_IN_INTEGERS") && one->dtype == NRT_DTYPE_FLOAT32)
            info->dtype = NRT_DTYPE_INT32;
        if (is_set("NEURON_STAND_IN_FLAT")) {
            info->ndim = 1;
            info->shape = &one->num_items;
        }
    }
    *tensor_info = made;
    return NRT_SUCCESS;
}

NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *tensor_info) {
    BEGIN();
    free(tensor_info);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t tensor_placement, int vnc, size_t size, const char *name,
                               nrt_tensor_t **tensor) {
    BEGIN();
    (void)name;
    if (tensor_placement != NRT_TENSOR_PLACEMENT_DEVICE || vnc < 0 || (uint32_t)vnc >= num_visible)
        return NRT_INVALID;
    uint8_t *data = take(size, size);
    if (!data)
        return NRT_RESOURCE;
    /* A device does not clear memory. */
    memset(data, 0xA5, size);
    *tensor = malloc(sizeof **tensor);
    **tensor = (nrt_tensor_t){data, size, NULL};
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *tensor_source, size_t offset, size_t size, const char *name,
                                     nrt_tensor_t **tensor_slice) {
    BEGIN();
    (void)name;
    if (offset > tensor_source->size || size > tensor_source->size - offset)
        return NRT_INVALID;
    *tensor_slice = malloc(sizeof **tensor_slice);
    **tensor_slice = (nrt_tensor_t){tensor_source->data + offset, size, (nrt_tensor_t *)tensor_source};
    return NRT_SUCCESS;
}

void nrt_tensor_free(nrt_tensor_t **tensor) {
    if (!(*tensor)->source)
        give_back((*tensor)->data, (*tensor)->size);
    free(*tensor);
    *tensor = NULL;
}

size_t nrt_tensor_get_size(const nrt_tensor_t *tensor) { return tensor->size; }

static bool is_outside(const nrt_tensor_t *tensor, size_t offset, size_t size) {
    return offset > tensor->size || size > tensor->size - offset;
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size) {
    BEGIN();
    if (is_outside(tensor, offset, size))
        return NRT_INVALID;
    memcpy(buf, tensor->data + offset, size);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size) {
    BEGIN();
    if (is_outside(tensor, offset, size))
        return NRT_INVALID;
    memcpy(tensor->data + offset, buf, size);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_copy(const nrt_tensor_t *src, size_t src_offset, nrt_tensor_t *dst, size_t dst_offset,
                           size_t size) {
    BEGIN();
    if (is_outside(src, src_offset, size) || is_outside(dst, dst_offset, size))
        return NRT_INVALID;
    memmove(dst->data + dst_offset, src->data + src_offset, size);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_memset(nrt_tensor_t *tensor, uint64_t offset, int value, size_t size) {
    BEGIN();
    if (is_outside(tensor, offset, size))
        return NRT_INVALID;
    memset(tensor->data + offset, value, size);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **result) {
    BEGIN();
    *result = take(sizeof **result, COUNTED_BYTES);
    return *result ? NRT_SUCCESS : NRT_RESOURCE;
}

void nrt_destroy_tensor_set(nrt_tensor_set_t **tensor_set) {
    for (entry_t *entry = (*tensor_set)->first, *next; entry; entry = next) {
        next = entry->next;
        give_back(entry, COUNTED_BYTES);
    }
    give_back(*tensor_set, COUNTED_BYTES);
    *tensor_set = NULL;
}

static entry_t *find_entry(const nrt_tensor_set_t *set, const char *name) {
    entry_t *entry = set->first;
    while (entry && strcmp(entry->name, name) != 0)
        entry = entry->next;
    return entry;
}

NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *tensor_set, const char *tensor_name, nrt_tensor_t *tensor) {
    BEGIN();
    entry_t *entry = find_entry(tensor_set, tensor_name);
    if (!entry) {
        if (strlen(tensor_name) >= sizeof entry->name)
            return NRT_INVALID;
        entry = take(sizeof *entry, COUNTED_BYTES);
        if (!entry)
            return NRT_RESOURCE;
        strcpy(entry->name, tensor_name);
        entry->next = tensor_set->first;
        tensor_set->first = entry;
    }
    entry->tensor = tensor;
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t *tensor_set, const char *tensor_name,
                                          nrt_tensor_t **tensor) {
    BEGIN();
    entry_t *entry = find_entry(tensor_set, tensor_name);
    if (!entry)
        return NRT_FAILURE;
    *tensor = entry->tensor;
    return NRT_SUCCESS;
}

/* Binds every tensor of the model to the sets' tensor of its name. State that a step writes must be one tensor. */
static NRT_STATUS bind(nrt_model_t *model, const nrt_tensor_set_t *inputs, const nrt_tensor_set_t *outputs) {
    for (int i = 0; i < model->num_tensors; i++) {
        toy_tensor_t *one = &model->tensors[i];
        entry_t *entry = find_entry(one->usage == NRT_TENSOR_USAGE_INPUT ? inputs : outputs, one->name);
        if (!entry || entry->tensor->size != one->size)
            return NRT_EXEC_BAD_INPUT;
        one->bound = entry->tensor;
        if (strcmp(one->alias, "-") != 0) {
            entry_t *shared = find_entry(inputs, one->alias);
            if (!shared || shared->tensor != one->bound)
                return NRT_EXEC_BAD_INPUT;
        }
    }
    return NRT_SUCCESS;
}

NRT_STATUS nrt_execute(nrt_model_t *model, const nrt_tensor_set_t *input_set, nrt_tensor_set_t *output_set) {
    BEGIN();
    NRT_STATUS status = bind(model, input_set, output_set);
    return status == NRT_SUCCESS ? run_toy(model) : status;
}

/* Sums and gathers over the processes of a group, in a file that they map. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stand_in.h"

#define MAX_RANKS 8
#define MAX_FLOATS 4096

typedef struct {
    atomic_uint arrived;
    float values[MAX_RANKS][MAX_FLOATS];
} meeting_t;

static meeting_t *meeting;
static uint32_t own_rank, num_ranks = 1;

/* Waits until all ranks have come here as often as this one; NRT_TIMEOUT if one does not. */
static NRT_STATUS meet(long timeout_s) {
    static unsigned times = 0;
    long tries = timeout_s * 10000;
    unsigned all = ++times * num_ranks;
    atomic_fetch_add(&meeting->arrived, 1);
    for (; atomic_load(&meeting->arrived) < all; usleep(100))
        if (tries-- == 0)
            return NRT_TIMEOUT;
    return NRT_SUCCESS;
}

static long step_timeout_s(void) { return strtol(getenv("NEURON_RT_EXEC_TIMEOUT"), NULL, 10); }

NRT_STATUS join_ranks(uint32_t rank, uint32_t count) {
    const char *place = getenv("NEURON_RT_ROOT_COMM_ID");
    if (rank >= count || count > MAX_RANKS || !place)
        return NRT_INVALID;
    if (meeting)
        return rank == own_rank && count == num_ranks ? NRT_SUCCESS : NRT_INVALID;
    char path[1024];
    snprintf(path, sizeof path, "%s/meeting-%s", getenv("NEURON_STAND_IN_DIRECTORY"), place);
    int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *meeting) != 0)
        return NRT_FAILURE;
    meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    own_rank = rank;
    num_ranks = count;
    return meet(60);
}

NRT_STATUS sum_over_ranks(float *values, uint32_t count) {
    float gathered[MAX_RANKS * count];
    NRT_STATUS status = gather_from_ranks(values, count, gathered);
    for (uint32_t i = 0; status == NRT_SUCCESS && i < count; i++) {
        values[i] = 0;
        for (uint32_t rank = 0; rank < num_ranks; rank++)
            values[i] += gathered[rank * count + i];
    }
    return status;
}

NRT_STATUS gather_from_ranks(const float *values, uint32_t count, float *gathered) {
    if (!meeting) {
        memcpy(gathered, values, count * sizeof *values);
        return NRT_SUCCESS;
    }
    if (count > MAX_FLOATS)
        return NRT_INVALID;
    memcpy(meeting->values[own_rank], values, count * sizeof *values);
    NRT_STATUS status = meet(step_timeout_s());
    for (uint32_t rank = 0; status == NRT_SUCCESS && rank < num_ranks; rank++)
        memcpy(gathered + rank * count, meeting->values[rank], count * sizeof *values);
    /* No rank writes again before all have read. */
    return status == NRT_SUCCESS ? meet(step_timeout_s()) : status;
}

/* Reads a file from a tar archive in gzip whose deflate blocks are stored, as gzip.compress(…, 0) makes them. */

#include <stdlib.h>
#include <string.h>

#include "stand_in.h"

static uint8_t *unzip_stored(const uint8_t *data, size_t size, size_t *out_size) {
    /* Ten bytes of header without optional fields, blocks, eight bytes of checksum and size. */
    if (size < 18 || data[0] != 0x1f || data[1] != 0x8b || data[3] != 0)
        return NULL;
    uint8_t *out = malloc(size);
    size_t at = 10, length = 0;
    for (int is_last = 0; !is_last;) {
        if (at + 5 > size || (data[at] & 6) != 0)
            break;
        is_last = data[at] & 1;
        size_t count = data[at + 1] | data[at + 2] << 8;
        at += 5;
        if (at + count > size)
            break;
        memcpy(out + length, data + at, count);
        at += count;
        length += count;
    }
    *out_size = length;
    return out;
}

char *read_member(const uint8_t *archive, size_t size, const char *name) {
    size_t length = 0;
    uint8_t *tar = unzip_stored(archive, size, &length);
    char *found = NULL;
    for (size_t at = 0; tar && !found && at + 512 <= length && tar[at];) {
        size_t count = strtoul((const char *)tar + at + 124, NULL, 8);
        if (at + 512 + count > length)
            break;
        if (strcmp((const char *)tar + at, name) == 0) {
            found = calloc(1, count + 1);
            memcpy(found, tar + at + 512, count);
        }
        at += 512 + (count + 511) / 512 * 512;
    }
    free(tar);
    return found;
}
